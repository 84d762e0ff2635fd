"""The product on the tensor cores of sm_90 (Pallas on Mosaic GPU): a TMA ring feeds int8 matrix instructions.

`mma.m16n8k32` multiplies 16 rows of codes with 8 columns of digits over the 32 columns of one group. The device layout
of the codes is its operand as it lies: word 4g + a of a row holds columns 32g + 4a … + 3 and 32g + 16 + 4a … + 3, which
are what lane a of four wants of that row. What the 8 columns are depends on the batch:

    batch 1, 2, 4:  every limb of every row of x, limb-major. One instruction per group, but two for three limbs of four
                    rows; limbs are added at the end.
    others to 8:    the rows of x. One instruction per limb; D = d_1 + d_2 / 256 + d_3 / 65536 is formed per group.

The four warps of a block share its rows and split its groups: 4 groups of every 16 to each.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.lane import BaseLane, elements
from pallas_kernels.q4_gemv.tuning import MosaicTile

__all__ = ["launch_mosaic", "mosaic_unsupported"]

_GROUP = 32
_WARPS = 4
_RUN = 4
"""Neighbouring groups of one warp: 64 bytes of a row's codes. Twice as many take twice the registers, so that half as
many blocks are on a multiprocessor at a time."""
_STEP = _WARPS * _RUN
"""Groups of one step, of the four warps together."""
_COLUMNS = 8
"""Columns of digits of one instruction."""
_COPY_BYTES = 128
"""What the copies of a step must be multiples of: the next step's lie behind them, and TMA writes to such addresses."""
_FOLDED_BATCHES = (1, 2, 4)
"""Batches whose limbs stand side by side in the columns. They divide these, so a column is of the same row of x in
every instruction."""


def _layout(*tiles, warps, lanes):
    return plgpu.Layout.TILED(plgpu.Tiling(tiles), warp_dims=warps, lane_dims=lanes, vector_dim=-1)


# Who holds what of a step, as tilings of its arrays whose last axis is one register. Of the groups of its warp, a lane
# with r = lane // 4 and a = lane % 4 has
#   words a of rows r, r + 8, …                 of uint32 [rows, 128],
#   digits 4a … and 16 + 4a … of column r       of int8 [eights, 8, 512], or of [4, 4, 512], two eights of columns,
#   the scales of rows r, r + 8, …              of float16 [rows, 16],
#   those of columns 2a and 2a + 1              of float32 [8, 16], of [4, 16] where column c is of row c % 4, or all of
#                                               them of float32 [B, 16], and
#   sums of rows r, r + 8, …, columns 2a, 2a+1  of float32 [warps, rows, 8], for every eight of columns.
_WORDS = _layout((8, 4 * _STEP), (4 * _RUN,), (4,), (1,), warps=(-4,), lanes=(-5, -2))
_DIGITS = {
    8: _layout((8, _GROUP * _STEP), (_GROUP * _RUN,), (16,), (4,), warps=(-4,), lanes=(-5, -2)),
    4: _layout((4, 4, _GROUP * _STEP), (2, 4, _GROUP * _RUN), (16,), (4,), warps=(-6,), lanes=(-5, -4, -2)),
}
_SCALES = _layout((8, _STEP), (_RUN,), warps=(-2,), lanes=(-3, plgpu.Replicated(4)))
_ALL_X_SCALES = _layout((_STEP,), (_RUN,), warps=(-2,), lanes=(plgpu.Replicated(32),))
_X_SCALES = {
    1: _ALL_X_SCALES,
    2: _ALL_X_SCALES,
    4: _layout((4, _STEP), (2, _RUN), warps=(-3,), lanes=(plgpu.Replicated(16), -4)),
    8: _layout((8, _STEP), (2, _RUN), warps=(-3,), lanes=(plgpu.Replicated(8), -4)),
}
_SUMS = _layout((_WARPS, 8, _COLUMNS), (2,), warps=(-4,), lanes=(-3, -2))


def mosaic_unsupported(shapes: Sequence[tuple[int, int, int]]) -> str | None:
    """Why this form does not take matrices of these shapes [L, N, I], or None: copies are of whole 8-row tiles."""
    for shape in shapes:
        if shape[1] % 8 or shape[2] % (_GROUP * _STEP):
            return f"the tensor core form needs N % 8 = 0 and I % {_GROUP * _STEP} = 0, got a matrix of shape {shape}"
    return None


@functools.partial(jax.jit, static_argnames=("tile",))
def launch_mosaic(matrices, digits, x_scales, layer, *, tile: MosaicTile):
    """As `q4_gemv`, for operands that it has checked and of which `mosaic_unsupported` says nothing.

    Partial sums per output: one per warp (and per limb, for batch 1, 2 and 4), groups in ascending order. The bits
    depend on whether the batch is one of these and on nothing else: not on `tile`, on the run, nor on other rows.

    Raises:
        ValueError: `tile` is not one.
    """
    if tile.rows not in (16, 32, 64) or tile.stages < 1:
        raise ValueError(f"rows of a tile must be 16, 32 or 64 and stages at least 1, got {tile}")
    limbs, batch, columns = digits.shape
    if batch in _FOLDED_BATCHES and limbs * batch <= _COLUMNS:
        digits = digits.reshape(1, limbs * batch, columns)
    rows = [codes.shape[1] for codes, _ in matrices]
    blocks = [pl.cdiv(n, tile.rows) for n in rows]
    ys = plgpu.kernel(
        functools.partial(_body, limbs=limbs, tile=tile),
        # Whole blocks, since stores are not masked; the slices below copy where that is more than N rows.
        out_type=[jax.ShapeDtypeStruct((batch, count * tile.rows), jnp.float32) for count in blocks],
        grid=(sum(blocks),),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),  # there is one per step, in _multiply_add
        kernel_name="q4_gemv",
    )(layer, digits, x_scales, *(array for matrix in matrices for array in matrix))
    return tuple(y[:, :n] for y, n in zip(ys, rows, strict=True))


def _body(layer_ref, digits_ref, x_scales_ref, *matrix_refs, limbs: int, tile: MosaicTile):
    """Blocks go to the matrices in order, ceil(N_m / tile.rows) to each."""
    count = len(matrix_refs) // 3
    codes_refs, scales_refs, y_refs = matrix_refs[: 2 * count : 2], matrix_refs[1 : 2 * count : 2], matrix_refs[-count:]
    block = lax.axis_index("block")
    first = 0
    for codes_ref, scales_ref, y_ref in zip(codes_refs, scales_refs, y_refs, strict=True):
        blocks = y_ref.shape[1] // tile.rows
        rows = functools.partial(
            _row_block, block - first, layer_ref, digits_ref, x_scales_ref, codes_ref, scales_ref, y_ref, limbs, tile
        )
        pl.when((block >= first) & (block < first + blocks))(rows)
        first += blocks


def _row_block(block, layer_ref, digits_ref, x_scales_ref, codes_ref, scales_ref, y_ref, limbs, tile):
    """Rows block · tile.rows … of one matrix. What a copy finds beyond the end of an array is 0, and adds 0."""
    layer = jnp.clip(layer_ref[0], 0, codes_ref.shape[0] - 1)
    batch = y_ref.shape[0]
    folded = batch in _FOLDED_BATCHES
    eights = pl.cdiv(limbs * batch, _COLUMNS) if folded else 1
    # What is copied is whole eights of columns: where there are fewer, zeros.
    digits_shape = (digits_ref.shape[0], _COLUMNS) if eights == 1 else (eights * _COLUMNS // batch, batch)
    together = digits_shape[1:] if eights == 1 else digits_shape
    x_scales_rows = batch if folded else _COLUMNS
    layouts = _DIGITS[digits_shape[1]], _X_SCALES[x_scales_rows]
    copied_x_scales = max(x_scales_rows, _COPY_BYTES // (4 * _STEP))

    def step(_, words_ref, scales_ref, digits_ref, x_scales_ref, sums):
        return _multiply_add(
            plgpu.load(words_ref, layout=_WORDS),
            plgpu.load(scales_ref, layout=_SCALES, optimized=False),
            plgpu.load(digits_ref, layout=layouts[0]),
            plgpu.load(x_scales_ref.at[pl.ds(0, x_scales_rows)], layout=layouts[1], optimized=False),
            sums,
            layouts,
        )

    pipeline = plgpu.emit_pipeline(
        step,
        grid=(scales_ref.shape[2] // _STEP,),
        in_specs=[
            plgpu.BlockSpec((None, tile.rows, 4 * _STEP), lambda k: (layer, block, k), transforms=_swizzled(4, 8)),
            plgpu.BlockSpec((None, tile.rows, _STEP), lambda k: (layer, block, k)),
            # 0 · k, since at a plain 0 JAX would refuse more rows than there are as out of bounds.
            plgpu.BlockSpec(
                (*digits_shape, _GROUP * _STEP), lambda k: (0 * k, 0 * k, k), transforms=_swizzled(1, *together)
            ),
            plgpu.BlockSpec((copied_x_scales, _STEP), lambda k: (0 * k, k)),
        ],
        max_concurrent_steps=tile.stages,
        init_carry=plgpu.layout_cast(jnp.zeros((_WARPS, tile.rows, eights * _COLUMNS), jnp.float32), _SUMS),
    )
    sums = jnp.sum(pipeline(codes_ref, scales_ref, digits_ref, x_scales_ref), axis=0)
    column = plgpu.broadcasted_iota(jnp.int32, sums.shape, 1, layout=_SUMS.reduce(0))
    for b in range(batch):
        places = [(limb * batch + b, 256.0**-limb) for limb in range(limbs)] if folded else [(b, 1.0)]
        terms = [jnp.where(column == place, sums * jnp.float32(unit), jnp.zeros_like(sums)) for place, unit in places]
        y_ref[b, pl.ds(block * tile.rows, tile.rows)] = jnp.sum(functools.reduce(jnp.add, terms), axis=1)


def _swizzled(itemsize, *rows):
    """128-byte pieces of so many rows, laid so that the 16 bytes of one group in 8 rows lie in different banks."""
    # pyright takes both for abstract: their base class declares a method that Mosaic's transforms do not have.
    tiling = plgpu.TilingTransform((*rows, 128 // itemsize))  # pyright: ignore[reportAbstractUsage]
    return tiling, plgpu.SwizzleTransform(128)  # pyright: ignore[reportAbstractUsage]


def _multiply_add(words, scales, digits, x_scales, sums, layouts):
    """sums[w, n, c] + the terms (D[n, c, g] · x_scales[c, g]) · scales[n, g] of the groups g of warp w.

    The digits are of as many eights of columns as the sums have, or, if that is one, of all limbs of D.
    """
    on_registers = plgpu.inline_mgpu(
        arg_types=(_WORDS, _SCALES, *layouts, _SUMS),
        return_type=plgpu.ShapeDtypeStruct(sums.shape, sums.dtype, layout=_SUMS),
    )
    return on_registers(_multiply_add_registers)(words, scales, digits, x_scales, sums)


def _multiply_add_registers(_, words, scales, digits, x_scales, sums):
    octets = words.shape[0] // 8
    digits = np.fromiter((Lane.word(register) for register in digits.registers.flat), object).reshape(-1, 2 * _RUN)
    words, scales = (elements(Lane, array).reshape(octets, -1) for array in (words, scales))
    totals = elements(Lane, sums).reshape(octets, -1, 2)
    x_scales = elements(Lane, x_scales).reshape(-1, _RUN)
    for g in range(_RUN):
        units = [Lane.times(scale, Lane.constant(1 / 16)) for scale in x_scales[:, g]]  # codes come as 16 times theirs
        for top in range(0, octets, 2):
            a = [Lane.nibbles(word, shift) for shift in (4, 0) for word in words[top : top + 2, g]]
            dots = np.fromiter((dot for b in digits[:, 2 * g : 2 * g + 2] for dot in Lane.mma(a, b)), object)
            dots = dots.reshape(totals.shape[1], -1, 2, 2)
            for row in range(2):
                scale = Lane.float(scales[top + row, g])
                for eight, column in np.ndindex(totals.shape[1:]):
                    value = Lane.times(_fixed_point(dots[eight, :, row, column]), units[column % len(units)])
                    total = totals[top + row, eight, column]
                    totals[top + row, eight, column] = Lane.times_plus(value, scale, total)
    Lane.barrier()  # no warp reads this step's shared memory any more: it may be filled again
    return Lane.array([Lane.vector(pair) for pair in totals.reshape(-1, 2)], like=sums)


def _fixed_point(dots):
    """D = d_1 + d_2 / 256 + d_3 / 65536 in one rounding: the limbs after the first are joined as integers, exactly."""
    total = Lane.float(dots[0])
    if len(dots) == 1:
        return total
    rest = functools.reduce(Lane.join, dots[1:])
    return Lane.times_plus(Lane.float(rest), Lane.constant(256.0 ** (1 - len(dots))), total)


class Lane(BaseLane):
    """What one lane does with its registers, as LLVM values."""

    @staticmethod
    def constant(value: float):
        """A float32."""
        return arith.constant(ir.F32Type.get(), ir.FloatAttr.get(ir.F32Type.get(), value))

    @staticmethod
    def word(register):
        """The 32 bits of a register of four bytes."""
        return mgpu.utils.bitcast(register, ir.IntegerType.get_signless(32))

    @staticmethod
    def nibbles(word, shift: int):
        """Four signed bytes, 16 times the low (shift 4) or high (shift 0) nibbles of the four bytes of a word."""
        i32 = ir.IntegerType.get_signless(32)
        upper = arith.constant(i32, ir.IntegerAttr.get(i32, 0xF0F0F0F0 - 2**32))
        return arith.andi(arith.shli(word, arith.constant(i32, ir.IntegerAttr.get(i32, shift))), upper)

    @staticmethod
    def mma(a, b):
        """Four int32 of the product of 16 × 32 and 32 × 8 signed bytes: columns 2a and 2a + 1 of rows r and r + 8."""
        i32 = ir.IntegerType.get_signless(32)
        result = llvm.inline_asm(
            llvm.StructType.get_literal([i32] * 4),
            [*a, *b, arith.constant(i32, ir.IntegerAttr.get(i32, 0))],
            "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$10,$10,$10};",
            "=r,=r,=r,=r,r,r,r,r,r,r,r",
            has_side_effects=False,
        )
        return [llvm.extractvalue(i32, result, [i]) for i in range(4)]

    @staticmethod
    def join(high, low):
        """256 · high + low of int32."""
        i32 = ir.IntegerType.get_signless(32)
        return arith.addi(arith.shli(high, arith.constant(i32, ir.IntegerAttr.get(i32, 8))), low)

    @staticmethod
    def times(a, b):
        """a · b in float32."""
        return arith.mulf(a, b)

    @staticmethod
    def barrier():
        """Wait for the other warps."""
        mgpu.utils.warpgroup_barrier()
