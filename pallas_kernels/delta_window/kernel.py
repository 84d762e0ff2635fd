"""Kernel bodies for the Triton backend: a part of S carried over the tokens of a window, in registers.

As in a single step, a program owns all K rows of some columns of one value head, so that nothing it computes depends on
another program. Arithmetic is that of the single step and of its convolution, in the same order.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.delta_step.parts import (
    advance,
    l2_normalise,
    load,
    mask_of,
    rms_scale,
    store_output,
    tile_mask,
    update,
)
from pallas_kernels.limbs.host import Split
from pallas_kernels.project_in.kernel import convolve

__all__ = ["WindowOutput", "fold_kernel", "history_kernel", "look_kernel", "norm_kernel"]


class WindowOutput(NamedTuple):
    """What a look at a window gives, after the gated norm, in the form asked for."""

    onn: Any = None
    """float32 [T, B, H, V]."""
    digits: Any = None
    """The same as limbs, whose rows are time-first: int8 [limbs, T·B, H·V] …"""
    x_scales: Any = None
    """… and their scales, float32 [T·B, H·V/32]."""


def look_kernel(
    layer_ref,  # [1]
    s_ref,  # [L, K, Vb]
    history_ref,  # [L, W-1, C], or None where W = 1
    xc_ref,  # [T, C]
    conv_ref,  # [Lw, C, W]
    weight_layer_ref,  # [1]
    z_ref,  # [T, Vb], or None for an output before the norm
    beta_ref,  # [T]
    g_ref,  # [T]
    norm_ref,  # [Lw, Vb], or None likewise
    lengths_ref,  # [] or None
    out,  # WindowOutput of refs: onn [T, Vb]; digits [limbs, T, Vb]; x_scales [T, Vb/32]
    *,
    key_heads: int,
    key_dim: int,
    value_dim: int,
    qk_eps: float,
    eps: float,
    split: Split | None,
):
    """Vb columns of one value head: the delta rule's output, or the gated norm's where they are all columns.

    Grid (blocks of V, H, B).
    """
    layers, keys, columns = s_ref.shape
    tokens = xc_ref.shape[0]
    whole = pl.ds(0, columns)
    places = _places((keys, columns), key_heads, key_dim, value_dim)
    _, (_, key_mask), (_, column_mask) = places
    layer = layer_ref[0]
    exists, nearest = (layer >= 0) & (layer < layers), jnp.clip(layer, 0, layers - 1)
    weight_layer = jnp.clip(weight_layer_ref[0], 0, conv_ref.shape[0] - 1)
    weight = None if norm_ref is None else load(norm_ref.at[weight_layer, whole], column_mask)

    def step(t, s, q, k, v, beta, decay):
        # In time for the norm.
        z = None if z_ref is None else load(z_ref.at[t, whole], column_mask)
        q = l2_normalise(q, qk_eps) * jnp.float32(key_dim**-0.5)
        o, s = advance(s, q, l2_normalise(k, qk_eps), v, beta, decay)
        if z is not None:
            o = _gated_norm(o, weight, z, value_dim, eps)
        store_output(out, whole, column_mask, o, value_dim, split, at=(t,))
        return s

    def fill(first, value):
        @pl.loop(first, tokens)
        def _fill(t):
            store_output(out, whole, column_mask, jnp.full((columns,), value), value_dim, split, at=(t,))

    @pl.when(exists)
    def _look():
        s = load(s_ref.at[nearest], tile_mask(key_mask, column_mask))
        parts = _parts(places, conv_ref, weight_layer, history_ref, nearest)
        count = tokens if lengths_ref is None else jnp.clip(lengths_ref[...], 0, tokens)
        _recur(count, xc_ref, beta_ref, g_ref, parts, s, step)
        if lengths_ref is not None:
            fill(count, jnp.float32(0))

    pl.when(~exists)(lambda: fill(0, jnp.float32(jnp.nan)))


def norm_kernel(
    o_ref,  # [V]
    z_ref,  # [V]
    norm_ref,  # [Lw, V]
    weight_layer_ref,  # [1]
    lengths_ref,  # [] or None
    out,  # WindowOutput of refs: onn [V]; digits [limbs, V]; x_scales [V/32]
    *,
    value_dim: int,
    eps: float,
    split: Split | None,
):
    """The gated norm of one value head of one token; grid (H, B, T)."""
    (columns,) = o_ref.shape
    whole = pl.ds(0, columns)
    mask = mask_of(0, columns, value_dim)
    weight_layer = jnp.clip(weight_layer_ref[0], 0, norm_ref.shape[0] - 1)
    o, z, weight = load(o_ref, mask), load(z_ref, mask), load(norm_ref.at[weight_layer, whole], mask)
    values = _gated_norm(o, weight, z, value_dim, eps)
    if lengths_ref is not None:
        # Of a token past the length o has what is to be written, and z whatever is there.
        values = jnp.where(pl.program_id(2) < lengths_ref[...], values, o)
    store_output(out, whole, mask, values, value_dim, split)


def fold_kernel(
    s_ref,  # [K, Vb]
    history_ref,  # [1, W-1, C], or None where W = 1
    xc_ref,  # [T, C]
    conv_ref,  # [1, C, W]
    beta_ref,  # [T]
    g_ref,  # [T]
    count_ref,  # []
    new_s_ref,  # [K, Vb], the same memory as s_ref
    *,
    key_heads: int,
    key_dim: int,
    value_dim: int,
    qk_eps: float,
):
    """Vb columns of one value head of one layer, over the tokens to keep; grid (blocks of V, H, B, L)."""
    _, *places = _places(s_ref.shape, key_heads, key_dim, value_dim)
    mask = tile_mask(*(mask for _, mask in places))
    count = jnp.clip(count_ref[...], 0, xc_ref.shape[0])

    def step(t, s, k, v, beta, decay):
        return update(s, l2_normalise(k, qk_eps), v, beta, decay)

    @pl.when(count > 0)
    def _fold():
        s = load(s_ref, mask)
        only = jnp.int32(0)
        parts = _parts(places, conv_ref, only, history_ref, only)
        plt.store(new_s_ref, _recur(count, xc_ref, beta_ref, g_ref, parts, s, step), mask=mask)


def history_kernel(
    history_ref,  # [W-1, Cb]
    xc_ref,  # [T, Cb]
    count_ref,  # []
    state_ref,
    new_history_ref,  # [W-1, Cb], the same memory as history_ref
    *,
    channels: int,
):
    """The last W-1 frames of [history, xc[:count]] for Cb channels; grid (blocks of C, B, L)."""
    del state_ref
    past, block = history_ref.shape
    tokens = xc_ref.shape[0]
    count = jnp.clip(count_ref[...], 0, tokens)
    whole = pl.ds(0, block)
    inside = pl.program_id(0) * block + jnp.arange(block, dtype=jnp.int32) < channels

    def frame(i):
        """Frame i of [history, xc]."""
        old = plt.load(history_ref.at[jnp.minimum(i, past - 1), whole], mask=inside & (i < past), other=0.0)
        new = plt.load(xc_ref.at[jnp.maximum(i - past, 0), whole], mask=inside & (i >= past), other=0.0)
        return jnp.where(i < past, old, new)

    @pl.when(count > 0)
    def _advance():
        # All are read before one is written over.
        for i, value in enumerate([frame(count + i) for i in range(past)]):
            plt.store(new_history_ref.at[jnp.int32(i), whole], value, mask=inside)


class _Part(NamedTuple):
    """The channels of q, k or v that a program needs, and what the convolution brings for them."""

    channels: Any
    mask: Any
    weights: list
    past: list
    """The frames before the window, oldest first."""


def _places(s_shape, key_heads, key_dim, value_dim):
    """Where q, k and v of a tile of S [K, Vb] lie among the channels, with masks; grid (blocks of V, H, …)."""
    block, head, value_heads = pl.program_id(0), pl.program_id(1), pl.num_programs(1)
    keys, columns = s_shape
    first_key = head // (value_heads // key_heads) * key_dim
    first_value = 2 * key_heads * key_dim + head * value_dim + block * columns
    key_mask, column_mask = mask_of(0, keys, key_dim), mask_of(block * columns, columns, value_dim)
    return (
        (pl.ds(first_key, keys), key_mask),
        (pl.ds(key_heads * key_dim + first_key, keys), key_mask),
        (pl.ds(first_value, columns), column_mask),
    )


def _parts(places, conv_ref, weight_layer, history_ref, layer):
    width = conv_ref.shape[2]
    return [
        _Part(
            channels,
            mask,
            [load(conv_ref.at[weight_layer, channels, jnp.int32(j)], mask) for j in range(width)],
            [load(history_ref.at[layer, jnp.int32(i), channels], mask) for i in range(width - 1)],
        )
        for channels, mask in places
    ]


def _recur(count, xc_ref, beta_ref, g_ref, parts, s, step):
    """S after `count` tokens, each s = step(t, s, *convolved parts, beta, decay).

    The loop counts down, so that it compiles to a `while`, not to a `for`. Through a `for`, Triton carries the layout
    that products with S need back to the convolution, where every lane then holds and computes a sixteenth of all
    channels (2800 instructions and 450 bytes of spills, where it is 950 and none now). What a `while` carries it lets
    be.
    """
    last = xc_ref.shape[0] - 1

    def read(t):
        t = jnp.minimum(t, last)
        return [load(xc_ref.at[t, part.channels], part.mask) for part in parts], beta_ref[t], g_ref[t]

    def token(carry):
        left, s, pasts, (xs, beta, g) = carry
        t = count - left
        # Asked for a token ahead: what a token needs is there when its turn comes.
        following = read(t + 1)
        windows = [[*past, x] for past, x in zip(pasts, xs, strict=True)]
        convolved = [convolve(window, part.weights) for window, part in zip(windows, parts, strict=True)]
        s = step(t, s, *convolved, beta, jnp.exp(g))
        return left - 1, s, [window[1:] for window in windows], following

    first = (jnp.int32(count), s, [part.past for part in parts], read(jnp.int32(0)))
    return lax.while_loop(lambda carry: carry[0] > 0, token, first)[1]


def _gated_norm(o, weight, z, value_dim, eps):
    return o * rms_scale([o], value_dim, eps) * (weight * jax.nn.silu(z))
