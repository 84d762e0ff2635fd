"""Gates and normalisations against closed forms, at the points where a wrong branch, epsilon or order shows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gdn_jax.evidence import oracle
from gdn_jax.gates import log_decay, write_strength
from gdn_jax.norms import gated_rms_norm, l2_normalise
from tests.support.tolerances import ELEMENT

LN3 = float(np.log(3.0))


def gate(x, a_log):
    """g for one head at a + dt_bias = x; exact in float32 for the values used here."""
    return log_decay(jnp.full((1, 1), x - 1.5), jnp.full(1, 1.5), jnp.full(1, a_log))[0, 0]


def close(got, want, tolerance=ELEMENT):
    """Element by element, relative to the element; what should be 0 must be 0."""
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=tolerance, atol=0)


# ---------------------------------------------------------------------------------------------------------------------
# beta
# ---------------------------------------------------------------------------------------------------------------------


def test_write_strength_is_the_sigmoid():
    b = jnp.array([[0.0, LN3, -LN3, 40.0, 1e4, -1e4, -50.0]])
    close(write_strength(b), [[0.5, 0.75, 0.25, 1.0, 1.0, 0.0, 1.9287498479639178e-22]])


# ---------------------------------------------------------------------------------------------------------------------
# g
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("x", [100.0, 1000.0, 3e38])
def test_softplus_of_large_arguments_is_linear(x):
    """F2: exp would overflow above 88.7."""
    close(log_decay(jnp.full((1, 1), x), jnp.zeros(1), jnp.zeros(1))[0, 0], -np.float64(np.float32(x)), 0)


@pytest.mark.parametrize(
    ("x", "a_log", "decay"),
    [
        (-200.0, 89.0, 1.0),
        (-100.0, 89.0, 0.9999832984386824),  # exp(-exp(-11))
        (-100.0, 100.0, 0.36787944117144233),  # exp(-1): neither factor is a normal float32
        (-1000.0, 1000.0, 0.36787944117144233),
        (0.0, 1000.0, 0.0),
        (30.0, 1000.0, 0.0),
        (-1000.0, 0.0, 1.0),
        (-1000.0, 89.0, 1.0),
        (30.0, -1000.0, 1.0),
    ],
)
def test_decay_where_the_factors_leave_float32(x, a_log, decay):
    """F3: inf · 0 and inf · subnormal must come out as their finite product."""
    close(jnp.exp(gate(x, a_log)), decay)


@pytest.mark.parametrize("a_log", [-4.6, 0.0, 2.77])
def test_log_decay_over_all_branches(a_log):
    """F2: 601 points over both borders at ±20, each relative to itself: half a bit lost in a branch would show."""
    x = np.concatenate([np.linspace(-30, 30, 601), [-80.0, 88.0, 95.0]]).astype(np.float32)
    got = log_decay(jnp.asarray(x)[:, None], jnp.zeros(1), jnp.full(1, a_log))
    want = oracle.softplus_gate(x[:, None], [0.0], np.full(1, a_log, np.float32))
    # Below -20 the sum A_log + x is rounded before it is exponentiated.
    rounding = np.where(x < -20, np.abs(a_log + x) * 2.0**-24, 0.0)[:, None]
    assert np.all(np.abs(got - want) <= (ELEMENT + rounding) * np.abs(want))


def test_branches_are_selected_head_by_head():
    """F2: one array that meets every branch, an overflow and a NaN; none may spoil another."""
    a = jnp.array([[-200.0, 0.0, 100.0, jnp.nan]])
    got = np.asarray(jax.jit(log_decay)(a, jnp.zeros(4), jnp.array([89.0, 0.0, 0.0, 0.0])))[0]
    np.testing.assert_allclose(got[:3], [0.0, -np.log(2.0), -100.0], rtol=ELEMENT, atol=1e-37)
    assert np.isnan(got[3])


def test_log_decay_is_never_positive():
    x = jnp.linspace(-120, 120, 97)[:, None]
    for a_log in (-200.0, 0.0, 89.0, 200.0):
        assert bool(jnp.all(log_decay(x, jnp.zeros(1), jnp.full(1, a_log)) <= 0))


@pytest.mark.parametrize(
    ("x", "a_log"),
    [(-30.0, 0.5), (-20.5, 0.5), (-3.0, 0.5), (0.0, -2.0), (3.0, 0.5), (25.0, 0.5), (200.0, 0.5), (-100.0, 89.0)],
)
def test_gradient_of_log_decay_is_that_of_its_own_branch(x, a_log):
    """F2, F3: an overflow in a branch that was not selected makes 0 · inf in a gradient, though not in the value."""
    slopes = jax.grad(lambda a, bias, rate: log_decay(a, bias, rate)[0, 0], argnums=(0, 1, 2))(
        jnp.full((1, 1), x), jnp.zeros(1), jnp.full(1, a_log)
    )
    to_x = -np.exp(a_log + min(x, 0.0)) / (1 + np.exp(-abs(x)))
    to_rate = oracle.softplus_gate([x], [0.0], [a_log])[0]
    np.testing.assert_allclose([slope.item() for slope in slopes], [to_x, to_x, to_rate], rtol=1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# q/k norm
# ---------------------------------------------------------------------------------------------------------------------


def test_qk_norm_has_its_epsilon_inside_the_root_and_on_the_sum():
    """F1: 1e-3 · rsqrt(2e-6). A clamp gives 1, an epsilon on the mean 0.0880 or 0.9961."""
    x = jnp.zeros((2, 128)).at[0, 0].set(1e-3)
    want = np.zeros((2, 128))
    want[0, 0] = np.sqrt(0.5)
    close(l2_normalise(x), want)


@pytest.mark.parametrize("size", [1, 2, 60, 100, 128, 256])
@pytest.mark.parametrize("magnitude", [1e-8, 1e-4, 1e-3, 1.0, 1e4])
def test_qk_norm_at_every_magnitude(size, magnitude):
    """F1, F13: no head size is special, and the sum of squares keeps all its bits."""
    x = (np.random.default_rng(size).standard_normal((3, 2, size)) * magnitude).astype(np.float32)
    close(l2_normalise(jnp.asarray(x)), oracle.qk_normalise(x))


def test_qk_norm_of_zero_is_zero_with_a_finite_slope():
    """F1: the slope is rsqrt(1e-6) = 1000 where x · (1 / |x|) has none."""
    zero = jnp.zeros(5)
    assert not np.any(l2_normalise(zero))
    np.testing.assert_allclose(jax.jacobian(l2_normalise)(zero), 1000 * np.eye(5), rtol=ELEMENT)


# ---------------------------------------------------------------------------------------------------------------------
# gated RMSNorm
# ---------------------------------------------------------------------------------------------------------------------


def test_gated_norm_is_norm_then_weight_then_gate():
    """mean(3², 4²) + 3.5 = 16, so o becomes (0.75, 1); a gate before the norm would move that mean."""
    got = gated_rms_norm(jnp.array([[3.0, 4.0]]), jnp.array([2.0, 3.0]), jnp.array([[64.0, LN3]]), 3.5)
    close(got, [[0.75 * 2 * 64, 3 * 0.75 * LN3]])


def test_gated_norm_weight_is_not_one_plus_w():
    assert not np.any(gated_rms_norm(jnp.ones((1, 4)), jnp.zeros(4), jnp.ones((1, 4)), 1e-6))


@pytest.mark.parametrize("eps", [1e-6, 1e-3, 10.0])
@pytest.mark.parametrize("magnitude", [0.0, 1e-4, 1.0, 1e4])
def test_gated_norm_at_every_magnitude(magnitude, eps):
    """F13: the configured epsilon on the mean, per value head, over V = 20."""
    rng = np.random.default_rng(20)
    o, z = (rng.standard_normal((3, 4, 20)).astype(np.float32) for _ in range(2))
    o *= np.float32(magnitude)
    weight = rng.standard_normal(20).astype(np.float32)
    got = gated_rms_norm(jnp.asarray(o), jnp.asarray(weight), jnp.asarray(z), eps)
    close(got, oracle.gated_rms_norm(o, weight, z, eps))
