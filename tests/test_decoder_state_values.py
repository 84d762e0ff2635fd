"""A decoder's state as a value, as in `test_state`: with keys, values and positions, and the rows of a generation."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gdn_jax as gdn
from gdn_jax.decoder.generate import NOTHING, Rows
from gdn_jax.decoder.model import decode_step
from gdn_jax.decoder.state import DecoderState, decoder_state_shapes, init_decoder_state
from gdn_jax.errors import StateMismatchError
from tests.support import decoders
from tests.support.deviceless import compile_for_h200

CFG = decoders.SMALL
CAPACITY = 16
ONLY_GDN = dataclasses.replace(CFG, layer_types=("linear_attention",) * 2, mlp_types=("dense",) * 2, moe=None)
ONLY_ATTENTION = dataclasses.replace(
    CFG, layer_types=("full_attention",) * 2, mlp_types=("dense",) * 2, moe=None, gdn=None
)
TINY = dataclasses.replace(CFG, layer_types=("linear_attention", "full_attention"), mlp_types=("dense",) * 2, moe=None)
KINDS = ("hybrid", "bfloat16", "gdn", "attention", "rows")


def numbers(shapes, seed=0):
    """The tree filled with numbers that all differ, whatever its dtypes."""
    rng = np.random.default_rng(seed)

    def leaf(shape):
        if shape.dtype == jnp.bool_:
            return jnp.asarray(rng.random(shape.shape) < 0.5)
        drawn = rng.integers(0, CAPACITY, shape.shape) if shape.dtype == jnp.int32 else rng.normal(size=shape.shape)
        return jnp.asarray(drawn.astype(shape.dtype))

    return jax.tree.map(leaf, shapes)


def some_state(kind, batch=4, capacity=CAPACITY, seed=0):
    cfg = {"gdn": ONLY_GDN, "attention": ONLY_ATTENTION}.get(kind, CFG)
    dtype = "bfloat16" if kind == "bfloat16" else "float32"
    state = numbers(init_decoder_state(cfg, batch=batch, capacity=capacity, kv_dtype=dtype), seed)
    if kind != "rows":
        return state
    return Rows(state, *numbers((jnp.zeros(batch, jnp.int32), jnp.zeros((batch, CFG.vocab), bool)), seed))


@pytest.fixture(params=KINDS)
def state(request):
    return some_state(request.param)


def axis_of(path):
    """Where a leaf has its rows, written down anew."""
    name = jax.tree_util.keystr(path, simple=True, separator=".").removeprefix("state.")
    return 0 if name in ("position", "tokens", "seen") else 1


def rows_of(state, rows):
    """The chosen rows, as numpy."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: np.take(leaf, rows, axis=axis_of(path)), state)


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


def buffers(state):
    return {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state) if leaf.size}


# Rows move as a whole


def test_branch_is_row_major(state):
    assert_same(gdn.branch(state, 3), rows_of(state, [b for b in range(4) for _ in range(3)]))


def test_select_reorders_and_repeats(state):
    assert_same(gdn.select(state, [3, 1, 1]), rows_of(state, [3, 1, 1]))
    assert_same(gdn.select(gdn.branch(state, 3), [0, 4, 8, 11]), state)


def test_merge_of_selected_rows_is_the_original(state):
    parts = [gdn.select(state, rows) for rows in ([0], [1, 2], [3])]
    assert_same(gdn.merge(parts), state)
    assert_same(gdn.merge(iter(parts[:1])), parts[0])


@pytest.mark.parametrize("filth", [np.nan, np.inf, 1e3])
def test_a_reused_row_starts_clean(state, filth):
    """F26: whatever it held; the others keep every bit."""
    dirty = jax.tree.map(
        lambda leaf: jnp.full_like(leaf, filth) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, state
    )
    zero = jax.tree.map(np.zeros_like, state)
    assert_same(gdn.reset(dirty), zero)
    some = gdn.reset(dirty, [2, 0])
    assert_same(rows_of(some, [0, 2]), rows_of(zero, [0, 2]))
    assert_same(rows_of(some, [1, 3]), rows_of(dirty, [1, 3]))


def test_snapshots_own_their_buffers_and_so_does_all_that_is_derived(state):
    saved = gdn.snapshot(state)
    values = [state, saved.state, gdn.restore(saved), gdn.restore(saved), gdn.branch(state, 1), gdn.merge([state])]
    values += [gdn.select(state, range(4)), gdn.reset(state), gdn.reset(state, [1])]
    values += [gdn.resize(state, capacity=room) for room in (CAPACITY, 2 * CAPACITY)]
    everything = [buffers(value) for value in values]
    assert len(set.union(*everything)) == sum(map(len, everything))


@pytest.mark.parametrize("kind", ["hybrid", "rows"])
def test_everything_may_be_jitted(kind):
    """Then nothing can go through the host: a traced array has no values there."""
    state = some_state(kind)
    rows = jnp.asarray([2, 0])
    for function in (
        gdn.reset,
        lambda s: gdn.reset(s, rows),
        lambda s: gdn.restore(gdn.snapshot(s)),
        lambda s: gdn.branch(s, 2),
        lambda s: gdn.select(s, rows),
        lambda s: gdn.merge([s, s]),
        lambda s: gdn.resize(s, capacity=CAPACITY + 3),
    ):
        assert_same(jax.jit(function)(state), function(state))


def test_nothing_moves_between_host_and_device(state):
    with jax.transfer_guard("disallow"):
        gdn.branch(gdn.merge([gdn.restore(gdn.snapshot(state)), state]), 2)


def test_traced_rows_that_do_not_exist(state):
    """F29: they are never another sequence, and take no token; resetting them resets nothing."""
    rows = jnp.asarray([2, -1, 4])
    got = jax.jit(gdn.select)(state, rows)
    assert_same(rows_of(got, [0]), rows_of(state, [2]))
    inner = got.state if isinstance(got, Rows) else got
    floating = [leaf for leaf in jax.tree.leaves(inner) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert all(np.isnan(np.asarray(leaf, np.float32)[:, 1:]).all() for leaf in floating)
    assert inner.position.tolist()[1:] == [CAPACITY] * 2
    if isinstance(got, Rows):
        assert got.tokens.tolist()[1:] == [NOTHING] * 2
        assert not np.any(got.seen[1:])
    outside = jnp.asarray([-1, 4, 2**31 - 1, -(2**31)])
    assert_same(jax.jit(gdn.reset)(state, outside), state)


@pytest.mark.deviceless
@pytest.mark.parametrize(
    ("function", "is_donated"),
    [
        (gdn.reset, True),
        (gdn.select, False),
        (lambda state, rows: gdn.branch(state, 2), False),
        (lambda state, rows: gdn.resize(state, capacity=5000), False),
    ],
    ids=["reset", "select", "branch", "resize"],
)
def test_nothing_is_copied_that_need_not_be(function, is_donated):
    """On a card, for the 27B model: what is donated is changed in place, and what is read lies nowhere else between."""
    state = decoder_state_shapes(gdn.DECODERS["qwen3.5-27b"], batch=8, capacity=4096)
    program = jax.jit(function, donate_argnums=0 if is_donated else ())
    memory = compile_for_h200(program, state, jax.ShapeDtypeStruct((2,), jnp.int32)).memory_analysis()
    assert memory.temp_size_in_bytes < 10_000
    assert memory.alias_size_in_bytes == is_donated * sum(
        leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)
    )


# Room


def test_more_room_is_zero_and_less_room_drops_what_is_not_used(state):
    used = int(max(state.used))
    larger = gdn.resize(state, capacity=CAPACITY + 5)
    assert larger.capacity == CAPACITY + 5
    inner = larger.state if isinstance(larger, Rows) else larger
    assert not np.any(np.asarray(inner.keys, np.float32)[:, :, CAPACITY:])
    assert not np.any(np.asarray(inner.values, np.float32)[:, :, CAPACITY:])
    assert_same(gdn.resize(larger, capacity=CAPACITY), state)
    smaller = gdn.resize(state, capacity=used)
    assert smaller.capacity == used
    with pytest.raises(StateMismatchError, match=rf"capacity must be at least {used}, the tokens of row \d, got"):
        gdn.resize(state, capacity=used - 1)


def test_less_room_needs_positions_that_are_known():
    with pytest.raises(ValueError, match="cannot become smaller inside jit"):
        jax.jit(lambda s: gdn.resize(s, capacity=3))(some_state("hybrid"))


@pytest.mark.parametrize(
    ("capacity", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)]
)
def test_room_that_cannot_be(capacity, error):
    with pytest.raises(error, match="capacity must be"):
        gdn.resize(some_state("hybrid"), capacity=capacity)


def test_a_gdn_state_has_no_room_to_change():
    with pytest.raises(TypeError, match="state must have a capacity, as that of a decoder has, got GdnState"):
        gdn.resize(some_state("hybrid").gdn, capacity=3)


# What does not go together


def test_merges_that_cannot_be():
    state = some_state("hybrid")
    with pytest.raises(StateMismatchError, match=r"keys is .*16, 2, 16\) in state 0 and .*32, .*resize makes the same"):
        gdn.merge([state, some_state("hybrid", capacity=32)])
    with pytest.raises(StateMismatchError, match="differ: keys is float32 in state 0 and bfloat16 in state 1"):
        gdn.merge([state, some_state("bfloat16")])
    with pytest.raises(StateMismatchError, match=r"differ: gdn\.S is \(2, 4.* in state 0 and \(1, 4.* in state 2"):
        gdn.merge([state, state, dataclasses.replace(state, gdn=jax.tree.map(lambda leaf: leaf[:1], state.gdn))])
    with pytest.raises(StateMismatchError, match="state 0 and state 1 have different parts"):
        gdn.merge([state, dataclasses.replace(state, gdn=None)])
    with pytest.raises(TypeError, match=r"states\[1\] must be a DecoderState, got GdnState"):
        gdn.merge([state, state.gdn])
    with pytest.raises(TypeError, match=r"states\[1\] must be a Rows, got DecoderState"):
        gdn.merge([some_state("rows"), state])


@pytest.mark.parametrize(
    ("spoil", "error", "words"),
    [
        (lambda s: {"position": s.position.astype(jnp.float32)}, TypeError, "state.position must be int32"),
        (lambda s: {"position": s.position[:3]}, StateMismatchError, r"B=3 rows, but state.keys \(2, 4"),
        (lambda s: {"position": s.position[0]}, StateMismatchError, r"state.position must be \[B\]"),
        (lambda s: {"keys": s.keys[0]}, StateMismatchError, r"state.keys \[A, B, S, N, Hd\]"),
        (lambda s: {"keys": None}, TypeError, "state.keys must be an array of float32 or bfloat16, got NoneType"),
        (lambda s: {"values": s.values.astype(jnp.bfloat16)}, TypeError, "state.values must be float32"),
        (lambda s: {"values": s.values[:, :, 1:]}, StateMismatchError, r"state.keys .* as state.values is"),
        (lambda s: {"gdn": s.gdn.S}, TypeError, "state.gdn must be a GdnState"),
        (lambda s: {"gdn": gdn.select(s.gdn, [0])}, StateMismatchError, r"B=4 rows, but state.gdn.S"),
    ],
)
def test_what_is_no_state_is_refused_by_all(spoil, error, words):
    state = some_state("hybrid")
    state = dataclasses.replace(state, **spoil(state))
    for function in (gdn.snapshot, gdn.reset, lambda s: gdn.branch(s, 2), lambda s: gdn.select(s, [0])):
        with pytest.raises(error, match=words):
            function(state)
    for refused in (lambda: gdn.merge([some_state("hybrid"), state]), lambda: gdn.resize(state, capacity=16)):
        with pytest.raises(error, match=words):
            refused()


def test_rows_that_do_not_go_together_are_refused():
    rows = some_state("rows")
    for wrong in ({"tokens": rows.tokens[:2]}, {"seen": rows.seen[:1]}):
        with pytest.raises(
            StateMismatchError, match=r"state.tokens must be \[B\] and state.seen \[B, vocab\] with B=4"
        ):
            gdn.branch(dataclasses.replace(rows, **wrong), 2)
    with pytest.raises(TypeError, match=r"state\.state must be a DecoderState, got GdnState"):
        gdn.branch(dataclasses.replace(rows, state=rows.state.gdn), 2)


def test_bad_rows_are_those_of_a_gdn_state():
    """F29; what else is bad is in `test_layer_errors`, where the same function is asked."""
    state = some_state("hybrid")
    for rows, words in (([4], r"0 … 3 \(batch 4\), got \[4\]"), ([-1], r"got \[-1\]"), ([0.0], "must be integers")):
        for function in (gdn.reset, gdn.select):
            with pytest.raises(ValueError, match=words):
                function(state, rows)
    with pytest.raises(ValueError, match=r"rows must not repeat, got \[1, 1\]"):
        gdn.reset(state, [1, 1])
    with pytest.raises(ValueError, match="at least one row"):
        gdn.select(state, [])


# With a model


@functools.cache
def weights():
    return decoders.drawn(TINY, "tests/tiny")


donating_step = jax.jit(decode_step, static_argnames=decoders.STATIC, donate_argnames=("state",))
IDS = np.asarray([5, 95, 0, 17, 17, 60, 33, 2], np.int32)


def run(state, tokens):
    """Logits of every token and the last state; each step donates the state before."""
    logits = []
    for token in tokens:
        made, state = donating_step(weights(), state, jnp.full(state.batch, token, jnp.int32), cfg=TINY)
        logits.append(np.asarray(made))
    return np.stack(logits), state


def test_a_snapshot_survives_donated_steps_and_many_restores():
    """F35, F37: a window of tokens is taken back and played again, three times over, to the same bits."""
    _, state = run(init_decoder_state(TINY, batch=2, capacity=CAPACITY), IDS[:3])
    saved, before = gdn.snapshot(state), jax.tree.map(np.array, state)
    first, end = run(state, IDS[3:6])
    for _ in range(2):
        state = gdn.restore(saved)
        assert_same(state, before)
        again, same_end = run(state, IDS[3:6])
        np.testing.assert_array_equal(again, first)
        assert_same(same_end, end)
    assert_same(saved.state, before)


def test_forks_go_their_own_ways_from_the_same_token():
    """F32, F34: rows at several depths are put together, and each goes on as it would have alone, at its position."""
    states, wanted = [], []
    for length in (2, 5, 7):
        _, state = run(init_decoder_state(TINY, batch=2, capacity=CAPACITY), IDS[:length])
        wanted.append(run(gdn.restore(gdn.snapshot(state)), [9, 8])[0][:, 0])
        states.append(gdn.select(state, [0]))
    together = gdn.merge([states[1], states[0]])
    logits, state = run(together, [9])
    np.testing.assert_array_equal(logits[0], [wanted[1][0], wanted[0][0]])
    assert state.position.tolist() == [6, 3]
    # Row 1 is given up for another sequence, that of row 0 begins anew.
    swapped = gdn.merge([gdn.select(state, [1]), states[2]])
    logits, state = run(swapped, [8])
    np.testing.assert_array_equal(logits[0, 0], wanted[0][1])
    begun, _ = run(gdn.reset(state, [0]), IDS[:1])
    np.testing.assert_array_equal(
        begun[0, 0], run(init_decoder_state(TINY, batch=2, capacity=CAPACITY), IDS[:1])[0][0, 0]
    )


def test_what_does_not_exist_takes_no_token():
    _, state = run(init_decoder_state(TINY, batch=2, capacity=CAPACITY), IDS[:3])
    chosen = jax.jit(gdn.select)(state, jnp.asarray([0, 7]))
    logits, after = donating_step(weights(), chosen, jnp.asarray([1, 1], jnp.int32), cfg=TINY)
    assert np.isfinite(logits[0]).all()
    assert np.isnan(logits[1]).all()
    assert after.position.tolist() == [4, CAPACITY]


@functools.cache
def tiny():
    """A model that is quick to compile. All below ask for two rows, so that there is one program for each step."""
    return gdn.Decoder(cfg=TINY, weights=weights())


@functools.cache
def said():
    return tiny().generate([[5, 17, 9], [3, 3]], max_new_tokens=4, keep_state=True).state


def test_a_generation_is_a_value_too():
    """Its rows fork, and forks that draw alike say the same; each draws by a seed of its own."""
    model, state = tiny(), said()
    assert isinstance(state, Rows)
    assert isinstance(state.state, DecoderState)
    onward = model.generate([[], []], max_new_tokens=5, state=state).tokens.tolist()
    swapped = gdn.merge([gdn.select(state, [1]), gdn.select(state, [0])])
    assert model.generate([[], []], max_new_tokens=5, state=swapped).tokens.tolist() == onward[::-1]
    forks = gdn.branch(gdn.select(state, [1]), 2)
    assert model.generate([[], []], max_new_tokens=5, state=forks).tokens.tolist() == [onward[1]] * 2
    drawing = gdn.SamplingParams(temperature=5.0, seed=3)
    drawn = model.generate([[], []], max_new_tokens=5, sampling=drawing, state=forks).tokens.tolist()
    assert drawn[0] != drawn[1]


def test_rows_of_another_vocabulary_are_refused():
    rows = said()
    with pytest.raises(StateMismatchError, match=r"state.seen must be \[B, vocab\] with vocab=96"):
        tiny().generate([[], []], state=dataclasses.replace(rows, seen=rows.seen[:, 1:]))
