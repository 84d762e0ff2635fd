"""The gated delta rule in its serial form."""

import jax.numpy as jnp

from gdn_jax.axes import Array, Float32

__all__ = ["delta_step"]


def delta_step(
    s: Float32[Array, "B H K V"],
    q: Float32[Array, "B G K"],
    k: Float32[Array, "B G K"],
    v: Float32[Array, "B H V"],
    beta: Float32[Array, "B H"],
    g: Float32[Array, "B H"],
) -> tuple[Float32[Array, "B H V"], Float32[Array, "B H K V"]]:
    """One token of the gated delta rule, per value head: decay, correct, write, read.

    S ← S · exp(g);  u = beta · (v - Sᵀk);  S ← S + k uᵀ;  o = Sᵀq, with the updated S.

    q and k come normalised, q also scaled. Value head h uses key head h // R (grouped, R = H / G). Returns o and S.
    """
    q, k = (_per_value_head(x, v.shape[1]) for x in (q, k))
    s = s * jnp.exp(g)[..., None, None]
    u = beta[..., None] * (v - jnp.sum(s * k[..., None], axis=-2))
    s = s + k[..., None] * u[..., None, :]
    return jnp.sum(s * q[..., None], axis=-2), s


def _per_value_head(x, value_heads):
    """[B, G, K] -> [B, H, K], each key head repeated R times in a row."""
    return jnp.repeat(x, value_heads // x.shape[1], axis=1)
