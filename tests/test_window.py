"""Windows of drafted tokens: looked at by the whole model, taken as far as they are accepted, both against steps."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gdn_jax as gdn
from gdn_jax.decoder.config import DECODERS
from gdn_jax.decoder.state import decoder_state_shapes, init_decoder_state
from gdn_jax.decoder.weights import abstract_decoder
from gdn_jax.decoder.window import commit_window, verify_window
from gdn_jax.errors import StateMismatchError, UnsupportedError
from gdn_jax.evidence.metrics import max_rel
from gdn_jax.state import state_nbytes
from gdn_jax.window import window_nbytes
from tests.support import decoders, tolerances
from tests.support.deviceless import compile_for_h200
from tests.test_decoder_state_values import ONLY_ATTENTION, ONLY_GDN, TINY, assert_same, numbers

BATCH, CAPACITY = 3, 24
SMALL, DENSE = decoders.SMALL, decoders.DENSE
LIMBS = dataclasses.replace(
    ONLY_GDN,
    layer_types=("linear_attention",),
    mlp_types=("dense",),
    gdn=gdn.GdnConfig(hidden=32, key_heads=1, value_heads=2, key_dim=12, value_dim=32, conv_width=4),
)
"""Heads of whole groups, so that kernels hand 4-bit products their operands in limbs; one layer, soon compiled."""
WIDER = dataclasses.replace(SMALL, gdn=dataclasses.replace(SMALL.gdn, value_dim=32))

STATIC = ("cfg", "parents", "precision", "implementation")
verify = jax.jit(verify_window, static_argnames=STATIC)
commit = jax.jit(commit_window, static_argnames=("cfg", "implementation"))


def ints(values):
    return jnp.asarray(values, jnp.int32)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, and windows of T tokens of it. Its programs are compiled once, whatever a test does with them."""

    cfg: gdn.DecoderConfig
    tokens: int
    tier: str = "f32"
    implementation: str | None = None
    kv_dtype: str = "float32"
    batch: int = BATCH

    @property
    def weights(self):
        return _weights(self.cfg, self.tier)

    def state(self, position=(3, 9, 0)):
        """Numbers everywhere, behind the positions too."""
        state = numbers(init_decoder_state(self.cfg, batch=self.batch, capacity=CAPACITY, kv_dtype=self.kv_dtype))
        return state.replace(position=ints(position[: self.batch]))

    def ids(self, seed=0):
        return np.random.default_rng(seed).integers(0, self.cfg.vocab, (self.batch, self.tokens), np.int32)

    def look(self, state, ids, lengths=None):
        lengths = [self.tokens] * self.batch if lengths is None else lengths
        how = {"cfg": self.cfg, "implementation": self.implementation}
        return verify(self.weights, state, jnp.asarray(ids), lengths=ints(lengths), **how)

    def take(self, state, window, counts):
        return commit(self.weights, state, window, ints(counts), cfg=self.cfg, implementation=self.implementation)

    def step(self, state, tokens, active=None):
        """By XLA, whatever the windows go by."""
        active = jnp.ones(self.batch, bool) if active is None else jnp.asarray(active)
        return decoders.step(self.weights, state, ints(tokens), cfg=self.cfg, active=active)

    def steps(self, state, ids, counts):
        """The first `counts` tokens of each row one by one: logits [B, T, vocab] and the state."""
        logits = []
        for t in range(ids.shape[1]):
            made, state = self.step(state, ids[:, t], np.asarray(counts) > t)
            logits.append(np.asarray(made))
        return np.stack(logits, axis=1), state


@functools.cache
def _weights(cfg, tier):
    return decoders.drawn(cfg, "tests/window", tier)


CASES = {
    "float32": Case(SMALL, 6),
    "float32 by kernels": Case(DENSE, 6, implementation="interpret"),
    "4-bit": Case(LIMBS, 2, "q4"),
}
MAIN = CASES["float32"]


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


def check_logits(got, want):
    """Of every token by itself."""
    assert got.shape == want.shape
    for row, (ours, theirs) in enumerate(zip(np.asarray(got), want, strict=True)):
        for t in range(len(ours)):
            assert max_rel(ours[t], theirs[t]) <= tolerances.DECODER_ALONE, f"token {t} of row {row}"


def kept(state):
    """Keys and values below the positions; what lies behind them means nothing."""
    below = np.arange(state.capacity)[None] < np.asarray(state.position)[:, None]
    return [
        np.where(below[None, :, :, None, None], np.asarray(leaf, np.float32), 0) for leaf in (state.keys, state.values)
    ]


def check_state(got, want):
    np.testing.assert_array_equal(got.position, want.position)
    for ours, theirs in zip(jax.tree.leaves(got.gdn), jax.tree.leaves(want.gdn), strict=True):
        for layer in range(len(theirs)):
            assert max_rel(ours[layer], theirs[layer]) <= tolerances.DECODER_ALONE
    for ours, theirs in zip(kept(got), kept(want), strict=True):
        assert max_rel(ours, theirs) <= tolerances.DECODER_ALONE


def remembered(state):
    """All that a sequence goes on from."""
    return state.gdn, kept(state), state.position


def row_of(tree, row):
    """A row of a state's memory and keys."""
    return jax.tree.map(lambda leaf: np.asarray(leaf)[:, row], tree)


# Against steps


@pytest.mark.slow
def test_looking_gives_the_logits_of_steps(case):
    """F34: after every token, to depths that differ; 0 behind them."""
    lengths, ids = (case.tokens, 1, 0), case.ids()
    logits, _, window = case.look(case.state(), ids, lengths)
    want, _ = case.steps(case.state(), ids, lengths)
    check_logits(logits, want)
    assert not np.any(np.asarray(logits)[np.arange(case.tokens)[None] >= np.array(lengths)[:, None]])
    assert window.lengths.tolist() == list(lengths)
    assert window.tokens == case.tokens


def test_looking_leaves_the_sequences_where_they_are(case):
    """F35: every bit of S, history and positions, and every key and value but in the slots of the window."""
    lengths = (case.tokens, 1, 0)
    before = case.state()
    _, state, _ = case.look(before, case.ids(), lengths)
    assert_same(remembered(state), remembered(before))
    slots = np.arange(CAPACITY)[None] - np.asarray(before.position)[:, None]
    of_window = (slots >= 0) & (slots < np.array(lengths)[:, None])
    for got, want in ((state.keys, before.keys), (state.values, before.values)):
        for layer in range(len(want)):
            np.testing.assert_array_equal(np.any(np.asarray(got[layer] != want[layer]), axis=(2, 3)), of_window)


@pytest.mark.parametrize(
    "share", [(0, 0, 0), (1, 1, 1), (1, 0.5, 0), (0, 1, 0.5)], ids=["none", "all", "some", "others"]
)
def test_taking_leaves_what_steps_leave(case, share):
    """F31, F32, F34: S, history, keys and values of the same tokens; a row that took none keeps every bit."""
    counts, ids, before = [int(part * case.tokens) for part in share], case.ids(), case.state()
    _, state, window = case.look(before, ids)
    state = case.take(state, window, counts)
    _, want = case.steps(before, ids, counts)
    check_state(state, want)
    for row in np.flatnonzero(np.array(counts) == 0):
        assert_same(row_of((state.gdn, kept(state)), row), row_of((before.gdn, kept(before)), row))


def test_windows_and_steps_follow_each_other_in_any_order(case):
    """F31, F33: two windows rejected in a row, a step, a part of a window, another window, a step."""
    before = state = case.state()
    for seed in (1, 2):
        _, state, window = case.look(state, case.ids(seed))
        state = case.take(state, window, (0, 0, 0))
        assert_same(remembered(state), remembered(before))
    want = before

    def hear(ids, counts):
        nonlocal want
        logits, want = case.steps(want, ids, counts)
        return logits

    for seed, counts in ((3, (1, 0, case.tokens)), (4, (case.tokens, 1, 0))):
        tokens = case.ids(seed + 10)[:, 0]
        logits, state = case.step(state, tokens)
        check_logits(logits[:, None], hear(tokens[:, None], (1, 1, 1)))
        ids = case.ids(seed)
        logits, state, window = case.look(state, ids, counts)
        state = case.take(state, window, counts)
        check_logits(logits, hear(ids, counts))
        logits, state, window = case.look(state, ids[::-1], counts[::-1])
        state = case.take(state, window, counts[::-1])
        check_logits(logits, hear(ids[::-1], counts[::-1]))
    check_state(state, want)


def test_a_window_that_is_left_alone_needs_nothing_done(case):
    """F33, F35: a step after two looks has the bits of a step without."""
    before = state = case.state()
    for seed in (1, 2):
        _, state, _ = case.look(state, case.ids(seed))
    tokens = case.ids()[:, 0]
    logits, after = case.step(state, tokens)
    want_logits, want = case.step(before, tokens)
    np.testing.assert_array_equal(logits, want_logits)
    assert_same(remembered(after), remembered(want))


def test_what_lies_beyond_leaves_no_trace(case):
    """F11, F15: NaN in slots without a token and in a row that takes none, other tokens behind the lengths."""
    lengths, ids, before = (case.tokens, 1, 0), case.ids(), case.state()
    logits, state, window = case.look(before, ids, lengths)
    state = case.take(state, window, lengths)
    beyond = np.arange(CAPACITY)[None] >= np.asarray(before.position)[:, None]
    spoil = jnp.asarray(beyond)[None, :, :, None, None]
    spoilt = before.replace(
        gdn=jax.tree.map(lambda leaf: leaf.at[:, 2].set(jnp.nan), before.gdn),
        keys=jnp.where(spoil, jnp.float32(jnp.nan), before.keys),
        values=jnp.where(spoil, jnp.float32(jnp.nan), before.values),
    )
    other = np.where(np.arange(case.tokens)[None] < np.array(lengths)[:, None], ids, (ids + 1) % case.cfg.vocab)
    other_logits, other_state, other_window = case.look(spoilt, other, lengths)
    other_state = case.take(other_state, other_window, lengths)
    np.testing.assert_array_equal(other_logits, logits)
    for row in (0, 1):
        assert_same(row_of((other_state.gdn, kept(other_state)), row), row_of((state.gdn, kept(state)), row))
    assert_same(row_of(other_state.gdn, 2), row_of(spoilt.gdn, 2))
    assert_same(other_state.position, state.position)


def test_what_cannot_be_taken_is_neither_looked_at_nor_taken(case):
    """A full row, one with room for a single token, and tokens that are none: NaN from there on, up to the lengths."""
    ids, vocab = case.ids(), case.cfg.vocab
    for position, wrong, taken in (
        ((CAPACITY, CAPACITY - 1, 0), {(2, 1): vocab}, (0, 1, 1)),
        ((5, 0, CAPACITY - case.tokens), {(0, 0): -1, (1, 0): 2**31 - 1}, (0, 0, case.tokens)),
    ):
        before, tokens = case.state(position), ids.copy()
        for at, token in wrong.items():
            tokens[at] = token
        logits, state, window = case.look(before, tokens)
        assert window.lengths.tolist() == list(taken)
        want, want_state = case.steps(before, ids, taken)
        want[np.arange(case.tokens)[None] >= np.array(taken)[:, None]] = np.nan
        np.testing.assert_array_equal(np.isnan(logits), np.isnan(want))
        check_logits(np.nan_to_num(logits), np.nan_to_num(want))
        with pytest.raises(ValueError, match=re.escape(f"accepted must lie in 0 … {list(taken)}")):
            commit_window(case.weights, state, window, ints([case.tokens] * BATCH), cfg=case.cfg)
        for counts in ((case.tokens,) * BATCH, (2**31 - 1,) * BATCH):
            check_state(case.take(state, window, counts), want_state)
        assert_same(remembered(case.take(state, window, (-1, -(2**31), 0))), remembered(before))


def test_traced_windows_are_taken_once():
    """Where nothing can be raised, a row that does not stand where its window begins stays as it is."""
    _, state, window = MAIN.look(MAIN.state(), MAIN.ids())
    once = MAIN.take(state, window, (4, 0, 2))
    again = MAIN.take(once, window, (3, 5, 3))
    assert again.position.tolist() == [7, 9 + 5, 2]
    for row, other in ((0, once), (1, MAIN.take(state, window, (0, 5, 0))), (2, once)):
        assert_same(row_of((again.gdn, kept(again)), row), row_of((other.gdn, kept(other)), row))


def test_many_windows_share_a_program():
    """F56."""
    _, state, window = MAIN.look(MAIN.state(), MAIN.ids())
    MAIN.take(state, window, (1, 1, 1))
    sizes = verify._cache_size(), commit._cache_size()
    _, state, window = MAIN.look(MAIN.state((1, 2, 3)), MAIN.ids(5), (1, 2, 3))
    MAIN.take(state, window, (1, 0, 3))
    assert (verify._cache_size(), commit._cache_size()) == sizes


# Other models and windows


@pytest.mark.slow
def test_kernels_pass_4_bit_products_their_operands_in_limbs():
    """One sequence, since interpreted kernels are compiled row by row."""
    case = Case(LIMBS, 2, "q4", implementation="interpret", batch=1)
    before, ids = case.state(), case.ids()
    logits, state, window = case.look(before, ids)
    check_logits(logits, case.steps(before, ids, (2,))[0])
    check_state(case.take(state, window, (1,)), case.steps(before, ids, (1,))[1])


@pytest.mark.parametrize(
    "case",
    [
        Case(dataclasses.replace(ONLY_GDN, gdn=dataclasses.replace(ONLY_GDN.gdn, conv_width=1)), 3),
        Case(ONLY_ATTENTION, 3),
        Case(TINY, 1, kv_dtype="bfloat16"),
        Case(TINY, 17),
    ],
    ids=["GDN alone, W = 1", "attention alone", "one token, keys in bfloat16", "17 tokens"],
)
def test_any_model_and_any_number_of_tokens(case):
    ids, counts, before = case.ids(), (case.tokens, case.tokens // 2, 0), case.state((3, 5, 0))
    logits, state, window = case.look(before, ids)
    want, _ = case.steps(before, ids, (case.tokens,) * BATCH)
    check_logits(logits, want)
    state = case.take(state, window, counts)
    check_state(state, case.steps(before, ids, counts)[1])


def test_windows_beyond_the_kernels_are_refused_where_those_are_named():
    case = Case(TINY, 17, implementation="interpret")
    with pytest.raises(
        UnsupportedError, match=r"interpret.*delta_window: .*from 1 to 16 tokens, got T = 17.*use 'xla'"
    ):
        case.look(case.state(), case.ids())


def test_a_text_read_by_windows_equals_transformers():
    """Windows that are taken to any depth, 0 included, until the text is over; the rest is looked at again."""
    cfg, weights = decoders.load(decoders.TIED)
    golden = decoders.golden(decoders.TIED)
    rng, tokens, size = np.random.default_rng(0), 7, 130
    state = init_decoder_state(cfg, batch=1, capacity=size)
    ids = ints(np.append(golden.ids[:size], [0] * tokens))
    logits = np.zeros((size, cfg.vocab), np.float32)
    while (at := int(state.position[0])) < size:
        length = min(tokens, size - at)
        made, state, window = verify(weights, state, ids[None, at : at + tokens], cfg=cfg, lengths=ints([length]))
        logits[at : at + length] = made[0, :length]
        state = commit(weights, state, window, ints(rng.integers(0, length + 1, 1)), cfg=cfg)
    checked = 0
    for t, want in zip(golden.at, golden.logits, strict=True):
        if t < size:
            assert max_rel(logits[t], want) <= tolerances.DECODER_TRANSFORMERS, f"token {t}"
            checked += 1
    assert checked > 3


# Memory


def test_a_window_survives_the_donation_of_its_state():
    """F55: and so does its witness. Nothing but the state that was given away is gone."""
    case = Case(TINY, 2)
    how = {"cfg": case.cfg}
    donating = jax.jit(verify_window, static_argnames=STATIC, donate_argnames=("state",))
    committing = jax.jit(commit_window, static_argnames=("cfg", "implementation"), donate_argnames=("state",))
    first = case.state()
    _, state, window = donating(case.weights, first, jnp.asarray(case.ids()), **how)
    assert all(leaf.is_deleted() for leaf in (*jax.tree.leaves(first.gdn), first.keys, first.values))
    saved = gdn.snapshot(state)
    held = jax.tree.map(np.array, window)
    taken = jax.tree.map(np.array, committing(case.weights, state, window, ints([2, 0, 1]), **how))
    assert all(leaf.is_deleted() for leaf in (*jax.tree.leaves(state.gdn), state.keys, state.values))
    assert_same(jax.tree.map(np.asarray, window), held)
    # what was given back by a snapshot is its state as well
    restored = gdn.restore(saved)
    assert_same(commit_window(case.weights, restored, window, ints([2, 0, 1]), **how).position, taken.position)
    again = committing(case.weights, restored, window, ints([2, 0, 1]), **how)
    assert_same(jax.tree.map(np.asarray, again), taken)


def test_a_window_of_the_27b_model_takes_little():
    """4 · (C + 2H) bytes a token and layer, where copies of S would take 151 MB a token."""
    cfg, layers = DECODERS["qwen3.5-27b"], 48
    token = window_nbytes(cfg.gdn, layers=layers, tokens=1, batch=1)
    assert token == layers * 4 * (10240 + 2 * 48) == 1_984_512
    assert window_nbytes(cfg.gdn, layers=layers, tokens=8, batch=3) == 3 * 8 * token
    assert 8 * token <= 20e6 < 8 * state_nbytes(cfg.gdn, layers=layers, batch=1)["S"] / 60
    state = decoder_state_shapes(cfg, batch=1, capacity=64)
    tokens = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    looking = functools.partial(verify_window, cfg=cfg)
    _, _, window = jax.eval_shape(looking, abstract_decoder(cfg, tier="q4"), state, tokens)
    nbytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(window))
    assert 8 * token <= nbytes <= 1.03 * 8 * token


# On disk


def test_what_is_saved_is_the_state_without_what_was_only_looked_at(tmp_path):
    """F40: before a commit none of the window's tokens, after it those that were taken and not one more."""
    before, state, window = looked()
    found = [saved_and_loaded(tmp_path / name, each) for name, each in (("before", before), ("looked", state))]
    assert_same(*found)
    taken = MAIN.take(state, window, (2, 0, 0))
    loaded = saved_and_loaded(tmp_path / "taken", taken)
    assert_same(remembered(loaded), remembered(taken))
    assert loaded.position.tolist() == [5, 9, 0]
    behind = np.arange(CAPACITY)[None] >= np.asarray(loaded.position)[:, None]
    for leaf in (loaded.keys, loaded.values):
        assert not np.asarray(leaf)[:, behind].any()


def saved_and_loaded(path, state):
    gdn.save_state(path, state, cfg=SMALL, weights_id="drawn")
    return gdn.load_state(path, cfg=SMALL, weights_id="drawn")


# What is refused


@functools.cache
def looked():
    """States before and after a look, and its window."""
    before = MAIN.state()
    _, state, window = MAIN.look(before, MAIN.ids(), (6, 4, 0))
    return before, state, window


def window_of(cfg):
    """The window of a model with `cfg`, without its numbers."""
    case = Case(cfg, MAIN.tokens)
    looking = functools.partial(verify_window, cfg=cfg)
    shapes = jax.eval_shape(looking, abstract_decoder(cfg, tier="f32"), case.state(), jnp.asarray(case.ids()))
    return jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes[2])


def refuses(error, words, function, *operands, **how):
    """It raises, and its operands are what they were."""
    held = jax.tree.map(np.array, operands[1:])
    with pytest.raises(error, match=words):
        function(*operands, **how)
    assert_same(jax.tree.map(np.asarray, operands[1:]), held)


TREE = (-1, 0, 0, 1, 1, 2)


@pytest.mark.parametrize(
    ("error", "words", "change"),
    [
        (ValueError, r"tokens must be \[B T\] with B=3", {"tokens": ints([1, 2, 3])}),
        (ValueError, r"tokens must be \[B T\] with B=3", {"tokens": ints([[1, 2]])}),
        (ValueError, "T of at least 1", {"tokens": jnp.zeros((BATCH, 0), jnp.int32)}),
        (ValueError, r"tokens must lie in 0 … 95 .* got \[96, -1\]", {"tokens": ints([[96], [-1], [3]])}),
        (TypeError, "tokens .* must be int32, got float32", {"tokens": jnp.ones((BATCH, 2))}),
        (TypeError, "tokens .* must be an array, got list", {"tokens": [[1], [2], [3]]}),
        (ValueError, r"lengths must lie in 0 … 6 .* got \[7, 0, -1\]", {"lengths": ints([7, 0, -1])}),
        (ValueError, r"lengths must be \[B\] with B=3", {"lengths": ints([1])}),
        (TypeError, "lengths must be int32", {"lengths": jnp.ones(BATCH)}),
        (UnsupportedError, r"each token following the one before, got \[-1, 0, 0.*branch", {"parents": TREE}),
        (UnsupportedError, "each token following", {"parents": ints([-1, -1, 0, 1, 2, 3])}),
        (ValueError, "parents must be T = 6 integers", {"parents": (-1, 0)}),
        (ValueError, "parents must be T = 6 integers", {"parents": np.arange(6.0) - 1}),
        (ValueError, "parents must be T = 6 integers", {"parents": "-1 0 1"}),
        (ValueError, "implementation must be None or one of", {"implementation": "cuda"}),
        (UnsupportedError, "precision must be one of exact", {"precision": "bf16"}),
        (TypeError, "cfg must be a DecoderConfig", {"cfg": SMALL.gdn}),
        (TypeError, "state must be a DecoderState", {"state": "state"}),
    ],
)
def test_a_look_that_makes_no_sense_is_refused(error, words, change):
    before, *_ = looked()
    request = {"weights": MAIN.weights, "state": before, "tokens": jnp.asarray(MAIN.ids()), "cfg": SMALL} | change
    operands = [request.pop(name) for name in ("weights", "state", "tokens")]
    refuses(error, words, verify_window, *operands, **request)


def test_chains_are_taken_and_parents_must_be_known():
    looking = functools.partial(verify_window, MAIN.weights, MAIN.state(), jnp.asarray(MAIN.ids()), cfg=SMALL)
    chain = (-1, 0, 1, 2, 3, 4)
    assert jax.eval_shape(functools.partial(looking, parents=chain))[0].shape == (BATCH, 6, SMALL.vocab)
    with pytest.raises(TypeError, match=r"parents must be known when the function is traced: .* a tuple"):
        jax.jit(lambda parents: looking(parents=parents))(ints(chain))


def changed(tree, **fields):
    return dataclasses.replace(tree, **fields)


def with_gates(window, **fields):
    return {"window": changed(window, gdn=changed(window.gdn, **fields))}


@pytest.mark.parametrize(
    ("error", "words", "change"),
    [
        (TypeError, "window must be a Window, got DecoderState", lambda s, w: {"window": s}),
        (TypeError, "accepted must be int32, got float32", lambda s, w: {"accepted": jnp.zeros(BATCH)}),
        (TypeError, "accepted must be an array, got list", lambda s, w: {"accepted": [0, 0, 0]}),
        (ValueError, r"accepted must be \[B\] with B=3", lambda s, w: {"accepted": ints([1])}),
        (ValueError, r"0 … \[6, 4, 0\] .* got \[6, 5, 0\]", lambda s, w: {"accepted": ints([6, 5, 0])}),
        (ValueError, r"0 … \[6, 4, 0\] .* got \[0, 0, -1\]", lambda s, w: {"accepted": ints([0, 0, -1])}),
        (ValueError, "implementation must be None or one of", lambda s, w: {"implementation": "cuda"}),
        (UnsupportedError, "implementation='triton' cannot carry out", lambda s, w: {"implementation": "triton"}),
        (StateMismatchError, "B=3 rows, the state 2", lambda s, w: {"state": gdn.select(s, [0, 1])}),
        (
            StateMismatchError,
            r"for this configuration.*commit with the weights, cfg and state that verify_window was called with",
            lambda s, w: {"window": window_of(WIDER)},
        ),
        (StateMismatchError, "window.gdn.beta .* must be", lambda s, w: with_gates(w, beta=w.gdn.beta[..., :1])),
        (StateMismatchError, "window.gdn.g .* must be", lambda s, w: with_gates(w, g=w.gdn.g[:, :1])),
        (TypeError, "window.gdn.g must be float32, got int32", lambda s, w: with_gates(w, g=w.gdn.g.astype(int))),
        (TypeError, "window.lengths must be an array, got None", lambda s, w: {"window": changed(w, lengths=None)}),
        (StateMismatchError, r"lengths must be \[B\]", lambda s, w: {"window": changed(w, lengths=w.lengths[:1])}),
        (StateMismatchError, "whether there are GDN layers", lambda s, w: {"window": window_of(ONLY_ATTENTION)}),
        (
            StateMismatchError,
            r"does not belong to this state: its rows stand at \[4, 9, 0\], and the window begins at \[3, 9, 0\]",
            lambda s, w: {"state": changed(s, position=ints([4, 9, 0]))},
        ),
        # rows of equal positions that are other sequences
        (
            StateMismatchError,
            "does not belong to this state; a window can be committed once",
            lambda s, w: {"state": changed(s, gdn=changed(s.gdn, conv_hist=s.gdn.conv_hist[:, ::-1]))},
        ),
        (StateMismatchError, "does not belong", lambda s, w: {"state": changed(s, keys=s.keys[:, ::-1])}),
        # the state that was given to the look, which lacks the window's keys
        (StateMismatchError, "to the state that verify_window returned", lambda s, w: {"state": looked()[0]}),
        (TypeError, "state must be a DecoderState", lambda s, w: {"state": s.gdn}),
        (TypeError, "cfg must be a DecoderConfig", lambda s, w: {"cfg": SMALL.gdn}),
        (ValueError, "weights", lambda s, w: {"cfg": DENSE}),
    ],
)
def test_a_commit_that_makes_no_sense_is_refused(error, words, change):
    _, state, window = looked()
    request = {"weights": MAIN.weights, "state": state, "window": window, "accepted": ints([2, 4, 0]), "cfg": SMALL}
    request |= change(state, window)
    operands = [request.pop(name) for name in ("weights", "state", "window", "accepted")]
    refuses(error, words, commit_window, *operands, **request)


def test_a_window_is_committed_once():
    """F38: to 0 tokens as often as one likes, since nothing has moved then."""
    _, state, window = looked()
    state = MAIN.take(state, window, (0, 0, 0))
    state = commit_window(MAIN.weights, state, window, ints([0, 1, 0]), cfg=SMALL)
    assert state.position.tolist() == [3, 10, 0]
    operands = (MAIN.weights, state, window, ints([0, 0, 0]))
    refuses(StateMismatchError, "can be committed once", commit_window, *operands, cfg=SMALL)


def test_a_window_is_committed_to_its_own_look():
    """F32: of two looks from the same token, either window goes with the keys and values of its own look alone."""
    _, state, first = looked()
    ids = MAIN.ids()
    ids[:, 1:] = (ids[:, 1:] + 1) % SMALL.vocab
    _, later, second = MAIN.look(state, ids, (6, 4, 0))
    for wrong, window in ((state, second), (later, first)):
        operands = (MAIN.weights, wrong, window, ints([2, 2, 0]))
        refuses(StateMismatchError, "does not belong", commit_window, *operands, cfg=SMALL)


def test_a_window_whose_first_keys_were_written_over_is_not_committed():
    """A later look at fewer tokens leaves the keys of the last ones as they were."""
    _, state, first = looked()
    _, later, _ = MAIN.look(state, (MAIN.ids() + 1) % SMALL.vocab, (2, 2, 0))
    operands = (MAIN.weights, later, first, ints([6, 4, 0]))
    refuses(StateMismatchError, "does not belong", commit_window, *operands, cfg=SMALL)


def test_a_window_on_states_that_differ_in_S_alone():
    """Neither keys nor a history tell such models' sequences apart."""
    cfg = dataclasses.replace(ONLY_GDN, gdn=dataclasses.replace(ONLY_GDN.gdn, conv_width=1))
    case = Case(cfg, 2)
    state = case.state()
    _, looked_at, window = case.look(state, case.ids())
    other = changed(looked_at, gdn=changed(looked_at.gdn, S=looked_at.gdn.S[:, ::-1]))
    refuses(StateMismatchError, "does not belong", commit_window, case.weights, other, window, ints([1] * 3), cfg=cfg)
    kept = commit_window(case.weights, looked_at, window, ints([1, 0, 2]), cfg=cfg)
    assert kept.position.tolist() == [4, 9, 2]


# -- compiled for a GPU, without one --------------------------------------------------------------------------------


def one_round(weights, state, tokens, accepted, *, cfg):
    logits, state, window = verify_window(weights, state, tokens, cfg=cfg)
    return logits, commit_window(weights, state, window, accepted, cfg=cfg)


@pytest.mark.deviceless
def test_a_round_of_the_27b_model_copies_no_state_and_no_window():
    """Two periods of its layers, T = 4: S, history, keys and values in place; the window in temporary memory, once."""
    whole = DECODERS["qwen3.5-27b"]
    cfg = dataclasses.replace(whole, layer_types=whole.layer_types[:8], mlp_types=whole.mlp_types[:8])
    state = decoder_state_shapes(cfg, batch=1, capacity=1024)
    ids, counts = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1, 4), (1,)))
    program = jax.jit(one_round, static_argnames="cfg", donate_argnames="state")
    compiled = compile_for_h200(program, abstract_decoder(cfg, tier="q4"), state, ids, counts, cfg=cfg)
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory.alias_size_in_bytes == sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    held = [(6, 1, 48, 128, 128), (6, 1, 3, 10240), (2, 1, 1024, 4, 256), (6, 4, 1, 10240)]
    moved = "copy|copy-start|fusion|dynamic-update-slice"  # a fusion of nothing fills the new window with zeros
    for shape in held:
        named = rf"= f32\[{','.join(map(str, shape))}\]\S* "
        assert re.search(named, text)
        assert re.findall(rf"{named}(?:{moved})\([^)].*", text) == []
    window = window_nbytes(cfg.gdn, layers=6, tokens=4, batch=1)
    attended = 4 * 4 * 24 * 128 * (256 + 2)  # the parts of four rows that full attention puts together
    assert window <= memory.temp_size_in_bytes < window + attended + 2**21
