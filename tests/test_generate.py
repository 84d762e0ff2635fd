"""Generation: the loop on the device with a toy model, `Decoder` with a real small one, and the commands."""

import dataclasses
import io
import json
import re
import shutil
import signal
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from gdn_jax import cli
from gdn_jax.decoder import conversation, generate, network
from gdn_jax.decoder.compilation import CompileClock, keep_compiled_programs
from gdn_jax.decoder.conversation import Conversation
from gdn_jax.decoder.decoder import Decoder
from gdn_jax.decoder.generate import NOTHING, Generation, Network, Policy, Rows, new_rows
from gdn_jax.decoder.interrupts import Interrupts
from gdn_jax.decoder.network import TextNetwork
from gdn_jax.decoder.sample import GREEDY, SamplingParams, sample
from gdn_jax.decoder.state import DecoderState
from gdn_jax.decoder.tokenizer import load_tokenizer
from gdn_jax.errors import CheckpointError, GdnError, StateMismatchError, UnsupportedError
from tests.support import text_files
from tests.support.paths import FIXTURES

VOCAB = 50
CAPACITY = 64


@dataclasses.dataclass(frozen=True)
class Toy(Network):
    """Logits that depend on every token consumed, in order, and on which slots of the cache they lie in."""

    vocab: int = VOCAB

    def start(self, batch):
        gdn = jnp.zeros((2, batch, self.vocab), jnp.float32)
        keys, values = (jnp.zeros((1, batch, CAPACITY, 1, 1), jnp.float32) for _ in range(2))
        return DecoderState(gdn=gdn, keys=keys, values=values, position=jnp.zeros(batch, jnp.int32))

    def step(self, weights, state, tokens, active):
        gdn = 0.75 * jnp.roll(state.gdn, 7, axis=2) + jax.nn.one_hot(tokens, self.vocab)[None]
        gdn = jnp.where(active[None, :, None], gdn, state.gdn)
        rows = jnp.arange(tokens.size)
        slot = jnp.where(active, state.position, CAPACITY)
        keys = state.keys.at[0, rows, slot, 0, 0].set(tokens.astype(jnp.float32), mode="drop")
        position = state.position + active.astype(jnp.int32)
        kept = jnp.where(jnp.arange(CAPACITY)[None] < position[:, None], keys[0, :, :, 0, 0], jnp.float32(0))
        logits = gdn[0] @ weights + jnp.sin(
            jnp.sum(kept, axis=1, keepdims=True) * jnp.arange(self.vocab, dtype=jnp.float32)[None]
        )
        state = DecoderState(gdn=gdn, keys=keys, values=state.values, position=position)
        return jnp.where(active[:, None], logits, jnp.float32(0)), state

    def prefill(self, weights, state, tokens, lengths):
        def body(carry, now):
            state, last, step = carry
            logits, state = self.step(weights, state, now, step < lengths)
            return (state, jnp.where((step < lengths)[:, None], logits, last), step + 1), None

        start = (state, jnp.zeros((tokens.shape[0], self.vocab), jnp.float32), jnp.int32(0))
        (state, last, _), _ = jax.lax.scan(body, start, tokens.T)
        return last, state


TOY = Toy()
WEIGHTS = jnp.asarray(np.random.default_rng(0).normal(size=(VOCAB, VOCAB)), jnp.float32)
PROMPTS = [[1, 2, 3], [7] * 16, [4], [9, 8, 7, 6, 5]]
DRAWING = SamplingParams(temperature=1.2, top_p=0.95, repetition_penalty=1.1, seed=(5, 6, 7, 8))


def generation(prompts, *, wanted=13, sampling=GREEDY, ends=(), chunk=4, rows=None, rewindable=False, weights=WEIGHTS):
    rows = new_rows(TOY.start(len(prompts)), batch=len(prompts), vocab=VOCAB) if rows is None else rows
    padded = np.full(8, -3, np.int32)
    padded[: len(ends)] = ends
    policy = Policy(sampling.knobs(), jnp.asarray(sampling.row_seeds(len(prompts))), jnp.asarray(padded))
    return Generation(TOY, weights, rows, policy, prompts=prompts, wanted=wanted, chunk=chunk, rewindable=rewindable)


def tokens_of(blocks, batch):
    matrix = np.concatenate([np.asarray(block) for block in blocks])
    rows = [column[column != NOTHING].tolist() for column in matrix.T]
    assert len(rows) == batch
    return rows


def run(prompts, **settings):
    going = generation(prompts, **settings)
    return tokens_of(list(going), len(prompts)), going.finish()


@jax.jit
def toy_step(state, token):
    return TOY.step(WEIGHTS, state, jnp.array([token]), jnp.array([True]))


jitted_sample = jax.jit(sample)


def by_hand(prompt, wanted, sampling=GREEDY, row=0):
    """The tokens of one row, one step at a time: every one is drawn from all that stands before it, at its position."""
    state, tokens = TOY.start(1), list(prompt)
    seed, knobs = jnp.asarray(sampling.row_seeds(len(PROMPTS))[[row]]), sampling.knobs()
    for token in prompt:
        logits, state = toy_step(state, jnp.int32(token))
    while len(tokens) < len(prompt) + wanted:
        seen = jnp.zeros((1, VOCAB), bool).at[0, np.array(tokens)].set(True)
        tokens.append(int(jitted_sample(logits, seen, seed, jnp.array([len(tokens)]), knobs)[0]))
        logits, state = toy_step(state, jnp.int32(tokens[-1]))
    return tokens[len(prompt) :]


# The loop on the device


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [GREEDY, DRAWING, dataclasses.replace(GREEDY, repetition_penalty=1.5)])
def test_rows_are_what_single_steps_give(sampling):
    tokens, rows = run(PROMPTS, sampling=sampling)
    assert tokens == [by_hand(prompt, 13, sampling, row) for row, prompt in enumerate(PROMPTS)]
    assert rows.tokens.tolist() == [row[-1] for row in tokens]
    assert rows.state.position.tolist() == [len(prompt) + 12 for prompt in PROMPTS]


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [GREEDY, DRAWING])
def test_neither_the_batch_nor_the_size_of_blocks_changes_a_row(sampling):
    wanted, rows = run(PROMPTS, sampling=sampling)
    assert len(set(map(tuple, wanted))) == len(PROMPTS)
    tokens, other = run(PROMPTS, sampling=sampling, chunk=7)
    assert tokens == wanted
    assert jax.tree.all(jax.tree.map(lambda a, b: np.allclose(a, b, atol=1e-6), other, rows))
    for row, prompt in enumerate(PROMPTS):
        alone = dataclasses.replace(sampling, seed=sampling.row_seeds(4)[row])
        assert run([prompt], sampling=alone)[0] == [wanted[row]]


def test_rows_end_at_their_own_ends_and_then_stay_as_they_are():
    free, _ = run(PROMPTS)
    ends = (free[0][0], free[1][4], free[3][8])
    tokens, rows = run(PROMPTS, ends=ends)
    for row, prompt in enumerate(PROMPTS):
        until = next((i for i, token in enumerate(free[row]) if token in ends), len(free[row]) - 1) + 1
        assert tokens[row] == free[row][:until]
        assert rows.state.position[row] == len(prompt) + until - 1
        alone = run([prompt], wanted=until)[1]
        np.testing.assert_allclose(rows.state.gdn[:, row], alone.state.gdn[:, 0], atol=1e-6)
        assert np.array_equal(rows.seen[row], alone.seen[0])


def test_nothing_is_dispatched_once_every_row_has_ended():
    first = run(PROMPTS[:1])[0][0][0]
    going = generation(PROMPTS[:1], ends=(first,), wanted=10**6)
    assert [block.tolist() for block in going] == [[[first]]]


def test_the_next_block_is_dispatched_before_one_is_read(monkeypatch):
    events = []

    def watched(name, function):
        def call(*args, **kwargs):
            result = function(*args, **kwargs)
            block = result[-1] if name == "dispatch" else result
            if block.ndim == 2:  # what else becomes numpy is the list of ends
                events.append(f"{name} {len(block)}")
            return result

        return call

    numpy = types.SimpleNamespace(**vars(np) | {"asarray": watched("read", np.asarray)})
    monkeypatch.setattr(generate, "np", numpy)
    monkeypatch.setattr(generate, "feed", watched("dispatch", generate.feed))
    monkeypatch.setattr(generate, "advance", watched("dispatch", generate.advance))
    assert len(list(generation(PROMPTS, wanted=1 + 3 * 4))) == 4
    assert events == [*("dispatch 1", "dispatch 4", "read 1", "dispatch 4", "read 4", "dispatch 4", "read 4", "read 4")]


@pytest.mark.parametrize("sampling", [GREEDY, DRAWING])
@pytest.mark.parametrize("used", [[0, 1, 2, 3], [5, 12, 1, 9], [13, 13, 13, 6], [4, 5, 8, 9]])
def test_a_row_that_the_host_ends_goes_back_to_its_last_token(sampling, used):
    """`used` tokens in each row: the others, which the device has drawn already, leave no trace in the state."""
    used = np.maximum(used, 1)
    going = generation(PROMPTS, sampling=sampling, rewindable=True)
    taken = [[] for _ in PROMPTS]
    for block in going:
        for row in range(len(PROMPTS)):
            for step in range(len(block)):
                if len(taken[row]) < used[row]:
                    taken[row].append(int(block[step, row]))
                    if len(taken[row]) == used[row] < 13:
                        going.halt(row, step + 1)
    rows = going.finish()
    free = run(PROMPTS, sampling=sampling)[0]
    assert taken == [free[row][: used[row]] for row in range(4)]
    for row, prompt in enumerate(PROMPTS):
        alone = dataclasses.replace(sampling, seed=sampling.row_seeds(4)[row])
        want = run([prompt], wanted=int(used[row]), sampling=alone)[1]
        assert rows.state.position[row] == want.state.position[0] == len(prompt) + used[row] - 1
        assert rows.tokens[row] == want.tokens[0] == taken[row][-1]
        np.testing.assert_allclose(rows.state.gdn[:, row], want.state.gdn[:, 0], atol=1e-6)
        assert np.array_equal(rows.seen[row], want.seen[0])


@pytest.mark.parametrize("sampling", [GREEDY, DRAWING])
def test_rows_can_go_on_where_they_were(sampling):
    """7 tokens and then 6 are the same as 13: state, randomness and penalties know what came before."""
    wanted = run(PROMPTS, sampling=sampling)[0]
    first, rows = run(PROMPTS, wanted=7, sampling=sampling)
    second, _ = run([[row[-1]] for row in first], wanted=6, sampling=sampling, rows=rows)
    assert [a + b for a, b in zip(first, second, strict=True)] == wanted


def test_stopping_gives_out_what_is_on_its_way():
    going = generation(PROMPTS, wanted=30)
    blocks = []
    for block in going:
        blocks.append(block)
        going.stop()
    tokens = tokens_of(blocks, 4)
    assert [len(row) for row in tokens] == [1 + 4] * 4
    rows = going.finish()
    assert rows.tokens.tolist() == [row[-1] for row in tokens]
    assert rows.state.position.tolist() == [len(prompt) + 4 for prompt in PROMPTS]


def test_logits_that_are_not_finite_are_an_error_that_names_the_row():
    # Token 49 leaves 0.75 at 6, so 1.75 times the weights there overflow.
    with pytest.raises(GdnError, match="not finite in row 2"):
        list(generation([[1], [2], [49, 6], [3]], weights=WEIGHTS.at[6].set(3e38)))


@pytest.mark.slow
def test_prompts_are_padded_to_powers_of_two_and_fed_in_pieces(monkeypatch):
    widths = []
    real = generate.feed

    def feed(weights, rows, left, prompts, *rest, **kwargs):
        widths.append(prompts.shape[1])
        return real(weights, rows, left, prompts, *rest, **kwargs)

    monkeypatch.setattr(generate, "feed", feed)
    monkeypatch.setattr(generate, "LARGEST_PIECE", 4 * 32)
    rng = np.random.default_rng(0)
    long = [rng.integers(0, VOCAB, length).tolist() for length in (50, 3, 32, 33)]
    assert run(long, wanted=5)[0] == [by_hand(prompt, 5) for prompt in long]
    assert widths == [32, 32]
    monkeypatch.setattr(generate, "LARGEST_PIECE", 32)
    for length, expected in ((1, [16]), (16, [16]), (17, [32]), (32, [32]), (33, [32, 16])):
        widths.clear()
        run([[1] * length], wanted=2)
        assert widths == expected


def test_prompts_of_one_bucket_share_programs():
    generate.feed.clear_cache()
    run([[1] * 5])
    before = (generate.feed._cache_size(), generate.advance._cache_size())
    for length, sampling in ((16, GREEDY), (2, DRAWING), (9, SamplingParams(top_k=3))):
        run([[3] * length], sampling=dataclasses.replace(sampling, seed=1), ends=(4, 5), wanted=20)
    assert (generate.feed._cache_size(), generate.advance._cache_size()) == before
    run([[1] * 17])
    assert (generate.feed._cache_size(), generate.advance._cache_size()) == (before[0] + 1, before[1])


def test_bucket():
    assert [generate.bucket(count, least=16) for count in (1, 16, 17, 32, 33, 512)] == [16, 16, 32, 32, 64, 512]


# Ctrl-C


def test_the_first_interrupt_is_a_request_and_the_second_an_exception():
    with Interrupts() as interrupts:
        assert not interrupts.requested
        signal.raise_signal(signal.SIGINT)
        assert interrupts.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_the_program_stays():
    def own(number, frame):
        raise AssertionError

    before = signal.signal(signal.SIGINT, own)
    try:
        with Interrupts():
            assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)


# Compiled programs


@pytest.fixture
def fresh_jax(monkeypatch, tmp_path):
    """A process in which no folder for compiled programs has been chosen."""
    for name in ("GDN_JAX_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({}, "{home}/.cache/gdn-jax/programs"),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/gdn-jax/programs"),
        ({"GDN_JAX_CACHE": "/elsewhere", "XDG_CACHE_HOME": "/xdg"}, "/elsewhere"),
        ({"GDN_JAX_CACHE": "off"}, "None"),
    ],
)
def test_where_compiled_programs_are_kept(fresh_jax, monkeypatch, tmp_path, variables, folder):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    chosen = str(keep_compiled_programs())
    assert chosen == str(jax.config.jax_compilation_cache_dir) == folder.format(home=tmp_path)


def test_a_folder_chosen_in_jax_itself_stays(fresh_jax, monkeypatch, tmp_path):
    monkeypatch.setenv("GDN_JAX_CACHE", "/elsewhere")
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    assert keep_compiled_programs() == tmp_path == Path(jax.config.jax_compilation_cache_dir)


def test_the_clock_runs_while_something_is_compiled():
    double = jax.jit(lambda x: 2 * x)
    with CompileClock() as first:
        double(jnp.ones(3))
    with CompileClock() as second:
        double(jnp.ones(3))
    assert first.seconds > 0 == second.seconds


# A real small model. One capacity, batch and size of prompts for as much as possible: each combination is compiled.

ROOM = 640


@pytest.fixture
def one_bucket(monkeypatch):
    monkeypatch.setattr(generate, "_SMALLEST_PIECE", 64)
    monkeypatch.setattr(generate, "LARGEST_PIECE", 64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "model"
    shutil.copytree(FIXTURES / "qwen3_5-f32", folder)
    return text_files.write_tokenizer(folder)


@pytest.fixture(scope="module")
def loaded(folder):
    return Decoder.load(folder, capacity=ROOM)


@pytest.fixture
def model(loaded, one_bucket):
    return loaded


IDS = [5, 17, 9, 60]


@pytest.fixture
def free(model):
    """60 greedy tokens after `IDS`."""
    return model.generate(IDS, max_new_tokens=60, ignore_eos=True)


@pytest.mark.slow
def test_greedy_tokens_are_those_of_transformers(model):
    with np.load(FIXTURES / "qwen3_5-f32" / "logits_golden.npz") as golden:
        ids, prompt = golden["ids"], int(golden["prompt"])
    result = dataclasses.replace(model, vision=frozenset()).generate(
        ids[:prompt], max_new_tokens=len(ids) - prompt, ignore_eos=True
    )
    assert result.tokens.dtype == np.int32
    assert result.tokens[0].tolist() == ids[prompt:].tolist()
    assert result.finish_reason == ("length",)


def test_a_result_and_its_timings(model, free):
    text = model.generate("the state", max_new_tokens=3, ignore_eos=True)
    ids = model.generate(model.tokenizer.encode("the state"), max_new_tokens=3, ignore_eos=True)
    assert text.tokens.tolist() == ids.tokens.tolist()
    assert text.text == ids.text == [model.tokenizer.decode(text.tokens[0].tolist())]
    assert (text.state, text.lengths.tolist()) == (None, [3])
    timings = text.timings
    assert (timings.prompt_tokens, timings.new_tokens) == (len(model.tokenizer.encode("the state")), 3)
    assert timings.first_token_seconds > 0
    assert timings.tokens_per_second == pytest.approx(2 / timings.decode_seconds)
    assert text.timings.compile_seconds == 0
    assert model.generate(IDS, max_new_tokens=1).timings.tokens_per_second is None


def two_layers(source, folder):
    """The first GDN layer and the attention layer of a model, which are quicker to compile."""
    shutil.copytree(source, folder)
    config = json.loads((source / "config.json").read_text())
    kept = {config["layer_types"].index(kind): kind for kind in ("linear_attention", "full_attention")}
    config |= {"num_hidden_layers": len(kept), "layer_types": list(kept.values())}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        start, layer, rest = re.fullmatch(r"(.*layers\.)(\d+)(\..*)|(.*)", name).groups()[:3]
        if layer is None:
            tensors[name] = tensor
        elif int(layer) in kept:
            tensors[f"{start}{list(kept).index(int(layer))}{rest}"] = tensor
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_batch_of_unequal_prompts(folder, tmp_path, one_bucket):
    model = Decoder.load(two_layers(folder, tmp_path / "small"))
    prompts = ["the state", "it's a value and"]
    pieces = [[], []]
    results = [
        model.generate(order, max_new_tokens=12, ignore_eos=True, on_text=lambda row, text: pieces[row].append(text))
        for order in (prompts, [prompts[0], " is"])
    ]
    assert results[0].tokens[0].tolist() == results[1].tokens[0].tolist()
    assert results[0].text[0] == results[1].text[0]
    assert results[0].text[1] != results[1].text[1]
    assert ["".join(row) for row in pieces] == [results[0].text[row] + results[1].text[row] for row in range(2)]
    assert results[0].finish_reason == ("length", "length")


def test_the_end_of_a_text_is_among_the_tokens_and_not_in_the_text(model, free):
    end = int(free.tokens[0, 9])
    ending = dataclasses.replace(model, ends=(end,))
    until = free.tokens[0].tolist().index(end)
    result = ending.generate(IDS, max_new_tokens=60)
    assert result.tokens[0].tolist() == free.tokens[0, : until + 1].tolist()
    assert result.finish_reason == ("eos",)
    assert result.text == [model.tokenizer.decode(free.tokens[0, :until].tolist())]


def test_a_stop_string_cuts_the_text_and_leaves_a_state_to_go_on_from(model, free):
    whole = free.text[0]
    stop = whole[len(whole) // 2 : len(whole) // 2 + 3]
    pieces = []
    result = model.generate(
        IDS, max_new_tokens=60, ignore_eos=True, stop=[stop, "never"], keep_state=True,
        on_text=lambda _, text: pieces.append(text),
    )  # fmt: skip
    count = int(result.lengths[0])
    assert result.finish_reason == ("stop",)
    assert result.text == [whole[: whole.index(stop)]] == ["".join(pieces)]
    assert result.tokens[0].tolist() == free.tokens[0, :count].tolist()
    assert stop in model.tokenizer.decode(result.tokens[0].tolist())
    assert stop not in model.tokenizer.decode(result.tokens[0, :-1].tolist())
    onward = model.generate([[]], max_new_tokens=60 - count, ignore_eos=True, state=result.state)
    assert onward.tokens[0].tolist() == free.tokens[0, count:].tolist()


def test_a_state_is_a_value(model, free):
    """It can be used any number of times, and what is said in between counts."""
    first = model.generate(IDS, max_new_tokens=20, ignore_eos=True, keep_state=True)
    for _ in range(2):
        onward = model.generate([[]], max_new_tokens=40, ignore_eos=True, state=first.state)
        assert onward.tokens[0].tolist() == free.tokens[0, 20:].tolist()
    said = [40, 41]
    whole = model.generate([*IDS, *first.tokens[0].tolist(), *said], max_new_tokens=9, ignore_eos=True)
    onward = model.generate(said, max_new_tokens=9, ignore_eos=True, state=first.state)
    assert onward.tokens.tolist() == whole.tokens.tolist()


def test_a_state_gets_the_room_that_it_needs(model, free):
    growing = dataclasses.replace(model, capacity=None)
    rows, fed = growing._rows(None, [[1] * 250], 6)
    assert rows.state.capacity == 256
    small = dataclasses.replace(rows.state, position=jnp.array([250]))
    rows, fed = growing._rows(Rows(small, rows.tokens, rows.seen), [[2]], 385)
    assert rows.state.capacity == 1024
    assert fed == [[0, 2]]
    # what was grown goes on as what had the room from the beginning
    first = model.generate(IDS, max_new_tokens=20, ignore_eos=True, keep_state=True).state
    cut = dataclasses.replace(first.state, keys=first.state.keys[:, :, :64], values=first.state.values[:, :, :64])
    onward = model.generate([[]], max_new_tokens=40, ignore_eos=True, state=Rows(cut, first.tokens, first.seen))
    assert onward.tokens[0].tolist() == free.tokens[0, 20:].tolist()


@pytest.mark.parametrize("how", ["signal", "exception"])
def test_an_interrupt_leaves_a_result_to_go_on_from(model, free, how):
    def interrupt(row, text):
        if how == "signal":
            signal.raise_signal(signal.SIGINT)
        raise KeyboardInterrupt

    def calm(row, text):
        signal.raise_signal(signal.SIGINT)

    result = model.generate(
        IDS, max_new_tokens=60, ignore_eos=True, keep_state=True, on_text=calm if how == "signal" else interrupt
    )
    count = int(result.lengths[0])
    assert 0 < count < 60
    assert result.finish_reason == ("interrupted",)
    assert result.tokens[0].tolist() == free.tokens[0, :count].tolist()
    assert result.text == [model.tokenizer.decode(result.tokens[0].tolist())]
    onward = model.generate([[]], max_new_tokens=60 - count, ignore_eos=True, state=result.state)
    assert onward.tokens[0].tolist() == free.tokens[0, count:].tolist()


@pytest.mark.parametrize(
    ("error", "message", "prompt", "settings"),
    [
        (ValueError, "prompt 0 is empty", "", {}),
        (ValueError, "prompt 0 is empty", [], {}),
        (ValueError, "prompt 1 is empty", [[1], []], {}),
        (ValueError, r"prompt 0 has ids outside the vocabulary, 0 … 95: \[96, -1\]", [1, 96, -1], {}),
        (UnsupportedError, "places for images or videos", "<|image_pad|>", {}),
        (UnsupportedError, "places for images or videos", [[1], [3]], {}),
        (TypeError, "prompt must be text, token ids, or a sequence .* got int, str", ["a", 1], {}),
        (TypeError, "got dict; a conversation is encoded by", [{"role": "user", "content": "x"}], {}),
        (TypeError, "got NoneType", None, {}),
        (TypeError, "got bytes", b"text", {}),
        (TypeError, "prompt 0 must be text or a flat sequence of integer", [[1.5]], {}),
        (TypeError, "prompt 0 must be text or a flat sequence of integer", np.float32([1, 2]), {}),
        (TypeError, "prompt 1 must be text or a flat", [[1], [[2]]], {}),
        (TypeError, "prompt 0 must be text or a flat sequence", [True, False], {}),
        (ValueError, "max_new_tokens must be at least 1, got 0", IDS, {"max_new_tokens": 0}),
        (TypeError, "max_new_tokens must be an integer, got 1.5", IDS, {"max_new_tokens": 1.5}),
        (ValueError, "chunk must be at least 1", IDS, {"chunk": 0}),
        (TypeError, "sampling must be a SamplingParams, got dict", IDS, {"sampling": {"temperature": 1}}),
        (ValueError, "one for each of the 1 rows", IDS, {"sampling": SamplingParams(seed=(1, 2))}),
        (ValueError, "a stop string must not be empty", IDS, {"stop": ["a", ""]}),
        (TypeError, "stop must be a string or a sequence of strings", IDS, {"stop": [1]}),
        (TypeError, "state must be a Rows, got str", IDS, {"state": "state"}),
    ],
)
def test_a_request_that_makes_no_sense_is_refused_before_any_work(monkeypatch, model, error, message, prompt, settings):
    monkeypatch.setattr("gdn_jax.decoder.decoder.Generation", None)
    with pytest.raises(error, match=message):
        model.generate(prompt, **settings)


@pytest.mark.parametrize(("length", "new", "fits"), [(50, 14, True), (50, 15, False), (65, 1, False)])
def test_a_request_that_does_not_fit_is_refused_before_any_work(monkeypatch, model, length, new, fits):
    monkeypatch.setattr("gdn_jax.decoder.decoder.Generation", None)
    small = dataclasses.replace(model, capacity=64)
    expected = (TypeError, "NoneType") if fits else (ValueError, f"prompt 1 does not fit: 0 tokens so far, {length} in")
    with pytest.raises(expected[0], match=expected[1]):
        small.generate([[1], [1] * length], max_new_tokens=new)


def test_a_state_of_another_batch_is_refused(model):
    state = model.generate([IDS], max_new_tokens=1, keep_state=True).state
    with pytest.raises(StateMismatchError, match="the state has 1 rows, but there are 2 prompts"):
        model.generate([[1], [2]], state=state)


def test_without_a_tokenizer_ids_do_and_text_does_not(free):
    model = Decoder.load(FIXTURES / "qwen3_5-f32", capacity=ROOM)
    result = model.generate(IDS, max_new_tokens=60)
    assert (result.text, result.tokens.tolist()) == (None, free.tokens.tolist())
    for settings in ({"prompt": "text"}, {"prompt": IDS, "stop": "x"}, {"prompt": IDS, "on_text": print}):
        with pytest.raises(UnsupportedError, match=r"tokenizer.*--tokenizer DIR"):
            model.generate(**settings)
    with pytest.raises(UnsupportedError, match="a conversation needs a tokenizer"):
        Conversation(model)


@pytest.mark.parametrize(
    ("error", "message", "settings"),
    [
        (ValueError, "capacity must be an integer of at least 1, got 0", {"capacity": 0}),
        (ValueError, "kv_dtype must be one of", {"kv_dtype": "int8"}),
        (UnsupportedError, "precision must be one of", {"precision": "q8"}),
        (UnsupportedError, "one of exact for weights of tier 'f32', got 'bf16'; bf16 is for pr", {"precision": "bf16"}),
        (UnsupportedError, "precision must be one of exact, bf16 for", {"prompt_precision": "q8"}),
        (ValueError, "tier must be one of", {"tier": "q5"}),
        (CheckpointError, "no tokenizer.json there", {"tokenizer": FIXTURES}),
    ],
)
def test_a_model_that_cannot_be_loaded_as_asked_says_why(error, message, settings):
    with pytest.raises(error, match=message):
        Decoder.load(FIXTURES / "qwen3_5-f32", **settings)


def test_prompts_have_a_precision_of_their_own(monkeypatch):
    asked = {}

    def taken(name):
        def function(*_, precision, **__):
            asked[name] = precision
            return jnp.zeros((1, 1)), None

        return function

    for name in ("decode_step", "prefill_tokens"):
        monkeypatch.setattr(network, name, taken(name))
    model = Decoder.load(FIXTURES / "qwen3_5-f32", prompt_precision="bf16")
    both = TextNetwork(model.cfg, model.precision, prompt_precision=model.prompt_precision)
    ids = jnp.zeros((1, 2), jnp.int32)
    both.step(None, None, ids[:, 0], ids[:, 0])
    both.prefill(None, None, ids, ids[:, 0])
    assert asked == {"decode_step": "exact", "prefill_tokens": "bf16"}


def test_what_files_say_is_taken_over(tmp_path, model):
    folder = tmp_path / "model"
    shutil.copytree(FIXTURES / "qwen3_5-f32", folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8], "do_sample": True, "top_k": 20}))
    loaded = Decoder.load(folder, tokenizer=model.tokenizer)
    assert loaded.ends == (2, 7, 8)
    assert loaded.vision == {3}
    assert loaded.sampling == SamplingParams(top_k=20)
    assert loaded.tokenizer is model.tokenizer


# Conversations


def test_a_conversation_feeds_only_what_is_new(model):
    """And answers as if everything were read anew."""
    talk = Conversation(model, max_new_tokens=9, system="it's a value")
    pieces = []
    first = talk.say("the state", pieces.append)
    assert first.reused == 0
    assert first.text == "".join(pieces) == talk.messages[-1]["content"]
    second = talk.say("is")
    read = model.generate([model.tokenizer.encode_chat(talk.messages[:-1])], max_new_tokens=9)
    assert second.result.tokens.tolist() == read.tokens.tolist()
    assert [message["role"] for message in talk.messages] == ["system", *("user", "assistant") * 2]
    # One token more is fed than is new: the one that was drawn last.
    assert second.reused > 0
    assert second.reused + second.result.timings.prompt_tokens - 1 == read.timings.prompt_tokens


def test_a_conversation_whose_template_rewrites_earlier_turns_is_read_anew(tmp_path, model):
    template = "{% for m in messages %}{{ m.content if loop.last else '' }}{% endfor %}"
    forgetful = dataclasses.replace(
        model, tokenizer=load_tokenizer(text_files.write_tokenizer(tmp_path, template=template))
    )
    talk = Conversation(forgetful, max_new_tokens=5)
    talk.say("the state")
    assert talk.say("is a value").reused == 0


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("yes", {"content": "yes"}),
        ("it is\n</think>\n\nyes\n", {"reasoning_content": "it is", "content": "yes\n"}),
        ("<think>\nit\nis\n</think>\n\nyes", {"reasoning_content": "it\nis", "content": "yes"}),
        ("<think>\nit is", {"content": "<think>\nit is"}),
    ],
)
def test_what_was_thought_is_kept_apart_from_what_was_said(answer, message):
    assert conversation._assistant(answer) == {"role": "assistant"} | message


def test_an_error_leaves_a_conversation_as_it_was(model):
    talk = Conversation(model, max_new_tokens=9)
    talk.say("the state")
    before = (list(talk.messages), list(talk._tokens))
    with pytest.raises(ValueError, match="does not fit"):
        talk.say("the " * ROOM)
    assert (talk.messages, talk._tokens) == before
    talk.say("is")


# Commands


@pytest.fixture
def command(monkeypatch, capsys, one_bucket):
    monkeypatch.setenv("GDN_JAX_CACHE", "off")  # nothing is written outside the tests' folders

    def call(*arguments):
        status = cli.main([*map(str, arguments), "--capacity", str(ROOM)])
        return status, *capsys.readouterr()

    return call


def test_generate_prints_text_as_it_comes_and_speed_apart(command, folder, model):
    wanted = model.generate(model.tokenizer.encode_chat([{"role": "user", "content": "the state"}]), max_new_tokens=30)
    status, out, err = command("generate", "--model", folder, "the state", "--max-new-tokens", 30)
    assert (status, out) == (0, wanted.text[0] + "\n")
    assert "new ones at" in err
    assert "tok/s" in err
    assert "the first after" in err


def test_generate_as_json_with_settings(command, folder, model):
    sampling = SamplingParams(temperature=0.8, top_k=30, top_p=0.9, seed=3)
    wanted = model.generate("the state", max_new_tokens=20, sampling=sampling, stop="e")
    status, out, _ = command(
        *("generate", "--model", folder, "the state", "--raw", "--json", "--max-new-tokens", 20, "--stop", "e"),
        *("--temperature", 0.8, "--top-k", 30, "--top-p", 0.9, "--seed", 3),
    )
    report = json.loads(out)
    assert status == 0
    assert report["tokens"] == wanted.tokens[0].tolist()
    assert (report["text"], report["finish_reason"]) == (wanted.text[0], wanted.finish_reason[0])
    assert report["sampling"] == dataclasses.asdict(sampling)
    assert report["timings"]["new_tokens"] == len(report["tokens"])


def test_generate_reads_a_prompt_from_standard_input(command, folder, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("the state"))
    piped = command("generate", "--model", folder, "-", "--raw", "--max-new-tokens", 5)
    assert piped[:2] == command("generate", "--model", folder, "the state", "--raw", "--max-new-tokens", 5)[:2]


def test_an_interrupted_text_is_status_130(command, folder, monkeypatch):
    monkeypatch.setattr("gdn_jax.decoder.command._show", lambda piece: signal.raise_signal(signal.SIGINT))
    status, _, err = command("generate", "--model", folder, "the state", "--raw", "--max-new-tokens", 60)
    assert status == 130
    assert "ended: interrupted" in err


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("no such file or directory", ["--model", "{folder}/nothing", "x"]),
        ("the prompt is empty", ["--model", "{folder}", "", "--raw"]),
        ("changes nothing at temperature 0", ["--model", "{folder}", "x", "--top-p", "0.9"]),
        ("top_p must lie in", ["--model", "{folder}", "x", "--top-p", "2", "--temperature", "1"]),
        ("belong to a chat template", ["--model", "{folder}", "x", "--raw", "--system", "y"]),
        ("no tokenizer.json there", ["--model", "{fixture}", "x"]),
        ("precision must be one of", ["--model", "{folder}", "x", "--precision", "q8"]),
        ("precision must be one of exact, bf16", ["--model", "{folder}", "x", "--prompt-precision", "q8"]),
        ("refuses this conversation", ["--model", "{folder}", "x", "--set", "strict=true"]),
    ],
)
def test_generate_refuses_what_it_cannot_do_before_it_reads_weights(command, folder, monkeypatch, message, arguments):
    monkeypatch.setattr("gdn_jax.decoder.decoder.read_decoder", None)
    arguments = [argument.format(folder=folder, fixture=FIXTURES / "qwen3_5-f32") for argument in arguments]
    status, out, err = command("generate", *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("gdn generate: ")
    assert message in err


@pytest.mark.parametrize(
    "arguments", [["--max-new-tokens", "0"], ["--set", "x"], ["--set", "x={"], ["--chat", "--raw"]]
)
def test_a_malformed_generate_command_is_status_2(folder, arguments):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["generate", "--model", str(folder), "x", *arguments])
    assert stopped.value.code == 2


def test_chat_answers_line_by_line(command, folder, model, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("the state\n\nis\n/reset\nthe state\n"))
    status, out, err = command("chat", "--model", folder, "--max-new-tokens", 9)
    talk = Conversation(model, max_new_tokens=9)
    answers = [talk.say("the state").text, talk.say("is").text]
    assert status == 0
    assert out == "".join(f"{answer}\n" for answer in [*answers, answers[0]])
    assert err.count("[") == 3
