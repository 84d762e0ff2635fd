"""Prompts that begin as others did: the same tokens, without reading the beginning again, in bounded memory."""

import dataclasses
import functools
import gc
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gdn_jax as gdn
from gdn_jax.decoder import decoder as gdn_decoder
from gdn_jax.decoder import generate, prefix_cache
from gdn_jax.decoder.generate import new_rows
from gdn_jax.decoder.network import TextNetwork
from gdn_jax.decoder.prefix_cache import CachedPrompts
from gdn_jax.decoder.state import decoder_state_shapes, init_decoder_state
from gdn_jax.decoder.tokenizer import load_tokenizer
from gdn_jax.errors import StateMismatchError
from tests.support import decoders, text_files

CFG = dataclasses.replace(
    decoders.SMALL, layer_types=("linear_attention", "full_attention"), mlp_types=("dense",) * 2, moe=None
)
ROOM = 128
BYTES = 1 << 30
SYSTEM = list(range(20, 45))


@functools.cache
def weights(label="tests/tiny"):
    return decoders.drawn(CFG, label)


def model(**how):
    """One capacity and batch for as much as possible: each combination is compiled."""
    return gdn.Decoder(**({"cfg": CFG, "weights": weights(), "capacity": ROOM} | how))


@pytest.fixture(autouse=True)
def one_size_of_pieces(monkeypatch):
    monkeypatch.setattr(generate, "_SMALLEST_PIECE", 32)


@pytest.fixture
def cache():
    return gdn.PrefixCache(max_bytes=BYTES)


@pytest.fixture
def fed(monkeypatch):
    """How many tokens of each row every piece has fed, padding left out."""
    counts = []
    real = generate.feed

    def feed(weights, rows, left, prompts, lengths, *rest, **how):
        counts.append(np.asarray(lengths).tolist())
        return real(weights, rows, left, prompts, lengths, *rest, **how)

    monkeypatch.setattr(generate, "feed", feed)
    return counts


PAIRS = [
    [[*SYSTEM, 1, 2, 3], [*SYSTEM, 1, 2, 3]],
    [[*SYSTEM, 4, 5], [7, 7, 7]],
    [[*SYSTEM, 6], [*SYSTEM, 1, 2, 3, 9, 9]],
    [[7, 7, 7], SYSTEM[:-3]],
    [[1], [7]],
]
DRAWING = gdn.SamplingParams(temperature=1.5, top_p=0.9, repetition_penalty=1.3, seed=(5, 6))


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [gdn.SamplingParams(temperature=0.0), DRAWING], ids=["greedy", "drawn"])
def test_tokens_are_those_without_a_cache(cache, sampling):
    """Rows of one batch know more or less of their prompts; penalties know all that was consumed."""
    for prompts in PAIRS * 2:
        want = model().generate(prompts, max_new_tokens=9, sampling=sampling, keep_state=True)
        got = model().generate(prompts, max_new_tokens=9, sampling=sampling, keep_state=True, prefix_cache=cache)
        assert got.tokens.tolist() == want.tokens.tolist()
        assert got.timings.prompt_tokens == want.timings.prompt_tokens
        assert got.state.state.position.tolist() == want.state.state.position.tolist()
        assert np.array_equal(got.state.seen, want.state.seen)
        np.testing.assert_allclose(got.state.state.gdn.S, want.state.state.gdn.S, rtol=0, atol=1e-5)
    assert cache.stats.hits > len(PAIRS) * 2


def test_only_the_rest_is_read(cache, fed):
    def lengths(prompts):
        fed.clear()
        result = model().generate(prompts, max_new_tokens=5, prefix_cache=cache)
        assert sum(map(sum, fed)) + result.timings.reused_tokens == sum(map(len, prompts))
        return list(map(list, fed))

    first, second, third, other = [*SYSTEM, 1, 2, 3], [*SYSTEM, 4, 5], [*SYSTEM, 6, 6, 6, 6], [9]
    # The state before the last token is kept; a prompt of one token has none before it.
    assert lengths([first, other]) == [[27, 1], [1, 0]]
    # The same prompt again is one token.
    assert lengths([first, other]) == [[1, 1]]
    # Where the second parts from the first, its state is kept for the third.
    assert lengths([second, other]) == [[25, 1], [1, 0], [1, 0]]
    assert lengths([third, other]) == [[3, 1], [1, 0]]
    assert lengths([third, second]) == [[1, 1]]


def test_a_conversation_written_out_goes_on_from_its_answer(cache, fed):
    """The state after an answer is kept, up to the token that was drawn last, which was never consumed."""
    answer = model().generate([SYSTEM, [3]], max_new_tokens=7, prefix_cache=cache).tokens[0].tolist()
    fed.clear()
    result = model().generate([[*SYSTEM, *answer, 8, 9], [3]], max_new_tokens=7, prefix_cache=cache)
    assert result.timings.reused_tokens == len(SYSTEM) + 6
    assert fed == [[2, 1], [1, 0]]
    want = model().generate([[*SYSTEM, *answer, 8, 9], [3]], max_new_tokens=7)
    assert result.tokens.tolist() == want.tokens.tolist()


def test_rows_of_one_batch_leave_their_common_beginning(cache, fed):
    model().generate([[*SYSTEM, 1, 2, 3], [*SYSTEM, 4, 5, 6]], max_new_tokens=2, prefix_cache=cache)
    fed.clear()
    model().generate([[*SYSTEM, 7], [*SYSTEM, 8]], max_new_tokens=2, prefix_cache=cache)
    assert fed == [[1, 1]]


def test_a_row_that_the_host_ended_leaves_no_answer(tmp_path):
    """The device has drawn further: its state is not that after the answer, unless the rows were taken back."""
    text_files.write_tokenizer(tmp_path)
    speaking = model(tokenizer=load_tokenizer(tmp_path))
    whole = speaking.generate([SYSTEM, SYSTEM], max_new_tokens=30)
    stop = whole.text[0][2:4]
    for keep_state, is_kept in ((False, False), (True, True)):
        cache = gdn.PrefixCache(max_bytes=BYTES)
        said = speaking.generate(
            [SYSTEM, SYSTEM], max_new_tokens=30, stop=stop, keep_state=keep_state, prefix_cache=cache
        )
        assert said.finish_reason == ("stop", "stop")
        answer = said.tokens[0, : said.lengths[0]].tolist()
        onward = speaking.generate([[*SYSTEM, *answer, 5]] * 2, max_new_tokens=4, prefix_cache=cache)
        assert (onward.timings.reused_tokens == 2 * (len(SYSTEM) + len(answer) - 1)) == is_kept
        want = speaking.generate([[*SYSTEM, *answer, 5]] * 2, max_new_tokens=4)
        assert onward.tokens.tolist() == want.tokens.tolist()


# What is kept, for how long, and for whom


def entry_bytes(slots):
    """Bytes of one row with so many key-value slots."""
    shapes = jax.eval_shape(lambda: init_decoder_state(CFG, batch=1, capacity=slots))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def keep(cache, tokens, owner="model", capacity=ROOM):
    state = init_decoder_state(CFG, batch=2, capacity=capacity)
    state = jax.tree.map(lambda leaf: leaf + jnp.asarray(tokens[0], leaf.dtype), state)
    cache.keep(owner, np.asarray(tokens, np.int32), state, 1)


def found(cache, tokens, owner="model"):
    entry = cache.longest(owner, np.asarray(tokens, np.int32))
    return None if entry is None else entry.tokens.tolist()


def test_the_longest_prefix_that_leaves_a_token(cache):
    for tokens in ([1], [1, 2, 3], [1, 2, 3, 4], [2]):
        keep(cache, tokens)
    assert found(cache, [1, 2, 3, 4, 5]) == [1, 2, 3, 4]
    assert found(cache, [1, 2, 3, 4]) == [1, 2, 3]
    assert found(cache, [1, 2, 9]) == [1]
    assert found(cache, [1]) is None
    assert found(cache, [3, 1]) is None
    assert cache.stats == (3, 2, 8, 4, 4 * entry_bytes(64), 0)
    assert [cache.parting("model", np.asarray(p, np.int32)) for p in ([1, 2, 9], [1, 2, 3, 4, 5], [9])] == [2, 4, 0]


def test_what_was_not_used_for_the_longest_time_makes_room():
    size = entry_bytes(64)
    cache = gdn.PrefixCache(max_bytes=3 * size + 5)
    for tokens in ([1], [2], [3]):
        keep(cache, tokens)
    assert found(cache, [1, 9]) == [1]  # used
    keep(cache, [2])  # used too
    keep(cache, [4])
    assert found(cache, [3, 9]) is None
    assert [found(cache, [token, 9]) for token in (1, 2, 4)] == [[1], [2], [4]]
    assert cache.stats[3:] == (3, 3 * size, 1)
    keep(cache, list(range(1, 70)))  # 128 slots
    assert cache.stats.nbytes <= cache.max_bytes
    assert cache.stats.evictions == 1 + -(-(entry_bytes(128) - 5) // size)  # as many as it takes
    cache.clear()
    assert cache.stats[3:5] == (0, 0)
    assert found(cache, [4, 9]) is None


def test_bytes_are_those_of_the_arrays(cache):
    for count in (1, 65, 100):
        keep(cache, [count] * count)
    held = sum(leaf.nbytes for entry in cache._entries.values() for leaf in jax.tree.leaves(entry.state))
    assert cache.stats.nbytes == held == entry_bytes(64) + 2 * entry_bytes(128)


def test_what_is_larger_than_the_cache_is_not_kept_and_drives_nothing_out():
    cache = gdn.PrefixCache(max_bytes=entry_bytes(64))
    keep(cache, [1])
    keep(cache, [2] * 100)
    assert cache.stats[3:] == (1, entry_bytes(64), 0)


def test_short_prefixes_are_kept_on_request_only(fed):
    cache = gdn.PrefixCache(max_bytes=BYTES, min_tokens=10)
    keep(cache, [1] * 9)
    assert cache.stats.entries == 0
    model().generate([[1] * 9, [2] * 12], max_new_tokens=1, prefix_cache=cache)
    assert fed == [[9, 11], [0, 1]]  # no piece ends where nothing is kept
    assert cache.stats.entries == 2


@pytest.mark.parametrize(
    ("count", "capacity", "slots"),
    [
        (1, 4096, 64),
        (64, 4096, 64),
        (65, 4096, 128),
        (512, 4096, 512),
        (513, 4096, 1024),
        (1025, 4096, 1536),
        (70, 100, 100),
    ],
)
def test_slots_are_rounded_up_and_never_beyond_the_capacity(count, capacity, slots):
    assert prefix_cache._slots(count, capacity) == slots


def test_a_prefix_fits_a_request_with_less_room(cache):
    """Its slots were rounded up to more than that has, and are not used."""
    state = init_decoder_state(CFG, batch=2, capacity=200)
    state = jax.tree.map(lambda leaf: jnp.arange(leaf.size, dtype=leaf.dtype).reshape(leaf.shape), state)
    state = dataclasses.replace(state, position=jnp.full(2, 70, jnp.int32))
    prompt = list(range(1, 72))
    cache.keep("model", np.asarray(prompt[:-1], np.int32), state, 1)
    assert next(iter(cache._entries.values())).state.capacity == 128
    plan = CachedPrompts(cache, "model", [[9], prompt])
    rows = new_rows(init_decoder_state(CFG, batch=2, capacity=90), batch=2, vocab=CFG.vocab)
    restored = plan.restore(rows)
    want = gdn.select(gdn.resize(state, capacity=90), [1])
    assert jax.tree.all(jax.tree.map(np.array_equal, gdn.select(restored.state, [1]), want))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(gdn.select(restored, [0])))
    assert np.flatnonzero(restored.seen[1]).tolist() == prompt[:-1]
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(rows.state))


def test_entries_belong_to_weights_and_settings(cache):
    """Decoders of other weights, precision or cache dtype share the bytes, and nothing else."""
    prompts = [SYSTEM, [1, 2]]
    model().generate(prompts, max_new_tokens=2, prefix_cache=cache)
    other = model(weights=weights("tests/other"))
    want = other.generate(prompts, max_new_tokens=6)
    for reused in (0, len(SYSTEM)):
        got = other.generate(prompts, max_new_tokens=6, prefix_cache=cache)
        assert got.tokens.tolist() == want.tokens.tolist()
        assert got.timings.reused_tokens == reused
    # What does not matter to a state does not matter here.
    for change, known in (
        ({"ends": (3,)}, len(SYSTEM)),
        ({"capacity": None}, len(SYSTEM)),
        ({"kv_dtype": "bfloat16"}, 0),
        ({"precision": "q8"}, 0),
        ({"implementation": "xla"}, 0),
    ):
        decoder = model(**change)
        network = TextNetwork(CFG, decoder.precision, decoder.implementation)
        assert sum(decoder._cached(cache, network, prompts, fresh=True).reused) == known


def test_entries_of_weights_that_are_gone_are_dropped(cache):
    class Weights:
        pass

    first, second = Weights(), Weights()
    for owner in (first, second):
        keep(cache, [1, 2], cache.model(owner, "settings"))
    assert cache.stats.entries == 2
    del first, owner
    gc.collect()
    assert cache.stats[3:5] == (1, entry_bytes(64))
    assert found(cache, [1, 2, 3], cache.model(second, "settings")) == [1, 2]


def test_a_kept_state_is_never_donated(cache):
    """It is restored any number of times, while the rows that it was copied from and to are donated again and again."""
    for _ in range(3):
        model().generate([SYSTEM, [1, 2]], max_new_tokens=20, prefix_cache=cache)
    for entry in cache._entries.values():
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(entry.state))
        assert int(entry.state.position[0]) == entry.tokens.size


def test_rows_are_copied_out_and_put_back_in_place():
    """Restoring writes one row: the rest of the state stays where it is."""
    state = decoder_state_shapes(CFG, batch=4, capacity=4096)
    row = jax.ShapeDtypeStruct((), jnp.int32)
    taking = prefix_cache._take_row.lower(state, row, slots=512)
    putting = prefix_cache._put_row.lower(state, row, taking.out_info)
    nbytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    taken, put = (lowered.compile().memory_analysis() for lowered in (taking, putting))
    assert taken.temp_size_in_bytes == put.temp_size_in_bytes == 0
    assert put.alias_size_in_bytes == nbytes
    assert taken.output_size_in_bytes < nbytes / 4 / 7  # of a row, an eighth of its slots


def test_threads_may_share_a_cache():
    cache = gdn.PrefixCache(max_bytes=10 * entry_bytes(64))
    failures = []

    def work(seed):
        rng = np.random.default_rng(seed)
        try:
            for _ in range(60):
                tokens = rng.integers(0, 3, rng.integers(2, 6)).tolist()
                prefix = found(cache, tokens)
                assert prefix is None or tokens[: len(prefix)] == prefix
                keep(cache, tokens)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert cache.stats.hits + cache.stats.misses == 180
    assert cache.stats.nbytes == 10 * entry_bytes(64) <= cache.max_bytes


def test_a_conversation_uses_the_cache_where_it_is_read_from_the_beginning(tmp_path, monkeypatch, cache):
    asked = []

    def answer(self, prompt, *, state, prefix_cache, **settings):
        asked.append((state is None, prefix_cache))
        timings = gdn_decoder.Timings(3, 1, 0.0, 0.0, 0.0, None, 0 if prefix_cache is None else 17)
        return gdn.GenerateResult(np.asarray([[9]]), np.asarray([1]), ["x"], ("length",), timings, "state")

    monkeypatch.setattr(gdn.Decoder, "generate", answer)
    text_files.write_tokenizer(tmp_path, template="{% for m in messages %}{{ m.content if loop.last }}{% endfor %}")
    talk = gdn.Conversation(model(tokenizer=load_tokenizer(tmp_path)), prefix_cache=cache)
    assert [talk.say(said).reused for said in ("it's", "the state")] == [17, 17]
    assert asked == [(True, cache)] * 2
    talk._tokens = talk._tokenizer.encode("is")  # as if the template had written out all that was said
    assert talk.say("is").reused == len(talk._tokenizer.encode("is"))
    assert asked[2:] == [(False, None)]


# Requests that make no sense


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({}, TypeError, "max_bytes"),
        ({"max_bytes": 0}, ValueError, "max_bytes must be at least 1, got 0"),
        ({"max_bytes": 1e9}, TypeError, "max_bytes must be an integer"),
        ({"max_bytes": 1, "min_tokens": 0}, ValueError, "min_tokens must be at least 1"),
    ],
)
def test_caches_that_cannot_be(settings, error, words):
    with pytest.raises(error, match=words):
        gdn.PrefixCache(**settings)


def test_a_cache_is_for_beginnings(cache):
    state = model().generate([SYSTEM, [1]], max_new_tokens=2, keep_state=True).state
    with pytest.raises(ValueError, match="a prefix_cache is for prompts from the beginning"):
        model().generate([[], []], state=state, prefix_cache=cache)
    with pytest.raises(TypeError, match="prefix_cache must be a PrefixCache, got dict"):
        model().generate([SYSTEM, [1]], prefix_cache={})


def test_a_request_that_is_refused_counts_for_nothing(cache):
    with pytest.raises(ValueError, match="does not fit"):
        model().generate([SYSTEM], max_new_tokens=ROOM, prefix_cache=cache)
    assert cache.stats == (0,) * 6


def test_what_is_kept_is_a_state_like_any_other(cache):
    model().generate([SYSTEM, [1, 2]], max_new_tokens=2, prefix_cache=cache)
    entry = cache.longest(cache.model(weights(), (TextNetwork(CFG), "float32")), np.asarray([*SYSTEM, 1], np.int32))
    assert gdn.branch(entry.state, 3).batch == 3
    with pytest.raises(StateMismatchError):
        gdn.merge([entry.state, init_decoder_state(CFG, batch=1, capacity=8)])


def test_marks_come_in_order_and_leave_a_token():
    cache = gdn.PrefixCache(max_bytes=BYTES)
    keep(cache, [1, 2, 3, 4])
    plan = CachedPrompts(cache, "model", [[1, 2, 3, 4, 5, 6], [1, 2, 9, 9], [7], [1, 2, 9, 8]])
    assert plan.reused == [4, 0, 0, 0]
    assert plan.rests == [[5, 6], [1, 2, 9, 9], [7], [1, 2, 9, 8]]
    assert plan.marks == [[1], [2, 3], [], [3]]
