"""The normalisations: two inside a GDN layer, and the RMSNorm of the text model outside of it."""

import jax
import jax.numpy as jnp

from gdn_jax.axes import Array, Float32

__all__ = ["QK_EPS", "gated_rms_norm", "l2_normalise", "rms_norm"]

QK_EPS = 1e-6
"""Epsilon of the q/k normalisation: a constant of the model family, not the configuration's `rms_norm_eps`."""


def l2_normalise(x: Float32[Array, "... K"]) -> Float32[Array, "... K"]:
    """x · rsqrt(sum(x²) + 1e-6) over the last axis: epsilon inside the root, on the sum.

    As in every float32 implementation, the sum of squares overflows where |x| exceeds about 1e19; the result is then 0.
    """
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + jnp.float32(QK_EPS))


def gated_rms_norm(
    o: Float32[Array, "... V"], weight: Float32[Array, "V"], z: Float32[Array, "... V"], eps: float
) -> Float32[Array, "... V"]:
    """o · rsqrt(mean(o²) + eps) · weight · silu(z) over the last axis: norm, then weight, then gate.

    The weight is plain, where every other RMSNorm of these models multiplies by 1 + w.
    """
    scale = jax.lax.rsqrt(jnp.mean(o * o, axis=-1, keepdims=True) + jnp.float32(eps))
    return o * scale * jnp.broadcast_to(weight, o.shape) * jax.nn.silu(z)


def rms_norm(x: Float32[Array, "... D"], weight: Float32[Array, "D"], eps: float) -> Float32[Array, "... D"]:
    """x · rsqrt(mean(x²) + eps) · (1 + w) over the last axis.

    The weight is stored less 1, where that of the norm inside a GDN layer is stored whole.
    """
    scale = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + jnp.float32(eps))
    return x * scale * jnp.broadcast_to(1 + weight, x.shape)
