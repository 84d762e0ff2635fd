"""The two gates of a GDN layer: the write strength beta and the log decay g."""

import jax
import jax.numpy as jnp

from gdn_jax.axes import Array, Float32

__all__ = ["log_decay", "write_strength"]

_LINEAR = 20.0  # beyond, log1p(exp(x)) is x to the last bit of a float32; below -20, it is exp(x)


def write_strength(b: Float32[Array, "... H"]) -> Float32[Array, "... H"]:
    """beta = sigmoid(b), the share of the prediction error that a token writes."""
    return jax.nn.sigmoid(b)


def log_decay(
    a: Float32[Array, "... H"], dt_bias: Float32[Array, "H"], a_log: Float32[Array, "H"]
) -> Float32[Array, "... H"]:
    """g = -exp(A_log) · softplus(a + dt_bias), the logarithm of the decay: g <= 0.

    With x = a + dt_bias, softplus is x above 20 and log1p(exp(x)) down to -20; below, softplus(x) = exp(x) and the
    product of two exponentials is taken as one, exp(A_log + x), so that a large A_log (which may overflow alone) and a
    subnormal softplus still give their finite product.
    """
    x = a + _rows(dt_bias, a)
    a_log = _rows(a_log, a)
    tiny = x < -_LINEAR
    # Every branch sees only arguments that belong to it: what is computed and not selected could overflow, and would
    # still poison the gradient. (The exponential also depends on x this way, so that a loop over tokens does not hoist
    # it into a computation of its own, which may be rounded differently.)
    rate = jnp.exp(jnp.where(tiny, 0.0, a_log))
    large = x > _LINEAR
    # Not `clip`: a NaN must come through, and the maximum of Pallas on Triton returns the other operand.
    middle = jnp.where(tiny, -_LINEAR, jnp.where(large, _LINEAR, x))
    softplus = jnp.where(large, x, jnp.log1p(jnp.exp(middle)))
    return jnp.where(tiny, -jnp.exp(jnp.where(tiny, a_log + x, 0.0)), -rate * softplus)


def _rows(vector, like):
    """Broadcast [H] over the leading axes of `like`, explicitly: rank promotion may be forbidden."""
    return jnp.broadcast_to(vector, like.shape)
