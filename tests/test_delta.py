"""The serial delta rule: a worked example, its limits, and the oracle over head counts and sizes of every kind."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gdn_jax.delta import delta_step
from gdn_jax.evidence import oracle
from tests.support.cases import assert_same_bits, error
from tests.support.tolerances import DELTA_STEP

delta_step = jax.jit(delta_step)
LN2 = float(np.log(2.0))


def operands(B, G, H, K, V, seed=0):
    """S, q, k, v, beta, g as a layer has them: k of length 1, q of length K^-1/2, g from 0 to a full reset."""
    rng = np.random.default_rng(seed)
    s = rng.standard_normal((B, H, K, V)) / 4
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in rng.standard_normal((2, B, G, K)))
    v, beta, g = rng.standard_normal((B, H, V)), rng.uniform(0, 1, (B, H)), -rng.exponential(1.0, (B, H))
    return [jnp.asarray(array, jnp.float32) for array in (s, q * K**-0.5, k, v, beta, g)]


def single(s, q, k, v, beta, g):
    """One row and one head: s [K, V], q and k [K], v [V], beta and g scalars -> o [V] and S [K, V]."""
    arrays = [jnp.asarray(array, jnp.float32) for array in (s, q, k, v, beta, g)]
    o, new = delta_step(*(array[None, None] for array in arrays))
    return np.asarray(o)[0, 0], np.asarray(new)[0, 0]


def test_decay_then_correct_then_write_then_read():
    """S/2 = [[1, 2, 3], [4, 5, 6]]; Sᵀk = (9, 12, 15); u = (0.5, -1, -2.5); o from the updated S, not (5, 7, 9)."""
    o, s = single([[2, 4, 6], [8, 10, 12]], [1, 1], [1, 2], [10, 10, 10], 0.5, -LN2)
    np.testing.assert_allclose(s, [[1.5, 1, 0.5], [5, 3, 1]], rtol=DELTA_STEP)
    np.testing.assert_allclose(o, [6.5, 4, 1.5], rtol=DELTA_STEP)


def test_the_same_key_again_overwrites_its_value():
    """F8: beta 1 and no decay; Sᵀk is the second v, not the sum of both."""
    k, second = [0.6, 0.8], np.array([-5.0, 0.25, 11.0])
    _, s = single(np.zeros((2, 3)), k, k, [7, 8, 9], 1, 0)
    read, s = single(s, k, k, second, 1, 0)
    assert error(read, second) <= DELTA_STEP
    assert error(s, np.outer(k, second)) <= DELTA_STEP


def test_no_write_and_no_decay_leave_the_state_bit_unchanged():
    """F9."""
    s, q, k, v, beta, g = operands(2, 2, 6, 12, 20)
    _, after = delta_step(s, q, k, v, 0 * beta, 0 * g)
    assert_same_bits(after, s)


def test_without_decay_it_is_the_plain_delta_rule():
    """F6: after five steps S is the product of (1 - beta k kᵀ) applied to all that was written, in float64."""
    want = np.zeros((12, 20))
    s = jnp.zeros((1, 1, 12, 20))
    for seed in range(5):
        _, q, k, v, beta, g = operands(1, 1, 1, 12, 20, seed)
        key, value, strength = (np.asarray(x, np.float64).ravel() for x in (k, v, beta))
        want = want - strength * np.outer(key, key) @ want + strength * np.outer(key, value)
        _, s = delta_step(s, q, k, v, beta, 0 * g)
    assert error(s[0, 0], want) <= DELTA_STEP


@pytest.mark.parametrize("g", [-np.inf, -1e38, -200.0])
def test_a_full_reset_leaves_only_the_new_token(g):
    """F4: exp(g) is 0 and everything stays finite."""
    s, q, k, v, beta, _ = operands(1, 2, 6, 12, 20)
    o, after = delta_step(s, q, k, v, beta, jnp.full((1, 6), g, jnp.float32))
    fresh_o, fresh = delta_step(0 * s, q, k, v, beta, jnp.zeros((1, 6)))
    np.testing.assert_array_equal(after, fresh)
    np.testing.assert_array_equal(o, fresh_o)


def test_identical_keys_stay_bounded():
    """F7: 64 values ±v under one key. Each write keeps 0.001 of the one before: the last reads about -0.998 v."""
    _, q, k, v, beta, g = operands(1, 2, 6, 12, 20)
    s = jnp.zeros((1, 6, 12, 20))
    for sign in (1, -1) * 32:
        _, s = delta_step(s, q, k, sign * v, 0 * beta + 0.999, 0 * g)
    read = np.einsum("bhkv,bhk->bhv", s, np.repeat(k, 3, axis=1))
    # The geometric series stops at 0.001^64: (0.999 - 0.000999 + …) = 0.999 / 1.001.
    assert error(read, -0.999 / 1.001 * np.float64(v)) <= DELTA_STEP


def test_value_heads_share_key_heads_in_groups():
    """F27: value head h uses key head h // R; a tiled mapping swaps heads 1 and 2."""
    k = jnp.array([[[1.0, 0.0], [0.0, 1.0]]])
    v = jnp.arange(12.0).reshape(1, 4, 3) + 1
    _, s = delta_step(jnp.zeros((1, 4, 2, 3)), k, k, v, jnp.ones((1, 4)), jnp.zeros((1, 4)))
    want = np.zeros((1, 4, 2, 3))
    want[0, :2, 0], want[0, 2:, 1] = v[0, :2], v[0, 2:]
    np.testing.assert_array_equal(s, want)


@pytest.mark.parametrize(
    ("G", "H", "K", "V"),
    [(3, 3, 60, 20), (4, 12, 64, 20), (7, 28, 100, 12), (16, 48, 256, 8), (1, 5, 1, 3), (2, 6, 20, 100), (2, 2, 3, 1)],
)
def test_one_step_against_the_oracle(G, H, K, V):
    """F12, F27: ratio 1 to 5, H = 3, 12, 28, 48, K = 60, 64, 100, 256, and K never equal to V."""
    s, q, k, v, beta, g = operands(3, G, H, K, V)
    o, new = delta_step(s, q, k, v, beta, g)
    q, k = (np.repeat(heads, H // G, axis=1) for heads in (q, k))
    want_s, want_o = oracle.delta_step(s, q, k, v, beta, g)
    for row in range(3):
        assert error(o[row], want_o[row]) <= DELTA_STEP
        assert error(new[row], want_s[row]) <= DELTA_STEP


@pytest.mark.parametrize("poisoned", range(6))
def test_a_nan_stays_in_its_row(poisoned):
    """F11: in any of the six operands; the other rows keep their bits."""
    clean = operands(3, 2, 6, 12, 20)
    dirty = list(clean)
    dirty[poisoned] = dirty[poisoned].at[1].set(jnp.nan)
    good, bad = delta_step(*clean), delta_step(*dirty)
    for want, got in zip(good, bad, strict=True):
        assert_same_bits(got[::2], want[::2])
    assert np.isnan(bad[0][1]).any()
