"""The causal convolution on digits that can be read off, its history, and the caches of other systems."""

import jax.numpy as jnp
import numpy as np
import pytest

import gdn_jax as gdn
from gdn_jax.conv import conv_step
from gdn_jax.evidence import oracle
from tests.support import cases, tolerances

DIGITS = jnp.array([[1.0, 10.0, 100.0, 1000.0], [1000.0, 100.0, 10.0, 1.0]])  # [C, W]
FRAMES = jnp.array([[1.0, 5.0], [2.0, 6.0], [3.0, 7.0], [4.0, 8.0]])  # [W, C], oldest first


def test_window_runs_from_the_oldest_frame_to_the_newest():
    """Channel 0 reads 4321, and 1234 if the kernel is flipped; SiLU hands numbers this large through unchanged."""
    out, _ = conv_step(FRAMES[None, :3], FRAMES[None, 3], DIGITS)
    np.testing.assert_array_equal(out, [[4321.0, 5678.0]])


def test_history_holds_inputs_and_is_read_before_it_moves():
    """F22: the output saw frame 1, which the next history has dropped; no activation is stored."""
    _, history = conv_step(FRAMES[None, :3], FRAMES[None, 3], DIGITS)
    np.testing.assert_array_equal(history, FRAMES[None, 1:])


def test_silu_comes_after_the_sum():
    """SiLU of ln 3 is ¾ ln 3; of each half apart it would be another number."""
    half = jnp.full((1, 2), jnp.log(3.0) / 2)
    out, _ = conv_step(jnp.ones((1, 1, 1)), jnp.ones((1, 1)), half)
    np.testing.assert_allclose(out, 0.75 * np.log([[3.0]]), rtol=tolerances.ELEMENT)


@pytest.mark.parametrize("width", [1, 2, 3, 4, 7])
def test_any_width_and_rows_apart(width):
    """F13, F21: W = 1 has no history; three rows and five channels never mix."""
    rng = np.random.default_rng(width)
    window = rng.standard_normal((3, width, 5)).astype(np.float32)
    kernel = rng.standard_normal((5, width)).astype(np.float32)
    out, history = conv_step(jnp.asarray(window[:, :-1]), jnp.asarray(window[:, -1]), jnp.asarray(kernel))
    np.testing.assert_allclose(out, oracle.conv_step(window, kernel), rtol=0, atol=tolerances.CASE_TAP)
    np.testing.assert_array_equal(history, window[:, 1:])


@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
def test_prompts_shorter_than_the_history_leave_zeros_on_its_left(tokens):
    """F21: T = 1 and 2 with W = 4."""
    cfg = cases.SMALL
    xs = cases.inputs(cfg, tokens, 2)
    _, state = cases.scan(cases.weights(cfg), gdn.init_state(cfg, layers=1, batch=2), xs, cfg=cfg)
    inputs = np.asarray(xs, np.float64) @ cases.canonical(cfg)["in_proj_qkv.weight"].T
    kept = min(tokens, 3)
    assert not np.any(state.conv_hist[0, :, : 3 - kept])
    newest = np.swapaxes(inputs[tokens - kept :], 0, 1)
    assert cases.error(state.conv_hist[0, :, 3 - kept :], newest) <= tolerances.CASE_STATE


HISTORY = jnp.arange(2 * 3 * 5, dtype=jnp.float32).reshape(2, 3, 5)  # [B, W-1, C]
WINDOW = jnp.concatenate([jnp.full((2, 1, 5), -1.0), HISTORY], axis=1)  # [B, W, C], the oldest frame never read again


@pytest.mark.parametrize(
    ("layout", "frames"),
    [
        ("BWC", WINDOW),
        ("BCW", jnp.swapaxes(WINDOW, 1, 2)),
        ("B(W-1)C", HISTORY),
        ("BC(W-1)", jnp.swapaxes(HISTORY, 1, 2)),
    ],
)
def test_caches_of_other_systems(layout, frames):
    """F23: W or W - 1 frames, channels first or last, always by an explicit tag."""
    np.testing.assert_array_equal(gdn.history_from_window(frames, layout=layout, conv_width=4), HISTORY)


@pytest.mark.parametrize(("layout", "frames"), [("BWC", jnp.ones((2, 1, 5))), ("BC(W-1)", jnp.ones((2, 5, 0)))])
def test_caches_of_width_one_are_empty(layout, frames):
    """F23."""
    assert gdn.history_from_window(frames, layout=layout, conv_width=1).shape == (2, 0, 5)


@pytest.mark.parametrize(
    ("layout", "frames", "message"),
    [
        ("WBC", WINDOW, r"layout must be one of BCW, BWC, BC\(W-1\), B\(W-1\)C, got 'WBC'"),
        ("BWC", HISTORY, r"BWC with conv_width=4 holds 4 frames, got 3"),
        ("B(W-1)C", WINDOW, r"B\(W-1\)C with conv_width=4 holds 3 frames, got 4"),
        ("BCW", WINDOW, r"BCW with conv_width=4 holds 4 frames, got 5"),
        ("BWC", WINDOW[0], r"3 axes \(BWC\), got shape \(4, 5\)"),
    ],
)
def test_a_cache_that_is_not_what_its_tag_says(layout, frames, message):
    """F23."""
    with pytest.raises(ValueError, match=message):
        gdn.history_from_window(frames, layout=layout, conv_width=4)
