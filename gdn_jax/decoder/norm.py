"""The RMSNorm of the text model outside GDN: x · rsqrt(mean(x²) + eps) · (1 + w)."""

import jax
import jax.numpy as jnp

from gdn_jax.axes import Array, Float32

__all__ = ["rms_norm"]


def rms_norm(x: Float32[Array, "... D"], weight: Float32[Array, "D"], eps: float) -> Float32[Array, "... D"]:
    """x · rsqrt(mean(x²) + eps) · (1 + w) over the last axis.

    The weight is stored less 1, where that of the norm inside a GDN layer is stored whole.
    """
    scale = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + jnp.float32(eps))
    return x * scale * jnp.broadcast_to(1 + weight, x.shape)
