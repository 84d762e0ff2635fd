"""Kernel bodies for the Triton backend: a head made ready, a share of the slots attended to, the shares put together.

Every array has the next power of two of its true length, and masks cut it off. All refs are whole arrays. Row m of M
belongs to row m mod B of the cache.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.limbs.host import GROUP, Split
from pallas_kernels.operands import next_power_of_two

__all__ = [
    "Attended",
    "Partial",
    "Placed",
    "combine_kernel",
    "partial_kernel",
    "place_kernel",
]


class Placed(NamedTuple):
    """What `place` leaves."""

    q: Any
    """float32 [M, Nq, Hd], normalised, rotated and scaled."""
    keys: Any
    """[A, B, S, N, Hd], in place."""
    values: Any
    """[A, B, S, N, Hd], in place."""


class Partial(NamedTuple):
    """Attention over some of the slots: o = sums / total, once all parts are put on one `largest`."""

    largest: Any
    """Largest score, float32 [M, Nq, splits]."""
    total: Any
    """sum_s exp(score_s - largest), float32 [M, Nq, splits]."""
    sums: Any
    """sum_s exp(score_s - largest) v_s, float32 [M, Nq, splits, Hd]."""


class Attended(NamedTuple):
    """The gated output, in the form asked for."""

    o: Any = None
    """float32 [M, Nq·Hd]."""
    digits: Any = None
    """The same as limbs: int8 [limbs, M, Nq·Hd] …"""
    x_scales: Any = None
    """… and their scales, float32 [M, Nq·Hd/32]."""


def place_kernel(
    layer_ref,  # int32 [1], of the cache
    weight_layer_ref,  # int32 [1], of the norms
    q_ref,  # float32 [M, Nq, 2 Hd], query then gate
    k_ref,  # float32 [M, N, Hd]
    v_ref,  # float32 [M, N, Hd]
    q_norm_ref,  # float32 [Lw, Hd]
    k_norm_ref,  # float32 [Lw, Hd]
    frequencies_ref,  # float32 [rd/2]
    position_ref,  # int32 [M]
    writes_ref,  # bool or int32 [M]
    out,  # Placed of refs
    *,
    eps: float,
):
    """One head of q, or one of k and v; grid (Nq + N, M)."""
    head, row = pl.program_id(0), pl.program_id(1)
    layers, batch, capacity, _, head_dim = out.keys.shape
    heads = q_ref.shape[1]
    position = position_ref[row]
    column = jnp.arange(next_power_of_two(head_dim), dtype=jnp.int32)
    inside = column < head_dim

    def ready(x_ref, head, norm_ref):
        """RoPE(norm(x)) of a head."""
        weight_layer = jnp.clip(weight_layer_ref[0], 0, norm_ref.shape[0] - 1)
        partner, sign, angle = _turn(column, frequencies_ref, position)
        # The component that each is mixed with is read once more, which costs less than moving it between lanes.
        x, other = (plt.load(x_ref.at[row, head, at], mask=inside, other=0.0) for at in (column, partner))
        weight, other_weight = (
            1 + plt.load(norm_ref.at[weight_layer, at], mask=inside, other=0.0) for at in (column, partner)
        )
        scale = lax.rsqrt(jnp.sum(x * x) / head_dim + jnp.float32(eps))
        return x * scale * weight * jnp.cos(angle) + sign * (other * scale * other_weight * jnp.sin(angle))

    @pl.when(head < heads)
    def _query():
        q = ready(q_ref, head, q_norm_ref) * jnp.float32(head_dim**-0.5)
        plt.store(out.q.at[row, head, column], q, mask=inside)

    @pl.when(head >= heads)
    def _key_and_value():
        kv_head = head - heads
        layer = layer_ref[0]
        exists = (layer >= 0) & (layer < layers) & (position >= 0) & (position < capacity)
        live = exists & writes_ref[row].astype(jnp.bool_)
        sequence = lax.rem(row, jnp.int32(batch))
        at = jnp.clip(layer, 0, layers - 1), sequence, jnp.clip(position, 0, capacity - 1), kv_head, column
        k = ready(k_ref, kv_head, k_norm_ref)
        v = plt.load(v_ref.at[row, kv_head, column], mask=inside, other=0.0)
        plt.store(out.keys.at[at], k.astype(out.keys.dtype), mask=inside & live)
        plt.store(out.values.at[at], v.astype(out.values.dtype), mask=inside & live)


def _turn(column, frequencies_ref, position):
    """For each component of a head: the one that it is turned with, the sign of that, and the angle.

    Components i and i + rd/2 turn; those from rd on are their own partners, by an angle of 0.
    """
    half = frequencies_ref.shape[0]
    first, turns = column < half, column < 2 * half
    partner = jnp.where(first, column + half, jnp.where(turns, column - half, column))
    sign = jnp.where(first, jnp.float32(-1), jnp.float32(1))
    frequency = plt.load(frequencies_ref.at[jnp.where(first, column, partner)], mask=turns, other=0.0)
    return partner, sign, position.astype(jnp.float32) * frequency


def partial_kernel(
    layer_ref,  # int32 [1]
    position_ref,  # int32 [M]
    q_ref,  # float32 [M, Nq, Hd]
    keys_ref,  # float32 or bfloat16 [A, B, S, N, Hd]
    values_ref,  # like keys
    out,  # Partial of refs
    *,
    slots: int,
    together: int,
):
    """Every `splits`-th tile of slots, for some query heads of one key-value head; grid (splits, Nq / together, M)."""
    split, group, row = (pl.program_id(axis) for axis in range(3))
    layers, batch, capacity, kv_heads, head_dim = keys_ref.shape
    sequence = lax.rem(row, jnp.int32(batch))
    heads, splits = out.largest.shape[1:]
    own = [group * together + i for i in range(together)]
    kv_head = own[0] // (heads // kv_heads)
    layer = jnp.clip(layer_ref[0], 0, layers - 1)
    last = jnp.minimum(position_ref[row], capacity - 1)
    column = jnp.arange(next_power_of_two(head_dim), dtype=jnp.int32)
    inside = column < head_dim
    tiles = _share(last, slots, splits, split)

    # A program without a slot to see leaves what it should write as it is: nobody reads that.
    @pl.when(tiles > 0)
    def _attend():
        qs = [plt.load(q_ref.at[row, head, column], mask=inside, other=0.0) for head in own]

        def tile(i, parts):
            slot = (split + i * splits) * slots + jnp.arange(slots, dtype=jnp.int32)
            seen = slot <= last
            # The row may end within the tile.
            at = layer, sequence, jnp.where(seen, slot, 0)[:, None], kv_head, column[None]
            mask = seen[:, None] & inside[None]
            k, v = (plt.load(ref.at[at], mask=mask, other=0.0).astype(jnp.float32) for ref in (keys_ref, values_ref))
            return tuple(_attend_tile(k, v, seen, q, part) for q, part in zip(qs, parts, strict=True))

        nothing = Partial(jnp.float32(-jnp.inf), jnp.float32(0), jnp.zeros(column.shape, jnp.float32))
        parts = lax.fori_loop(0, tiles, tile, (nothing,) * together)
        for head, part in zip(own, parts, strict=True):
            out.largest[row, head, split] = part.largest
            out.total[row, head, split] = part.total
            plt.store(out.sums.at[row, head, split, column], part.sums, mask=inside)


def _attend_tile(k, v, seen, q, part):
    """The partial result for one q [Hd], with k and v [slots, Hd] taken in where `seen`."""
    # Multiply and add, since a dot may be rounded to TF32.
    scores = jnp.where(seen, jnp.sum(k * q[None], axis=1), jnp.float32(-jnp.inf))
    largest = jnp.maximum(part.largest, jnp.max(scores))
    shift = _finite(largest)
    fade, shares = jnp.exp(part.largest - shift), jnp.exp(scores - shift)
    total = part.total * fade + jnp.sum(shares)
    return Partial(largest, total, part.sums * fade + jnp.sum(shares[:, None] * v, axis=0))


def combine_kernel(
    layer_ref,  # int32 [1]
    position_ref,  # int32 [M]
    gate_ref,  # float32 [M, Nq, 2 Hd], query then gate
    part,  # Partial of refs
    out,  # Attended of refs: o [M, Nq, Hd], digits [limbs, M, Nq, Hd], x_scales [M, Nq, Hd/32]
    *,
    layers: int,
    capacity: int,
    slots: int,
    columns: int,
    split: Split | None,
):
    """Some columns of one query head, from partial results to the gated output; grid (blocks of Hd, Nq, M)."""
    block, head, row = (pl.program_id(axis) for axis in range(3))
    splits, head_dim = part.sums.shape[2:]
    last = jnp.minimum(position_ref[row], capacity - 1)
    number = jnp.arange(next_power_of_two(splits), dtype=jnp.int32)
    column = block * columns + jnp.arange(columns, dtype=jnp.int32)
    inside = column < head_dim
    # Those that had no slot to see left nothing.
    left = (number < splits) & (number * slots <= last)

    largest = plt.load(part.largest.at[row, head, number], mask=left, other=float("-inf"))
    total = plt.load(part.total.at[row, head, number], mask=left, other=0.0)
    sums = plt.load(
        part.sums.at[row, head, number[:, None], column[None]], mask=left[:, None] & inside[None], other=0.0
    )
    gate = plt.load(gate_ref.at[row, head, head_dim + column], mask=inside, other=0.0)
    fade = jnp.exp(largest - _finite(jnp.max(largest)))
    o = jnp.sum(fade[:, None] * sums, axis=0) / jnp.sum(fade * total) * jax.nn.sigmoid(gate)
    layer = layer_ref[0]
    o = jnp.where((layer >= 0) & (layer < layers), o, jnp.float32(jnp.nan))

    if out.o is not None:
        plt.store(out.o.at[row, head, column], o, mask=inside)
    if split is not None:
        count = columns // GROUP
        digits, scales = split(o.reshape(count, GROUP))
        for limb, digit in enumerate(digits):
            plt.store(out.digits.at[limb, row, head, column], digit.reshape(columns), mask=inside)
        group = block * count + jnp.arange(count, dtype=jnp.int32)
        plt.store(out.x_scales.at[row, head, group], scales, mask=group < head_dim // GROUP)


def _share(last, slots, splits, split):
    """How many tiles number `split` of the splits has, of those up to slot `last`."""
    tiles = lax.div(last + slots, jnp.int32(slots))  # below 1 where no slot is seen
    return lax.div(tiles - split + (splits - 1), jnp.int32(splits))


def _finite(largest):
    """A largest score to subtract: 0 in place of -inf, which is what no score, or none but -inf, would leave."""
    return jnp.where(largest == -jnp.inf, jnp.float32(0), largest)
