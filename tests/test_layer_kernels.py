"""The layer on the GPU's kernels: their bodies, interpreted, give what float64 and plain XLA give; and what is chosen.

The test bodies are those of the layer on XLA; on a card the same cases run on the compiled kernels.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gdn_jax as gdn
from gdn_jax import ops
from gdn_jax.errors import UnsupportedError
from gdn_jax.q4 import dequantize, quantize
from gdn_jax.weights import Q4Projections
from tests.support import cases, tolerances
from tests.support.cases import assert_same_bits, error
from tests.test_layer import check_outputs_and_state, check_taps

every_case = pytest.mark.parametrize("case", cases.CASES, ids=str)
on_kernels = pytest.mark.parametrize("name", [pytest.param("interpret"), pytest.param("triton", marks=pytest.mark.gpu)])

Q4_CASES = (
    cases.Case("q4-ratio3", cases.geometry(96, 2, 6, 12, 64, 4), batch=3, kind="heavy"),
    cases.Case("q4-width1", cases.geometry(64, 1, 2, 20, 96, 1), batch=2, tokens=4),
    cases.Case("q4-limbs-apart", cases.geometry(160, 2, 4, 16, 24, 3), batch=1),
    cases.Case("q4-batch-11", cases.geometry(64, 2, 2, 8, 32, 2), batch=11, tokens=3),
)
every_q4_case = pytest.mark.parametrize("case", Q4_CASES, ids=str)


HALF_ULP = 2.0**-24
SLACK = 2
"""What another order of the same sums may add to the error of plain XLA, as for every kernel."""


@functools.cache
def q4_weights(cfg):
    """The recipe's weights in 4 bits, and what these stand for, by canonical name."""
    dense, canonical = cases.weights(cfg), dict(cases.canonical(cfg))
    packed = {field: quantize(getattr(dense.large, field)) for field in ("qkv", "z", "out")}
    names = {"qkv": "in_proj_qkv.weight", "z": "in_proj_z.weight", "out": "out_proj.weight"}
    canonical |= {names[field]: np.asarray(dequantize(q)) for field, q in packed.items()}
    return dense.replace(large=Q4Projections(**packed)), canonical


def run(case, w, **options):
    """The case in one scan and token by token with taps, on weights w."""
    common = {"cfg": case.cfg, "layer": jnp.int32(case.slot), **options}
    ys, state = cases.scan(w, cases.start_of(case), cases.xs_of(case), active=case.active, **common)
    stepped, outs, taps = cases.start_of(case), [], []
    for token, x in enumerate(cases.xs_of(case)):
        active = None if case.active is None else case.active[token]
        y, stepped, found = cases.trace(w, stepped, x, active=active, **common)
        outs.append(np.asarray(y))
        taps.append(found)
    taps = {name: np.stack([np.asarray(tap[name]) for tap in taps]) for name in taps[0]}
    return cases.Run(np.asarray(ys), state, {}), cases.Run(np.stack(outs), stepped, taps)


@pytest.mark.slow
@every_case
@on_kernels
def test_a_float32_layer_on_the_kernels_agrees_with_float64(case, name):
    scanned, traced = run(case, cases.weights(case.cfg), implementation=name)
    check_outputs_and_state(case, scanned, SLACK)
    check_outputs_and_state(case, traced, SLACK)
    check_taps(case, traced, SLACK)
    assert_same_bits(scanned[:2], traced[:2])


@pytest.mark.slow
@every_q4_case
@on_kernels
def test_a_4_bit_layer_on_the_kernels_is_as_near_to_float64_as_plain_xla(case, name):
    check_against_float64(case, name)


def check_against_float64(case, name):
    """Against the oracle on the dequantised weights: every tap, output and state at most twice XLA's own error."""
    packed, canonical = q4_weights(case.cfg)
    scanned, traced = run(case, packed, implementation=name)
    assert_same_bits(scanned[:2], traced[:2])
    start = cases.start_of(case)
    want = cases.oracle_run(
        case.cfg,
        cases.xs_of(case),
        start.S[case.slot],
        start.conv_hist[case.slot],
        weights=canonical,
        taps_at=range(case.tokens),
    )
    _, plain = run(case, packed, implementation="xla")
    for tap, expected in want.taps.items():
        # Over the whole run: one token of two heads may cancel, and then says nothing but how it was added up.
        ours, theirs = (error(taps[tap], expected) for taps in (traced.taps, plain.taps))
        assert ours <= SLACK * theirs + HALF_ULP, tap
    for field, expected in (("S", want.S), ("conv_hist", want.conv_hist)):
        ours, theirs = (error(getattr(one.state, field)[case.slot], expected) for one in (traced, plain))
        assert ours <= SLACK * theirs + HALF_ULP, field


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 2, 3, 8])
def test_what_is_chosen_on_a_card_is_as_near_to_float64_as_plain_xla(batch):
    """Shapes that the tensor cores take, from two rows on."""
    case = cases.Case(f"chosen-{batch}", cases.geometry(1024, 4, 8, 32, 128, 4), batch=batch, kind="heavy", tokens=3)
    check_against_float64(case, None)


@pytest.mark.slow
@on_kernels
def test_8_bit_activations_are_those_of_xla(name):
    case = Q4_CASES[0]
    packed, _ = q4_weights(case.cfg)
    (scanned, _), (want, _) = (run(case, packed, precision="q8", implementation=form) for form in (name, "xla"))
    assert cases.token_errors(scanned.ys, want.ys).max() <= 3e-2  # a value at a tie may fall to either side


@pytest.mark.slow
@on_kernels
@pytest.mark.parametrize("tier", ["f32", "q4"])
def test_a_stack_gives_the_bits_of_its_layers_and_leaves_the_others_alone(name, tier):
    case = Q4_CASES[0]
    cfg, start, xs = case.cfg, cases.start_of(case), cases.xs_of(case)
    one = q4_weights(cfg)[0] if tier == "q4" else cases.weights(cfg)
    other = jax.tree.map(lambda leaf: leaf[::-1], one)
    stack = gdn.GdnStack(jax.tree.map(lambda *leaves: jnp.stack(leaves), other, one, other))
    ys, end = cases.scan(stack, start, xs, cfg=cfg, layer=jnp.int32(1), implementation=name)
    assert_same_bits((ys, end), cases.scan(one, start, xs, cfg=cfg, layer=jnp.int32(1), implementation=name))
    for slot in (0, 2):
        assert_same_bits(cases.layers_of(end, slot), cases.layers_of(start, slot))


@on_kernels
def test_inactive_rows_are_bitwise_untouched_whatever_they_hold(name):
    case = Q4_CASES[0]
    packed, _ = q4_weights(case.cfg)
    start, x = cases.start_of(case), cases.xs_of(case)[0]
    spoilt = jax.tree.map(lambda leaf: leaf.at[:, 1].set(jnp.nan), start)
    active = np.array([True, False, True])
    y, end = cases.step(
        packed, spoilt, x.at[1].set(jnp.nan), cfg=case.cfg, layer=jnp.int32(1), active=active, implementation=name
    )
    want, calm = cases.step(packed, start, x, cfg=case.cfg, layer=jnp.int32(1), active=active, implementation=name)
    assert_same_bits(y, want)
    assert not np.any(y[1])
    assert_same_bits(cases.rows_of(end, [0, 2]), cases.rows_of(calm, [0, 2]))
    assert_same_bits(cases.rows_of(end, [1]), cases.rows_of(spoilt, [1]))


@on_kernels
@pytest.mark.parametrize("layer", [-1, 3, 2**31 - 1])
def test_a_traced_layer_out_of_range_gives_nan_and_no_change(name, layer):
    case = Q4_CASES[0]
    start = cases.start_of(case)
    y, end = cases.step(
        q4_weights(case.cfg)[0], start, cases.xs_of(case)[0], cfg=case.cfg, layer=jnp.int32(layer), implementation=name
    )
    assert np.isnan(y).all()
    assert_same_bits(end, start)


@on_kernels
def test_a_nan_in_one_row_reaches_no_other(name):
    case = Q4_CASES[0]
    packed, _ = q4_weights(case.cfg)
    start, x = cases.start_of(case), cases.xs_of(case)[0]
    y, end = cases.step(packed, start, x.at[0, 5].set(jnp.inf), cfg=case.cfg, layer=jnp.int32(0), implementation=name)
    want, calm = cases.step(packed, start, x, cfg=case.cfg, layer=jnp.int32(0), implementation=name)
    assert np.isnan(y[0]).all()
    assert_same_bits(y[1:], want[1:])
    assert_same_bits(cases.rows_of(end, [1, 2]), cases.rows_of(calm, [1, 2]))


@pytest.mark.parametrize("transformed", [jax.grad, jax.vmap], ids=["grad", "vmap"])
def test_kernels_asked_for_by_name_refuse_what_they_have_no_rule_for(transformed):
    case = dataclasses.replace(Q4_CASES[0], batch=1)
    w, start, xs = q4_weights(case.cfg)[0], cases.start_of(case), cases.xs_of(case)

    def total(x):
        return jnp.sum(cases.step(w, start, x, cfg=case.cfg, implementation="interpret")[0])

    with pytest.raises(UnsupportedError, match=r"'interpret' has no rule for .*use 'xla'"):
        transformed(total)(xs if transformed is jax.vmap else xs[0])


@pytest.mark.gpu
def test_chosen_kernels_give_way_to_xla_under_grad_and_vmap():
    case = dataclasses.replace(Q4_CASES[0], batch=1)
    w, start, xs = q4_weights(case.cfg)[0], cases.start_of(case), cases.xs_of(case)

    def total(x, name):
        return jnp.sum(cases.step(w, start, x, cfg=case.cfg, implementation=name)[0])

    for transform, x in ((jax.grad, xs[0]), (jax.vmap, xs)):
        got, want = (transform(lambda x, name=name: total(x, name))(x) for name in (None, "xla"))
        assert error(got, want) <= tolerances.CASE_OUTPUT


def test_the_first_of_the_kernels_that_can_is_chosen_and_a_named_one_never_replaced():
    objections = {"triton": "too wide", "mosaic": None, "interpret": None}
    assert ops.choose("project", None, objections).implementation == "mosaic"
    assert ops.choose("project", None, {"triton": "no GPU", "interpret": None}) == ("project", "xla", "no GPU")
    assert ops.choose("project", "mosaic", objections).implementation == "mosaic"
    with pytest.raises(UnsupportedError, match="'triton' cannot carry out project: too wide; use 'xla'"):
        ops.choose("project", "triton", objections)
    with pytest.raises(UnsupportedError, match=r"'mosaic'.*no such form, only xla, triton"):
        ops.choose("delta_layer", "mosaic", {"triton": None})


@pytest.mark.parametrize("name", ["triton", "mosaic"])
@pytest.mark.skipif(jax.default_backend() == "gpu", reason="here they are to be had")
def test_a_named_gpu_kernel_is_refused_without_a_gpu(name):
    case = Q4_CASES[0]
    w, x = q4_weights(case.cfg)[0], cases.xs_of(case)[0]
    with pytest.raises(UnsupportedError, match=f"{name}.*use 'xla'"):
        cases.step(w, cases.start_of(case), x, cfg=case.cfg, implementation=name)
    with pytest.raises(UnsupportedError, match=f"{name}.*needs an NVIDIA GPU"):
        ops.project(w.large.qkv, x, implementation=name)
