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

__all__ = ["Kept", "WindowOutput", "fold_kernel", "history_kernel", "look_kernel", "norm_kernel"]


class Kept(NamedTuple):
    """What a fold needs of a window, of all layers."""

    xc: Any
    """The convolution's inputs, float32 [L, T, B, C]."""
    beta: Any
    """Write strengths, float32 [L, T, B, H]."""
    g: Any
    """Log decays, float32 [L, T, B, H]."""


class WindowOutput(NamedTuple):
    """What a look at a window gives, after the gated norm, in the form asked for."""

    onn: Any = None
    """float32 [T, B, H, V]."""
    digits: Any = None
    """The same as limbs, whose rows are time-first: int8 [limbs, T·B, H·V] …"""
    x_scales: Any = None
    """… and their scales, float32 [T·B, H·V/32]."""
    kept: Kept | None = None
    """What is kept for a fold, with this layer's part filled in, where it was given."""


def look_kernel(
    kept_ref,  # Kept of [L, T, C], [L, T] and [L, T], the same memory as out.kept, or None
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
    out,  # WindowOutput of refs: onn [T, Vb]; digits [limbs, T, Vb]; x_scales [T, Vb/32]; kept
    *,
    key_heads: int,
    key_dim: int,
    value_dim: int,
    qk_eps: float,
    eps: float,
    split: Split | None,
):
    """Vb columns of one value head: the delta rule's output, or the gated norm's where they are all columns.

    Grid (blocks of V, H, B). Every channel of the window, and every gate, is kept by one program: of the value heads
    that share a key head by the first, of a head's blocks by the first.
    """
    del kept_ref
    layers, keys, columns = s_ref.shape
    tokens = xc_ref.shape[0]
    whole = pl.ds(0, columns)
    places = _places((keys, columns), key_heads, key_dim, value_dim)
    _, (_, key_mask), (_, column_mask) = places
    layer = layer_ref[0]
    exists, nearest = (layer >= 0) & (layer < layers), jnp.clip(layer, 0, layers - 1)
    weight_layer = jnp.clip(weight_layer_ref[0], 0, conv_ref.shape[0] - 1)
    weight = None if norm_ref is None else load(norm_ref.at[weight_layer, whole], column_mask)

    keep = None if out.kept is None else _keeper(out.kept, nearest, places, key_heads)

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
        count = tokens if lengths_ref is None else jnp.clip(lengths_ref[...], 0, tokens)
        window = _Window(xc_ref, beta_ref, g_ref, conv_ref, weight_layer)
        _recur(count, window, _parts(places, history_ref, nearest), s, step, keep)
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
        window = _Window(xc_ref, beta_ref, g_ref, conv_ref, only)
        plt.store(new_s_ref, _recur(count, window, _parts(places, history_ref, only), s, step), mask=mask)


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


class _Window(NamedTuple):
    """The refs that tokens are made of."""

    xc: Any
    """[T, C]."""
    beta: Any
    """[T]."""
    g: Any
    """[T]."""
    conv: Any
    """[Lw, C, W] …"""
    weight_layer: Any
    """… and which of them."""


class _Part(NamedTuple):
    """The channels of q, k or v that a program needs."""

    channels: Any
    mask: Any
    past: list
    """Their frames before the window, oldest first."""


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


def _parts(places, history_ref, layer):
    """The parts at some places, with the history of a layer; None for a history of no frames."""

    def past(channels, mask):
        if history_ref is None:
            return []
        frames = range(history_ref.shape[1])
        return [load(history_ref.at[layer, jnp.int32(i), channels], mask) for i in frames]

    return [_Part(channels, mask, past(channels, mask)) for channels, mask in places]


def _keeper(kept, layer, places, key_heads):
    """keep(t, xs, beta, g), which puts what token t is made of into a layer of the window, as far as it is this
    program's to write.
    """
    block, head, heads = pl.program_id(0), pl.program_id(1), pl.num_programs(1)
    first_block = block == 0
    first_of_keys = first_block & (lax.rem(head, heads // key_heads) == 0)
    mine = (first_of_keys, first_of_keys, jnp.bool_(True))

    def keep(t, xs, beta, g):
        for x, (channels, mask), writes in zip(xs, places, mine, strict=True):
            writes = jnp.broadcast_to(writes, x.shape)
            plt.store(kept.xc.at[layer, t, channels], x, mask=writes if mask is None else writes & mask)
        for ref, gate in ((kept.beta, beta), (kept.g, g)):
            plt.store(ref.at[layer, t], gate, mask=first_block)

    return keep


def _recur(count, window, parts, s, step, keep=None):
    """S after `count` tokens, each s = step(t, s, *convolved parts, beta, decay); keep(t, xs, beta, g), if given.

    The loop counts down, so that it compiles to a `while`, not to a `for`. Through a `for`, Triton carries the layout
    that products with S need back to the convolution, where every lane then holds and computes a sixteenth of all
    channels (2800 instructions and 450 bytes of spills, where it is 950 and none now). What a `while` carries it lets
    be. Weights are read anew for every token, from the nearest cache, which saves up to 38 registers.
    """
    tokens, width = window.xc.shape[0], window.conv.shape[2]

    def read(t):
        t = jnp.minimum(t, tokens - 1)
        return [load(window.xc.at[t, part.channels], part.mask) for part in parts], window.beta[t], window.g[t]

    def convolved(part, frames):
        at = (window.weight_layer, part.channels)
        return convolve(frames, [load(window.conv.at[(*at, jnp.int32(j))], part.mask) for j in range(width)])

    def token(carry):
        left, s, pasts, (xs, beta, g) = carry
        t = count - left
        # Asked for a token ahead: what a token needs is there when its turn comes.
        following = read(t + 1)
        if keep is not None:
            keep(t, xs, beta, g)
        frames = [[*past, x] for past, x in zip(pasts, xs, strict=True)]
        s = step(t, s, *map(convolved, parts, frames), beta, jnp.exp(g))
        return left - 1, s, [each[1:] for each in frames], following

    first = (jnp.int32(count), s, [part.past for part in parts], read(jnp.int32(0)))
    return lax.while_loop(lambda carry: carry[0] > 0, token, first)[1]


def _gated_norm(o, weight, z, value_dim, eps):
    return o * rms_scale([o], value_dim, eps) * (weight * jax.nn.silu(z))
