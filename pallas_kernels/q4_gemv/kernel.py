"""The kernel body: one program multiplies a block of rows of one matrix with every row of the batch."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.q4_gemv.tuning import Tile

__all__ = ["gemv_body", "row_products"]


def gemv_body(layer_ref, digits_ref, x_scales_ref, *matrix_refs, tile: Tile, interpret: bool):
    """y_m[b, n] = sum_g (D[b, n, g] · x_scales[b, g]) · scales_m[layer, n, g] for one block of rows n of one matrix m.

    Refs, all in global memory: layer int32 [1]; digits int32 [limbs, B, I/32, 8], the bytes of a group in order;
    x_scales float32 [B, I/32]; then codes uint32 [L, N_m, I/32, 4] and scales float16 [L, N_m, I/32] of each matrix in
    turn; then y float32 [B, N_m] of each. Programs go to the matrices in order, ceil(N_m / tile.rows) to each.
    """
    count = len(matrix_refs) // 3
    codes_refs, scales_refs, y_refs = matrix_refs[: 2 * count : 2], matrix_refs[1 : 2 * count : 2], matrix_refs[-count:]
    program = pl.program_id(0)
    first = 0
    for codes_ref, scales_ref, y_ref in zip(codes_refs, scales_refs, y_refs, strict=True):
        blocks = pl.cdiv(y_ref.shape[1], tile.rows)
        pl.when((program >= first) & (program < first + blocks))(
            functools.partial(
                _row_block,
                (program - first) * tile.rows,
                (layer_ref, digits_ref, x_scales_ref, codes_ref, scales_ref),
                y_ref,
                tile=tile,
                interpret=interpret,
            )
        )
        first += blocks


def _row_block(first_row, operands, y_ref, *, tile, interpret):
    """Rows first_row … first_row + tile.rows - 1, as far as there are any."""
    row, products = row_products(first_row, *operands, tile=tile, interpret=interpret)
    for b, y in enumerate(products):
        plt.store(y_ref.at[b, row], y, mask=row < y_ref.shape[1])


def row_products(first_row, layer_ref, digits_ref, x_scales_ref, codes_ref, scales_ref, *, tile, interpret):
    """Row numbers int32 [rows] from first_row on, and y[b, row] for each row b of the batch; refs as in `gemv_body`.

    A row beyond the last one comes with the product of the last.
    """
    layers, rows, groups, _ = codes_ref.shape
    batch = digits_ref.shape[1]
    # No index leaves its array: a layer, row or group beyond the last one is read as the last one, since the backend
    # masks no partial blocks. A group read twice adds zero.
    layer = jnp.clip(layer_ref[0], 0, layers - 1)
    y_row = first_row + jnp.arange(tile.rows, dtype=jnp.int32)
    row = jnp.minimum(y_row, rows - 1)
    word = jnp.arange(4, dtype=jnp.int32)

    def add_step(step, sums):
        place = step * tile.groups + jnp.arange(tile.groups, dtype=jnp.int32)
        # The minimum also keeps the compiler from seeing that scales lie side by side. It would give eight of them to
        # one lane, in wide loads, and carry the dot products to that lane through shared memory at every step.
        group = jnp.minimum(place, groups - 1)
        codes = plt.load(
            codes_ref.at[layer, row[:, None, None], group[None, :, None], word[None, None]],
            eviction_policy="evict_first",
        )
        scales = plt.load(scales_ref.at[layer, row[:, None], group[None]], eviction_policy="evict_first")
        nibbles, scales = _nibbles(codes), scales.astype(jnp.float32)
        added = []
        for b in range(batch):
            x_scales = jnp.where(place < groups, x_scales_ref[b, group], jnp.float32(0))[None]
            dots = _group_dots(nibbles, digits_ref, b, group, word, interpret)
            added.append(sums[b] + (_fixed_point(dots) * x_scales) * scales)
        return tuple(added)

    sums = (jnp.zeros((tile.rows, tile.groups), jnp.float32),) * batch
    sums = lax.fori_loop(0, pl.cdiv(groups, tile.groups), add_step, sums)
    return y_row, [jnp.sum(partial, axis=1) for partial in sums]


def _nibbles(codes):
    """Words uint32 [rows, groups, 4] -> eight words int32 [rows, groups] whose bytes are 16 · code, columns in order.

    In the upper half of a byte a two's complement nibble is a signed byte, 16 times its value: no offset to take off.
    """
    upper = jnp.uint32(0xF0F0F0F0)
    halves = ((codes << jnp.uint32(4)) & upper, codes & upper)
    return [word for half in halves for word in _words(lax.bitcast_convert_type(half, jnp.int32))]


def _words(array):
    """[..., 4] -> four [...]. The four lie in one thread's registers, so this moves nothing."""
    return [part.reshape(array.shape[:-1]) for part in lax.split(array, (1, 1, 1, 1), axis=array.ndim - 1)]


def _group_dots(nibbles, digits_ref, b, group, word, interpret):
    """The dot products of 16 · code with each limb of row b of x, exact: int32 [rows, groups] per limb."""
    shape = nibbles[0].shape
    dots = []
    for limb in range(digits_ref.shape[0]):
        # Indexed with an axis for the rows, so that lanes hold the groups that they hold of the codes.
        halves = (digits_ref[limb, b, group[None, :, None], word[None, None] + start] for start in (0, 4))
        digits = [jnp.broadcast_to(part, shape) for half in halves for part in _words(half)]
        dot = jnp.zeros(shape, jnp.int32)
        for codes, x in zip(nibbles, digits, strict=True):
            dot = _dp4a(codes, x, dot, interpret)
        dots.append(dot)
    return dots


def _dp4a(a, b, c, interpret):
    """c + the dot product of the four signed bytes of a and of b, int32, element by element."""
    if interpret:  # the inline assembly has no rule for other backends
        products = [lax.bitcast_convert_type(part, jnp.int8).astype(jnp.int32) for part in (a, b)]
        return c + jnp.sum(products[0] * products[1], axis=-1)
    [result] = plt.elementwise_inline_asm(
        "dp4a.s32.s32 $0, $1, $2, $3;",
        args=[a, b, c],
        constraints="=r,r,r,r",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(c.shape, jnp.int32)],
    )
    return result


def _fixed_point(dots):
    """D = d_1 + d_2 / 256 + d_3 / 65536 in one rounding, from 16 · d_1 … as int32.

    The limbs after the first are joined as integers: 16 times a number below 2^24, so exact as float32, and every
    factor is a power of two.
    """
    total = dots[0].astype(jnp.float32) * jnp.float32(1 / 16)
    if len(dots) == 1:
        return total
    rest = functools.reduce(lambda high, low: high * 256 + low, dots[1:])
    return total + rest.astype(jnp.float32) * jnp.float32(1 / 16 / 256 ** (len(dots) - 1))
