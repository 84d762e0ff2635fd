"""Prefill against the float64 oracle and against `step`: whole, in parts, padded and packed; and what it refuses."""

import functools
import inspect
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gdn_jax as gdn
from gdn_jax import sequence
from gdn_jax.errors import UnsupportedError
from gdn_jax.evidence.metrics import rms_rel
from gdn_jax.q4 import dequantize, quantize
from gdn_jax.weights import Q4Projections
from tests.support import cases, tolerances
from tests.support.cases import assert_same_bits, error, layers_of, rows_of
from tests.test_layer import active_of
from tests.test_layer_errors import BAD_CALLS, CFG, STATE, B, D, W, X, refuses

prefill = jax.jit(gdn.prefill, static_argnames=cases.STATIC)
SLOT = jnp.int32(1)
T, ROWS = 70, 4
XS = cases.inputs(CFG, T, ROWS, label="prefill", kind="heavy")
START = cases.random_state(CFG, layers=3, batch=ROWS, label="prefill")
FULL = np.full(ROWS, T, np.int32)
ONE = np.zeros((T, ROWS), np.int32)


def run(xs=XS, state=START, lengths=FULL, segment_ids=ONE):
    """One program for all that follows: ys and the next state."""
    ys, state = prefill(
        W, state, jnp.asarray(xs), cfg=CFG, layer=SLOT, lengths=jnp.asarray(lengths), segment_ids=segment_ids
    )
    return np.asarray(ys), state


def check_row(ys, state, row, xs, *, start=START):
    """One row's ys and state after xs [t, D] from `start` (None: zeros), RMS-relative to float64."""
    one = gdn.init_state(CFG, layers=3) if start is None else gdn.select(start, [row])
    want = cases.oracle_run(CFG, np.asarray(xs)[:, None], one.S[1], one.conv_hist[1])
    assert rms_rel(ys, want.ys[:, 0]) <= tolerances.PREFILL
    if state is not None:
        assert rms_rel(state.S[1, row], want.S[0]) <= tolerances.PREFILL
        assert rms_rel(state.conv_hist[1, row], want.conv_hist[0]) <= tolerances.PREFILL


# ---------------------------------------------------------------------------------------------------------------------
# Against float64
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [cases.CASES[i] for i in (0, 3, 7)], ids=str)
def test_prefill_agrees_with_float64(case):
    """F12, F18, F21, F27: each token within the bound of `step`; short and ragged rows, width 1."""
    lengths = None if case.lengths is None else np.array(case.lengths, np.int32)
    w, start, xs = cases.weights(case.cfg), cases.start_of(case), cases.xs_of(case)
    ys, state = prefill(w, start, xs, cfg=case.cfg, layer=jnp.int32(case.slot), lengths=lengths)
    want, active = cases.reference(case), active_of(case)
    assert cases.token_errors(ys, want.ys)[active].max() <= tolerances.CASE_OUTPUT
    assert not np.any(np.asarray(ys)[~active])
    for row in range(case.batch):
        assert rms_rel(state.S[case.slot, row], want.S[row]) <= tolerances.PREFILL
        assert rms_rel(state.conv_hist[case.slot, row], want.conv_hist[row]) <= tolerances.PREFILL
    others = np.arange(case.layers) != case.slot
    assert_same_bits(layers_of(state, others), layers_of(start, others))


def test_a_long_sequence():
    """Float32 throughout: the errors of `scan` at 2048 tokens, within the bounds that hold for its 4096."""
    case = cases.Case("long-prefill", CFG, batch=2, kind="heavy", tokens=2048)
    start = cases.start_of(case)
    ys, state = prefill(cases.weights(CFG), start, cases.xs_of(case), cfg=CFG, layer=SLOT)
    want = cases.oracle_run(CFG, cases.xs_of(case), start.S[1], start.conv_hist[1])
    errors = cases.token_errors(ys, want.ys)
    assert errors.max() <= tolerances.LONG_WORST[4096]
    assert np.quantile(errors, 0.99) <= tolerances.LONG_PERCENTILE
    assert np.median(errors) <= tolerances.LONG_MEDIAN
    assert rms_rel(ys, want.ys) <= tolerances.PREFILL
    assert error(state.S[1], want.S) <= tolerances.LONG_STATE
    assert error(state.conv_hist[1], want.conv_hist) <= tolerances.LONG_STATE


@pytest.mark.parametrize("first", [0, 1, 2, 3, 37, 64, T])
def test_two_parts_are_the_whole(first):
    """F16, F17: also where the first part is shorter than the history."""
    ys, state = run(lengths=0 * FULL + first)
    rest, state = run(np.roll(XS, -first, axis=0), state, FULL - first)
    ys = np.concatenate([ys[:first], rest[: T - first]])
    for row in range(ROWS):
        check_row(ys[:, row], state, row, XS[:, row])


def test_prefill_then_step():
    """F17, F39: rows of unequal prompts, each continued at its own position."""
    lengths = np.array([69, 1, 0, 64], np.int32)
    ys, state = run(lengths=lengths)
    nexts = XS[lengths, np.arange(ROWS)]
    y, state = cases.step(W, state, nexts, cfg=CFG, layer=SLOT)
    for row, length in enumerate(lengths):
        check_row([*ys[:length, row], y[row]], state, row, XS[: length + 1, row])


# ---------------------------------------------------------------------------------------------------------------------
# Padding
# ---------------------------------------------------------------------------------------------------------------------

LENGTHS = np.array([65, 0, 2, 70], np.int32)


@pytest.mark.parametrize("filth", [np.nan, np.inf, 1e30])
def test_padding_is_never_used(filth):
    """F10, F15, F18: ys is 0 there, the state is that after the last token, and a row without tokens keeps its bits."""
    padding = np.arange(T)[:, None] >= LENGTHS
    xs = np.where(padding[..., None], np.float32(filth), XS)
    ids = np.where(padding, np.arange(T, dtype=np.int32)[:, None], 0)
    ys, state = run(xs, lengths=LENGTHS, segment_ids=ids)
    assert not np.any(ys[padding])
    for row in (0, 2, 3):
        check_row(ys[: LENGTHS[row], row], state, row, XS[: LENGTHS[row], row])
    assert_same_bits(rows_of(state, [1]), rows_of(START, [1]))
    assert_same_bits((ys, state), run(lengths=LENGTHS))


def test_a_row_without_tokens_keeps_even_nan():
    """F25."""
    spoilt = jax.tree.map(lambda leaf: leaf.at[:, 1].set(jnp.nan), START)
    ys, state = run(state=spoilt, lengths=LENGTHS)
    assert_same_bits(rows_of(state, [1]), rows_of(spoilt, [1]))
    assert_same_bits(ys, run(lengths=LENGTHS)[0])


def test_traced_lengths_beyond_the_sequence_are_its_ends():
    want = run(lengths=np.array([T, 0, 5, T], np.int32))
    assert_same_bits(run(lengths=np.array([2**31 - 1, -7, 5, T + 1], np.int32)), want)


# ---------------------------------------------------------------------------------------------------------------------
# Packed documents, and what is not finite
# ---------------------------------------------------------------------------------------------------------------------

BORDERS = ((0, 20, 21, 23, 70), (0, 1, 64, 65, 70), (0, 70), (0, 2, 4, 66, 70))
IDS = np.stack([np.repeat([5, 0, 0x7FFFFFFF, 5][: len(b) - 1], np.diff(b)) for b in BORDERS], axis=1).astype(np.int32)


def test_packed_documents_are_as_if_alone():
    """F19: documents of 1, 2 and 66 tokens; both S and the history start again, and the last history has zeros."""
    ys, state = run(segment_ids=IDS)
    for row, borders in enumerate(BORDERS):
        for start, end in itertools.pairwise(borders):
            after = state if end == T else None
            check_row(ys[start:end, row], after, row, XS[start:end, row], start=None if start else START)


def test_a_short_last_document_leaves_zeros_in_the_history():
    """F19, F21."""
    _, state = run(lengths=np.array([21, 65, 70, 4], np.int32), segment_ids=IDS)
    for row, known in ((0, 1), (1, 1), (3, 2)):
        history = np.asarray(state.conv_hist)[1, row]
        assert not np.any(history[: 3 - known])
        assert np.all(history[3 - known :] != 0)


@pytest.mark.parametrize("value", [1.0, np.nan, np.inf])
def test_a_document_does_not_reach_the_next(value):
    """F19: another first document, and another state before it, change no bit of the later ones."""
    ys, state = run(segment_ids=IDS)
    xs = np.array(XS)
    xs[:20, 0] = value
    other = jax.tree.map(lambda leaf: leaf.at[1, 0].set(value), START)
    new_ys, new_state = run(xs, other, segment_ids=IDS)
    assert_same_bits((new_ys[20:], layers_of(new_state, 1)), (ys[20:], layers_of(state, 1)))
    assert np.any(new_ys[:20, 0] != ys[:20, 0])


@pytest.mark.parametrize("filth", [np.nan, np.inf])
def test_what_is_not_finite_stays_in_its_row_and_behind_its_token(filth):
    """F11."""
    ys, state = run()
    new_ys, new_state = run(np.asarray(XS.at[66, 2, 5].set(filth)))
    others = [0, 1, 3]
    assert_same_bits((new_ys[:, others], rows_of(new_state, others)), (ys[:, others], rows_of(state, others)))
    assert_same_bits(new_ys[:66], ys[:66])
    assert np.isnan(new_ys[66:, 2]).all()
    foul = gdn.GdnState(*(leaf.at[1, 0].set(filth) for leaf in (START.S, START.conv_hist)))
    foul_ys, _ = run(state=foul)
    assert_same_bits(foul_ys[:, 1:], ys[:, 1:])
    assert np.isnan(foul_ys[:, 0]).all()


# ---------------------------------------------------------------------------------------------------------------------
# Weights of every kind, implementations, transformations
# ---------------------------------------------------------------------------------------------------------------------

Q4_CASE = cases.Case("q4-prefill", cases.geometry(96, 2, 6, 12, 64, 4), batch=3, kind="heavy", tokens=5)


@pytest.fixture(scope="module")
def packed():
    dense = cases.weights(Q4_CASE.cfg)
    return dense.replace(large=Q4Projections(*(quantize(getattr(dense.large, f)) for f in ("qkv", "z", "out"))))


def prefill_q4(w, **options):
    common = {"cfg": Q4_CASE.cfg, "layer": SLOT, **options}
    return prefill(w, cases.start_of(Q4_CASE), cases.xs_of(Q4_CASE), **common)


def test_4_bit_weights(packed):
    """Against the oracle on the dequantised weights."""
    canonical = dict(cases.canonical(Q4_CASE.cfg))
    for field, weight in (("qkv", "in_proj_qkv"), ("z", "in_proj_z"), ("out", "out_proj")):
        canonical[f"{weight}.weight"] = np.asarray(dequantize(getattr(packed.large, field)))
    start, xs = cases.start_of(Q4_CASE), cases.xs_of(Q4_CASE)
    want = cases.oracle_run(Q4_CASE.cfg, xs, start.S[1], start.conv_hist[1], weights=canonical)
    ys, state = prefill_q4(packed)
    assert rms_rel(ys, want.ys) <= tolerances.PREFILL
    assert rms_rel(state.S[1], want.S) <= tolerances.PREFILL


@pytest.mark.slow
def test_a_stack_with_8_bit_activations(packed):
    """Coarser than exact, and near to its own layer alone: any other layer's output has nothing to do with it."""
    other = jax.tree.map(lambda leaf: leaf[::-1], packed)
    stack = gdn.GdnStack(jax.tree.map(lambda *leaves: jnp.stack(leaves), other, packed, other))
    q8, exact = prefill_q4(stack, precision="q8"), prefill_q4(packed)
    assert 1e-3 < rms_rel(q8[0], exact[0]) < 5e-2
    assert rms_rel(q8[1].S[1], exact[1].S[1]) < 5e-2
    assert_same_bits(layers_of(q8[1], [0, 2]), layers_of(exact[1], [0, 2]))


@pytest.mark.slow
def test_bf16_is_near_exact(packed):
    """4-bit and float32 weights: S, the history, gates and norms stay float32."""
    for w in (packed, cases.weights(Q4_CASE.cfg)):
        rounded, exact = (jax.tree.leaves(prefill_q4(w, precision=name)) for name in ("bf16", "exact"))
        errors = [rms_rel(*pair) for pair in zip(rounded, exact, strict=True)]
        assert 1e-3 < max(errors) <= tolerances.PREFILL_BF16


def test_bf16_is_for_sequences():
    start, x = cases.start_of(Q4_CASE), cases.xs_of(Q4_CASE)
    for function, inputs in ((gdn.step, x[0]), (gdn.scan, x), (gdn.trace, x[0])):
        with pytest.raises(
            UnsupportedError, match="one of exact for weights of tier 'f32', got 'bf16'; bf16 is for pro"
        ):
            function(cases.weights(Q4_CASE.cfg), start, inputs, cfg=Q4_CASE.cfg, precision="bf16")


def test_a_tuple_takes_the_member_of_the_layer():
    other = jax.tree.map(lambda leaf: leaf[::-1], W)
    ys, _ = jax.jit(lambda w: gdn.prefill(w, START, XS[:1], cfg=CFG, layer=1))((other, W, other))
    assert rms_rel(ys[0], cases.step(W, START, XS[0], cfg=CFG, layer=SLOT)[0]) <= tolerances.PREFILL


@pytest.mark.parametrize("layer", [-1, 3, 2**31 - 1])
def test_a_traced_layer_out_of_range_gives_nan_and_no_change(packed, layer):
    ys, state = prefill_q4(packed, layer=jnp.int32(layer))
    assert np.isnan(ys).all()
    assert_same_bits(state, cases.start_of(Q4_CASE))


@pytest.mark.parametrize("transformed", [jax.grad, jax.vmap], ids=["grad", "vmap"])
def test_kernels_asked_for_by_name_refuse_what_they_have_no_rule_for(packed, transformed):
    start, xs = cases.start_of(Q4_CASE), cases.xs_of(Q4_CASE)

    def total(xs):
        return jnp.sum(gdn.prefill(packed, start, xs, cfg=Q4_CASE.cfg, implementation="interpret")[0])

    with pytest.raises(UnsupportedError, match="'interpret' has no rule for"):
        transformed(total)(xs if transformed is jax.grad else xs[None])


@pytest.mark.slow
def test_gradients_are_those_of_scan():
    """F57: with respect to weights, state and inputs; NaN in the padding reaches none of them."""
    lengths = np.array([4, 2], np.int32)
    active = np.arange(4)[:, None] < lengths
    state = cases.random_state(CFG, layers=1, batch=2)
    xs = jnp.where(active[..., None], cases.inputs(CFG, 4, 2), jnp.nan)
    mixed = cases.inputs(CFG, 4, 2, label="cotangent")

    def gradient(function, **options):
        def loss(w, state, xs):
            ys, after = function(w, state, xs, cfg=CFG, **options)
            return jnp.sum(mixed * ys) + jnp.sum(after.S)

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(W, state, xs)

    found, want = gradient(gdn.prefill, lengths=lengths), gradient(gdn.scan, active=active)
    for got, expected in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        assert rms_rel(got, expected) <= tolerances.PREFILL_GRADIENT
    assert not np.any(np.asarray(found[2])[~active])


def test_vmap_is_a_loop():
    xs = jnp.stack([XS[:2], XS[3:5]])
    batched, _ = jax.jit(jax.vmap(lambda xs: gdn.prefill(W, START, xs, cfg=CFG, layer=1)))(xs)
    for got, first in zip(batched, (0, 3), strict=True):
        ys, _ = run(np.roll(XS, -first, axis=0), lengths=0 * FULL + 2)
        assert rms_rel(got, ys[:2]) <= tolerances.PREFILL


# ---------------------------------------------------------------------------------------------------------------------
# The contract
# ---------------------------------------------------------------------------------------------------------------------


def test_no_tokens():
    ys, after = gdn.prefill(W, STATE, jnp.zeros((0, B, D)), cfg=CFG, lengths=[0, 0])
    assert ys.shape == (0, B, D)
    assert_same_bits(after, STATE)


def test_signature():
    parameters = inspect.signature(gdn.prefill).parameters
    assert [p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD] == ["w", "state", "xs"]
    assert {p.name: p.default for p in parameters.values() if p.kind is p.KEYWORD_ONLY} == {
        "cfg": inspect.Parameter.empty, "layer": 0, "lengths": None, "segment_ids": None, "precision": "exact",
        "implementation": None,
    }  # fmt: skip


def test_the_documented_jit_line_donates_the_state():
    """F55: nothing of the stack's shape is copied."""
    line = 'jax.jit(gdn.prefill, static_argnames=("cfg", "precision", "implementation"), donate_argnames=("state",))'
    assert line in (inspect.getdoc(gdn.prefill) or "")
    donating = eval(line, {"jax": jax, "gdn": gdn})
    compiled = donating.lower(W, START, XS[:2], cfg=CFG, layer=SLOT).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(START))
    for leaf in jax.tree.leaves(START):
        shape = re.escape(f"f32[{','.join(map(str, leaf.shape))}]")
        assert not re.search(rf"= \(?{shape}\S* (copy|copy-start)\(", compiled.as_text())


@pytest.mark.parametrize("name", [name for name in BAD_CALLS if not name.startswith("active")])
def test_a_bad_call_is_refused_as_by_step(name):
    changes, kind, message = BAD_CALLS[name]
    call = {"w": W, "state": STATE, "x": X, "cfg": CFG, "layer": 1, **changes}
    w, state, x = (call.pop(key) for key in ("w", "state", "x"))
    if x is not None:
        x = np.asarray(x)[None] if x.dtype == np.float64 else x[None]
    with refuses(kind, message):
        gdn.prefill(w, state, x, **call)


BAD_SEQUENCES = {
    "lengths-high": ({"lengths": [3, 0]}, ValueError, r"lengths must lie in 0 … 2 .*got \[3, 0\]"),
    "lengths-negative": ({"lengths": np.array([0, -1])}, ValueError, r"lengths must lie in 0 … 2 .*got \[0, -1\]"),
    "lengths-shape": ({"lengths": [1, 2, 1]}, ValueError, r"lengths must be \[B\] = \[2\], got shape \[3\]"),
    "lengths-scalar": ({"lengths": 2}, ValueError, r"lengths must be \[B\] = \[2\], got shape \[\]"),
    "lengths-float": ({"lengths": [1.0, 2.0]}, TypeError, r"lengths must be integers \[B\], got float64"),
    "lengths-bool": ({"lengths": jnp.ones(2, bool)}, TypeError, r"lengths must be integers \[B\], got bool"),
    "lengths-beyond-int32": ({"lengths": [2**32, 0]}, ValueError, r"lengths must lie in 0 … 2 .*got \[4294967296, 0\]"),
    "lengths-uint32": ({"lengths": jnp.array([2**32 - 1, 0], jnp.uint32)}, ValueError, "lengths must lie in 0 … 2"),
    "lengths-empty": ({"lengths": []}, ValueError, r"lengths must be \[B\] = \[2\], got shape \[0\]"),
    "lengths-ragged": (
        {"lengths": [[1], [1, 2]]},
        ValueError,
        r"lengths must be integers \[B\], got rows of different",
    ),
    "ids-shape": ({"segment_ids": np.zeros((2, 3), int)}, ValueError, r"segment_ids must be \[T B\] = \[2, 2\].*3\]"),
    "ids-transposed": ({"segment_ids": [0, 0]}, ValueError, r"segment_ids must be \[T B\] = \[2, 2\].*\[2\]"),
    "ids-float": ({"segment_ids": jnp.zeros((2, 2))}, TypeError, r"segment_ids must be integers \[T B\], got float32"),
    "ids-text": ({"segment_ids": "packed"}, TypeError, r"segment_ids must be integers"),
}


@pytest.mark.parametrize("name", BAD_SEQUENCES)
def test_bad_lengths_and_ids_are_refused(name):
    changes, kind, message = BAD_SEQUENCES[name]
    with refuses(kind, message):
        gdn.prefill(W, STATE, jnp.ones((2, B, D)), cfg=CFG, **changes)


WIDE_IDS = {
    "int64": np.array([[5, 2**32], [5, 2**32], [5 + 2**32, 2**33], [5, 2**33], [-(2**63), 2**62]]),
    "uint64": np.array([[0, 2**64 - 1], [0, 2**64 - 1], [2**32, 2**63], [0, 2**63], [1, 0]], np.uint64),
}


@pytest.mark.parametrize("how", ["numpy", "jax", "traced"])
@pytest.mark.parametrize("dtype", WIDE_IDS)
def test_ids_of_64_bits_part_documents_where_they_change(dtype, how):
    """Also where what int32 would keep of them does not change."""
    ids = WIDE_IDS[dtype]
    with jax.enable_x64(True):
        found = checked(sequence._check_segment_ids, ids, how)
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found[1:] != found[:-1], ids[1:] != ids[:-1])


def test_lengths_of_64_bits_count_as_the_nearer_end():
    """Where they are traced; their values are refused where they are known."""
    lengths = np.array([2**32 + 3, 3 - 2**32, 3])
    with jax.enable_x64(True):
        found = checked(sequence._check_lengths, lengths, "traced")
        for how in ("numpy", "jax"):
            with pytest.raises(ValueError, match=r"lengths must lie in 0 … 5 .*got \[4294967299, -4294967293, 3\]"):
                checked(sequence._check_lengths, lengths, how)
    assert found.dtype == np.int32
    assert found.tolist() == [5, 0, 3]
    assert checked(sequence._check_lengths, np.array([2**32 - 1, 3], np.uint32), "traced").tolist() == [5, 3]


def checked(check, values, how):
    """What `check` makes of values of a sequence of 5 tokens that come as `how` says."""
    by_sizes = functools.partial(check, tokens=5, batch=values.shape[-1])
    return np.asarray(
        jax.jit(by_sizes)(values) if how == "traced" else by_sizes(values if how == "numpy" else jnp.asarray(values))
    )


def test_no_rows():
    none = jax.tree.map(lambda leaf: leaf[:, :0], STATE)
    ys, after = gdn.prefill(W, none, jnp.zeros((3, 0, D)), cfg=CFG, lengths=[], segment_ids=np.zeros((3, 0), int))
    assert ys.shape == (3, 0, D)
    assert after.S.shape == none.S.shape


def test_derivatives_are_in_reverse_mode_alone():
    xs = jnp.ones((2, B, D))
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda xs: prefill(W, STATE, xs, cfg=CFG)[0], (xs,), (xs,))


def test_a_sequence_is_no_token():
    with refuses(ValueError, r"^xs must be \[T B D\].*got shape \(2, 36\)"):
        gdn.prefill(W, STATE, X, cfg=CFG)


def test_a_product_that_the_kernel_does_not_take_is_refused(packed):
    """Never a silent change to XLA."""
    start, xs = cases.start_of(Q4_CASE), cases.xs_of(Q4_CASE)
    with pytest.raises(UnsupportedError, match="'mosaic' cannot carry out"):
        gdn.prefill(packed, start, xs, cfg=Q4_CASE.cfg, implementation="mosaic")
