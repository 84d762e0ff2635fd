"""Kernel bodies for the Triton backend: what one program does to its part of S.

A program owns all K rows of one value head and some of its columns, so that nothing it computes depends on another
program.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.delta_step.parts import advance, l2_normalise, load, mask_of, rms_scale, store_output, tile_mask
from pallas_kernels.limbs.host import Split

__all__ = ["LayerStep", "delta_layer_step_kernel", "delta_step_kernel"]


class LayerStep(NamedTuple):
    """What `delta_layer_step` leaves: the next state, its output in the form asked for, and what was kept beside it."""

    state: Any
    """float32 [L, B, H, K, V], in place."""
    onn: Any = None
    """float32 [B, H, V], after the gated norm."""
    digits: Any = None
    """The same as limbs: int8 [limbs, B, H·V] …"""
    x_scales: Any = None
    """… and their scales, float32 [B, H·V/32]."""
    on: Any = None
    """float32 [B, H, V], the delta rule's output."""
    q: Any = None
    """float32 [B, G, K], normalised and scaled."""
    k: Any = None
    """float32 [B, G, K], normalised."""


def delta_step_kernel(
    layer_ref,  # [1]
    s_ref,  # [L, K, Vb]
    q_ref,  # [K]
    k_ref,  # [K]
    v_ref,  # [Vb]
    beta_ref,  # []
    g_ref,  # []
    active_ref,  # [] or None
    o_ref,  # [Vb]
    new_s_ref,  # [L, K, Vb], the same memory as s_ref
    *,
    key_dim: int,
    value_dim: int,
):
    """Vb columns of one value head; grid (blocks of V, H, B)."""
    layers, keys, columns = s_ref.shape
    key_mask = mask_of(0, keys, key_dim)
    column_mask = mask_of(pl.program_id(0) * columns, columns, value_dim)
    # Read before it is known which layer is meant: the two latencies overlap.
    q, k = load(q_ref, key_mask), load(k_ref, key_mask)
    v, beta, decay = load(v_ref, column_mask), beta_ref[...], jnp.exp(g_ref[...])

    def live(layer):
        s, s_mask = s_ref.at[layer], tile_mask(key_mask, column_mask)
        o, new_s = advance(load(s, s_mask), q, k, v, beta, decay)
        plt.store(new_s_ref.at[layer], new_s, mask=s_mask)
        plt.store(o_ref, o, mask=column_mask)

    def rest(value):
        plt.store(o_ref, jnp.full((columns,), value), mask=column_mask)

    _if_live(layer_ref, layers, active_ref, live, rest)


def delta_layer_step_kernel(
    layer_ref,  # [1]
    s_ref,  # [L, K, V]
    xcv_ref,  # [C]
    z_ref,  # [V]
    beta_ref,  # []
    g_ref,  # []
    weight_ref,  # [Lw, V]
    weight_layer_ref,  # [1]
    active_ref,  # [] or None
    # LayerStep of refs: state [L, K, V], the same memory as s_ref; onn, on [V]; digits [limbs, V]; x_scales [V/32];
    # q, k [K] of the key head. Each but the state may be None.
    out,
    *,
    key_heads: int,
    key_dim: int,
    value_dim: int,
    block_v: int,
    qk_eps: float,
    eps: float,
    split: Split | None,
):
    """One value head from raw q and k to the gated norm, block_v columns after another; grid (H, B)."""
    layers, keys, _ = s_ref.shape
    head, value_heads = pl.program_id(0), pl.num_programs(0)
    ratio = value_heads // key_heads
    key_mask = mask_of(0, keys, key_dim)
    blocks = [pl.ds(start, block_v) for start in range(0, value_dim, block_v)]
    masks = [mask_of(block.start, block_v, value_dim) for block in blocks]
    first_key = head // ratio * key_dim
    first_value = 2 * key_heads * key_dim + head * value_dim

    # As above, and in time for the norm: loads are not moved up past the stores of S.
    beta, decay = beta_ref[...], jnp.exp(g_ref[...])
    vs = [load(xcv_ref.at[pl.ds(first_value + b.start, block_v)], m) for b, m in zip(blocks, masks, strict=True)]
    weight_layer = jnp.clip(weight_layer_ref[0], 0, weight_ref.shape[0] - 1)
    gates = [
        load(weight_ref.at[weight_layer, b], m) * jax.nn.silu(load(z_ref.at[b], m))
        for b, m in zip(blocks, masks, strict=True)
    ]
    q, k = (
        l2_normalise(load(xcv_ref.at[pl.ds(part * key_heads * key_dim + first_key, keys)], key_mask), qk_eps)
        for part in (0, 1)
    )
    q = q * jnp.float32(key_dim**-0.5)
    if out.q is not None:
        # The heads that share q and k would all write the same bits.
        @pl.when(head % ratio == 0)
        def _keep_q_and_k():
            plt.store(out.q, q, mask=key_mask)
            plt.store(out.k, k, mask=key_mask)

    def live(layer):
        outputs = []
        for block, mask, v in zip(blocks, masks, vs, strict=True):
            s_mask = tile_mask(key_mask, mask)
            o, new_s = advance(load(s_ref.at[layer, :, block], s_mask), q, k, v, beta, decay)
            plt.store(out.state.at[layer, :, block], new_s, mask=s_mask)
            if out.on is not None:
                plt.store(out.on.at[block], o, mask=mask)
            outputs.append(o)
        scale = rms_scale(outputs, value_dim, eps)
        for block, mask, o, gate in zip(blocks, masks, outputs, gates, strict=True):
            store_output(out, block, mask, o * scale * gate, value_dim, split)

    def rest(value):
        for block, mask in zip(blocks, masks, strict=True):
            values = jnp.full((block_v,), value)
            if out.on is not None:
                plt.store(out.on.at[block], values, mask=mask)
            store_output(out, block, mask, values, value_dim, split)

    _if_live(layer_ref, layers, active_ref, live, rest)


def _if_live(layer_ref, layers, active_ref, live, rest):
    """`live(layer)` where the layer exists and the row is active, else `rest` on 0, or on NaN for want of a layer.

    A real branch: what rests is neither read nor written.
    """
    layer = layer_ref[0]
    exists = (layer >= 0) & (layer < layers)
    alive = exists if active_ref is None else exists & active_ref[...].astype(jnp.bool_)
    pl.when(alive)(lambda: live(layer))
    pl.when(~alive)(lambda: rest(jnp.where(exists, jnp.float32(0), jnp.float32(jnp.nan))))
