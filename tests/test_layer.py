"""The layer against the float64 oracle and against transformers: outputs, state and every tap, token by token."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import gdn_jax as gdn
from gdn_jax.evidence import goldens
from tests.support import cases, tolerances
from tests.support.cases import assert_same_bits, error, token_errors

SMALL_GOLDENS = [name for name in goldens.names() if not name.startswith("27b")]
every_case = pytest.mark.parametrize("case", cases.CASES, ids=str)


def active_of(case):
    """bool [T, B]."""
    return np.ones((case.tokens, case.batch), bool) if case.active is None else case.active


def check_outputs_and_state(case, run, slack=1):
    """ys per token and row, and the final state of the case's slot, against float64; F10: nothing is left unwritten.

    The tolerances are those of plain XLA; `slack` times them for another implementation.
    """
    want = cases.reference(case)
    active = active_of(case)
    assert run.ys.shape == want.ys.shape
    assert token_errors(run.ys, want.ys)[active].max() <= slack * tolerances.CASE_OUTPUT
    assert not np.any(run.ys[~active])
    for got, expected in ((run.state.S, want.S), (run.state.conv_hist, want.conv_hist)):
        for row in range(case.batch):
            assert error(got[case.slot, row], expected[row]) <= slack * tolerances.CASE_STATE


def check_taps(case, run, slack=1):
    """Every intermediate of every active token against float64, each under its own name and in its own shape."""
    want = cases.reference(case)
    active = active_of(case)
    assert run.taps.keys() == want.taps.keys() == gdn.tap_shapes(case.cfg).keys()
    for name, shape in gdn.tap_shapes(case.cfg).items():
        assert run.taps[name].shape == (case.tokens, case.batch, *shape), name
        assert token_errors(run.taps[name], want.taps[name])[active].max() <= slack * tolerances.CASE_TAP, name


def check_golden(golden):
    """Outputs and final state as near to a run of transformers as that run's own float32 error allows."""
    w = gdn.from_canonical(golden.cfg, golden.weights())
    s, history = golden.initial_state()
    start = gdn.GdnState(S=jnp.asarray(s[None]), conv_hist=jnp.asarray(history[None]))
    ys, end = cases.scan(w, start, jnp.asarray(golden.xs()), cfg=golden.cfg)
    kept = golden.sample("ys", np.asarray(ys)[list(golden.kept_tokens)])
    for got, want in zip(kept, golden.arrays["ys"], strict=True):
        assert error(got, want) <= tolerances.TRANSFORMERS
    for name, leaf in (("S", end.S), ("HIST", end.conv_hist)):
        assert error(golden.sample(name, np.asarray(leaf))[0], golden.arrays[name][-1]) <= tolerances.TRANSFORMERS


@every_case
def test_scan_agrees_with_float64(case):
    """F12, F18, F21, F27."""
    check_outputs_and_state(case, cases.scanned(case))


@every_case
def test_steps_agree_with_float64(case):
    """F12, F18, F25, F27."""
    check_outputs_and_state(case, cases.stepped(case))


@every_case
def test_trace_agrees_with_float64(case):
    """F1, F12, F27: a fault too small for the output shows in the tap of its own operator."""
    check_outputs_and_state(case, cases.traced(case))
    check_taps(case, cases.traced(case))


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL_GOLDENS)
def test_scan_agrees_with_transformers(name):
    check_golden(goldens.load(name))


@pytest.mark.parametrize("tokens", [1, 3, 65])
def test_every_output_element_is_written(tokens):
    """F10: each agrees with float64 and none is left at zero."""
    case = cases.Case(f"written-{tokens}", cases.SMALL, batch=3, tokens=tokens)
    ys = cases.scanned(case).ys
    assert token_errors(ys, cases.reference(case).ys).max() <= tolerances.LONG_WORST[512]
    assert np.all(ys != 0)


@pytest.mark.parametrize("tokens", [512, 4096])
@pytest.mark.parametrize("kind", ["gaussian", "heavy"])
def test_rounding_does_not_accumulate(tokens, kind):
    """F13: bfloat16 in gates, convolution, sums of squares or S would show a hundredfold."""
    case = cases.Case(f"long-{kind}", cases.SMALL, batch=2, kind=kind, tokens=tokens)
    ys, state = cases.scan(
        cases.weights(case.cfg), cases.start_of(case), cases.xs_of(case), cfg=case.cfg, layer=jnp.int32(case.slot)
    )
    start = cases.start_of(case)
    want = cases.oracle_run(case.cfg, cases.xs_of(case), start.S[case.slot], start.conv_hist[case.slot])
    errors = token_errors(ys, want.ys)
    assert errors.max() <= tolerances.LONG_WORST[tokens]
    assert np.quantile(errors, 0.99) <= tolerances.LONG_PERCENTILE
    assert np.median(errors) <= tolerances.LONG_MEDIAN
    assert error(state.S[case.slot], want.S) <= tolerances.LONG_STATE
    assert error(state.conv_hist[case.slot], want.conv_hist) <= tolerances.LONG_STATE


def test_the_configured_epsilon_belongs_to_the_gated_norm_alone():
    """F1: the epsilon of q and k is a constant of the model; eps 1 must move ONN and leave Q and K their bits."""
    cfg = cases.SMALL
    w, state, x = cases.weights(cfg), cases.random_state(cfg, layers=1, batch=2), cases.inputs(cfg, 2)
    _, _, taps = cases.trace(w, state, x, cfg=cfg)
    _, _, changed = cases.trace(w, state, x, cfg=dataclasses.replace(cfg, norm_eps=1.0))
    for name in ("Q", "K", "ON", "S"):
        assert_same_bits(changed[name], taps[name])
    assert error(changed["ONN"], taps["ONN"]) > 0.1


def test_b_makes_beta_and_a_makes_the_decay():
    """The opposite of what the names suggest: each weight moves its own gate only."""
    cfg = cases.SMALL
    w, state, x = cases.weights(cfg), cases.random_state(cfg, layers=1, batch=2), cases.inputs(cfg, 2)
    _, _, taps = cases.trace(w, state, x, cfg=cfg)
    _, _, without_b = cases.trace(dataclasses.replace(w, b=0 * w.b), state, x, cfg=cfg)
    _, _, without_a = cases.trace(dataclasses.replace(w, a=0 * w.a), state, x, cfg=cfg)
    assert np.all(without_b["BETA"] == 0.5)
    assert_same_bits(without_b["G"], taps["G"])
    want = -np.exp(np.float64(w.A_log)) * np.log1p(np.exp(np.float64(w.dt_bias)))
    np.testing.assert_allclose(without_a["G"], np.broadcast_to(want, (2, 6)), rtol=tolerances.ELEMENT)
    assert_same_bits(without_a["BETA"], taps["BETA"])


@pytest.mark.parametrize("eps", [1e-30, 1e-12])
def test_zero_input_to_a_new_sequence_gives_zero(eps):
    """0 · rsqrt(0 + eps) is 0: an epsilon that vanishes in float32 must not make it NaN."""
    cfg = dataclasses.replace(cases.SMALL, norm_eps=eps)
    y, state = cases.step(cases.weights(cfg), gdn.init_state(cfg, layers=1), jnp.zeros((1, cfg.hidden)), cfg=cfg)
    assert not np.any(y)
    assert not np.any(state.S)


def test_an_empty_sequence_returns_the_state():
    cfg = cases.SMALL
    state = cases.random_state(cfg, layers=2, batch=2)
    ys, after = cases.scan(cases.weights(cfg), state, jnp.zeros((0, 2, cfg.hidden)), cfg=cfg)
    assert ys.shape == (0, 2, cfg.hidden)
    assert_same_bits(after, state)


def test_tap_shapes_of_the_27b_layer():
    """The published sizes, known without computing anything."""
    shapes = gdn.tap_shapes(gdn.GEOMETRIES["qwen3.5-27b"].cfg)
    expected = dict.fromkeys(("XC", "XCV"), 10240) | dict.fromkeys(("Z", "ON", "ONN"), 6144)
    expected |= dict.fromkeys(("Q", "K"), 2048) | dict.fromkeys(("A", "B", "BETA", "G"), 48)
    expected |= {"OUT": 5120, "S": 786432, "HIST": 30720}
    assert {name: int(np.prod(shape)) for name, shape in shapes.items()} == expected
