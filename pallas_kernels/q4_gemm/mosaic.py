"""The product on the warpgroup matrix units of sm_90 (Pallas on Mosaic GPU): codes in registers, x through a TMA ring.

A block makes `tile.rows` outputs of `tile.tokens` tokens. Its compute warpgroups share the outputs; one more fills the
ring with steps of 128 columns. Per group of 32 columns a warpgroup turns its words into bfloat16 codes, which are
exact, and has `wgmma` multiply them with every piece of x into a sum of its own; that is added to the running sum in
float32 times the group's scale. So a tensor core adds up no more than 32 · pieces terms, with the little care that it
takes of their last bits, and the rest is done by fused multiply-add.

Of 16 columns an instruction gives lane a of four the places 2a, 2a + 1, 2a + 8 and 2a + 9. Word a of a group holds
columns 4a … 4a + 3 in its low nibbles and 16 + 4a … in its high ones, so x comes with its columns in the order that
brings 4a, 4a + 2, 4a + 1 and 4a + 3 to those places (`COLUMN_ORDER`).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import mma_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, nvvm

from pallas_kernels.lane import BaseLane, elements
from pallas_kernels.q4_gemm.tuning import Tile

__all__ = ["COLUMN_ORDER", "STEP_COLUMNS", "launch"]

_GROUP = 32
_STEP = 4
"""Groups per step."""
STEP_COLUMNS = _GROUP * _STEP
"""Columns per step."""
_WORDS = 4
"""Words per group."""
_M = 64
"""Rows of one instruction."""
_SWIZZLE = 64
"""Bytes: one group of bfloat16 columns."""

COLUMN_ORDER = np.arange(16).reshape(4, 2, 2).transpose(2, 0, 1).reshape(-1)
"""Of every 16 columns, which stands at each place of x."""


def _layout(*tiles, warps, lanes):
    return plgpu.Layout.TILED(plgpu.Tiling(tiles), warp_dims=warps, lane_dims=lanes, vector_dim=-1)


# As the operand and the sums of `wgmma` lie: warp w has rows 16w … of every 64, lane 4r + a rows r and r + 8 of these.
_WORD_LAYOUT = _layout((_M, _STEP * _WORDS), (16, _STEP * _WORDS), (8, 4), (1,), warps=(-7,), lanes=(-3, -2))
_SCALE_LAYOUT = _layout((_M, _STEP), (16, _STEP), (8, _STEP), warps=(-6,), lanes=(-2, plgpu.Replicated(4)))
_SUM_LAYOUT = plgpu.Layout.WGMMA
# pyright takes both for abstract: their base class declares a method that Mosaic's transforms do not have.
_X_TRANSFORMS = (plgpu.TilingTransform((8, _GROUP)), plgpu.SwizzleTransform(_SWIZZLE))  # pyright: ignore[reportAbstractUsage]
_W_TRANSFORMS = (plgpu.TilingTransform((8, _STEP * _WORDS)), plgpu.SwizzleTransform(4 * _STEP * _WORDS))  # pyright: ignore[reportAbstractUsage]


@functools.partial(jax.jit, static_argnames=("tile",))
def launch(codes, scales, x, layer, *, tile: Tile):
    """y float32 [M, N] for checked operands: x bfloat16 [pieces, M, I] with its columns in `COLUMN_ORDER`."""
    rows, tokens = codes.shape[1], x.shape[1]
    blocks = pl.cdiv(tokens, tile.tokens)
    return plgpu.kernel(
        functools.partial(_block, tile=tile, token_blocks=blocks),
        out_type=jax.ShapeDtypeStruct((tokens, rows), jnp.float32),
        grid=(pl.cdiv(rows, tile.rows * tile.cluster) * blocks,),
        grid_names=("block",),
        cluster=(tile.cluster,),
        cluster_names=("member",),
        num_threads=tile.warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        kernel_name="q4_gemm",
    )(layer, codes, scales, x)


def _block(layer_ref, codes_ref, scales_ref, x_ref, y_ref, *, tile: Tile, token_blocks: int):
    """Blocks of the same rows of W stand side by side. Edge blocks are shifted inwards, and redo a few outputs.

    The blocks of a cluster have the same rows of x, of which each fetches a share for all.
    """
    pieces, tokens, columns = x_ref.shape
    rows = codes_ref.shape[1]
    block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
    layer = jnp.clip(layer_ref[0], 0, codes_ref.shape[0] - 1)
    row_block = block // token_blocks * tile.cluster + lax.axis_index("member")
    row = jnp.minimum(row_block * tile.rows, rows - tile.rows)
    token = jnp.minimum(lax.rem(block, token_blocks) * tile.tokens, tokens - tile.tokens)
    share = tile.rows // tile.warpgroups
    own = pl.ds(warpgroup * share, share)
    own_scales = scales_ref.at[layer, pl.ds(row + warpgroup * share, share)]

    def scales_of(step):
        groups = pl.ds(step * _STEP, _STEP)
        return plgpu.load(own_scales.at[:, groups], layout=_SCALE_LAYOUT, optimized=False)

    def step(index, words_ref, *x_refs_and_carry) -> Any:  # None is what the pipeline's own annotation asks for
        [k] = index
        *x_refs, (sums, scales) = x_refs_and_carry
        following = scales_of(jnp.minimum(k + 1, columns // STEP_COLUMNS - 1))
        words = plgpu.load(words_ref.at[own], layout=_WORD_LAYOUT)
        return _multiply_add(words, scales, x_refs, sums, tile), following

    def compute(pipeline):
        sums = plgpu.layout_cast(jnp.zeros((share, tile.tokens), jnp.float32), _SUM_LAYOUT)
        sums, _ = pipeline((sums, scales_of(0)))
        y = y_ref.at[pl.ds(token, tile.tokens), pl.ds(row + warpgroup * share, share)]
        _store(y, sums)

    pipeline = plgpu.emit_pipeline_warp_specialized(
        step,
        grid=(columns // STEP_COLUMNS,),
        memory_registers=40,
        in_specs=[
            plgpu.BlockSpec((tile.rows, _STEP * _WORDS), lambda k: (0, k), transforms=_W_TRANSFORMS),
            *[
                plgpu.BlockSpec(
                    (tile.tokens, STEP_COLUMNS),
                    lambda k: (0, k),
                    transforms=_X_TRANSFORMS,
                    collective_axes=("member",) if tile.cluster > 1 else (),
                )
            ]
            * pieces,
        ],
        wg_axis="warpgroup",
        num_compute_wgs=tile.warpgroups,
        max_concurrent_steps=tile.stages,
        compute_context=compute,
    )
    own_x = [x_ref.at[piece, pl.ds(token, tile.tokens)] for piece in range(pieces)]
    pipeline(codes_ref.at[layer, pl.ds(row, tile.rows)], *own_x)


def _store(y_ref, sums):
    on_registers = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SUM_LAYOUT))
    on_registers(_store_registers)(y_ref, sums)


def _store_registers(_, y, sums):
    """Eight lanes write 32 neighbouring bytes of one token's y."""
    sums.foreach(lambda value, index: memref.store(value, y, [index[1], index[0]]))


def _multiply_add(words, scales, x_refs, sums, tile):
    """sums[n, m] + sum over the groups g of a step of scales[n, g] · sum_p codes[n, 32g …] · x[p, m, 32g …]."""
    on_registers = plgpu.inline_mgpu(
        arg_types=(_WORD_LAYOUT, _SCALE_LAYOUT, [plgpu.RefType(_X_TRANSFORMS)] * len(x_refs), _SUM_LAYOUT),
        return_type=plgpu.ShapeDtypeStruct(sums.shape, sums.dtype, layout=_SUM_LAYOUT),
    )
    body = functools.partial(_multiply_add_registers, in_flight=tile.in_flight)
    return on_registers(body)(words, scales, x_refs, sums)


def _multiply_add_registers(_, words, scales, x, sums, *, in_flight):
    shares = words.shape[0] // _M
    words = words.registers.reshape(shares, 2, _STEP)
    scales = scales.registers.reshape(shares, 2)
    operands = _XOperands.of(x)
    # Tokens in pairs, both rows of a lane, the tokens of a pair.
    totals = elements(Lane, sums).reshape(shares, -1, 2, 2)
    pending = []

    def settle(still_in_flight):
        share, g, found = pending.pop(0)
        found = Lane.wait(still_in_flight, found)
        by_row = np.reshape(np.array(found, object), totals[share].shape)
        for half in range(2):
            scale = Lane.float(Lane.element(scales[share, half], g))
            for place in np.ndindex(totals.shape[1], 2):
                at = (place[0], half, place[1])
                totals[share][at] = Lane.times_plus(by_row[at], scale, totals[share][at])

    for g in range(_STEP):
        for share in range(shares):
            codes = [Lane.codes(word, shift) for shift in (0, 8, 4, 12) for word in words[share, :, g]]
            pending.append((share, g, Lane.multiply(codes, operands, g)))
            if len(pending) == in_flight:
                settle(in_flight - 1)
    while pending:
        settle(len(pending) - 1)
    return Lane.array([Lane.vector(pair) for pair in totals.reshape(-1, 2)], like=sums)


class _XOperands(NamedTuple):
    """Where the matrix units find x in shared memory."""

    bases: list
    """The descriptor of every piece."""
    group_stride: int
    """What a descriptor grows by from group to group …"""
    half_stride: int
    """… and from the first 16 columns of a group to the others."""
    tokens: int

    @classmethod
    def of(cls, x):
        """Of the pieces of x, each [tokens / 8, columns / 32, 8, 32], the tiles of a step."""
        token_tiles, _, tile_rows, _ = ir.MemRefType(x[0].type).shape
        tokens = token_tiles * tile_rows
        found = [
            mma_utils.create_descriptor(
                mgpu.memref_transpose(piece, (1, 0, 3, 2)),
                swizzle=_SWIZZLE,
                large_tile=(_GROUP, _GROUP),
                group_size=(_GROUP, tokens),
                logical_k_major=True,
            )
            for piece in x
        ]
        (_, strides), (_, group_stride), _ = found[0]
        bases = [base for (base, _), _, _ in found]
        return cls(bases, mma_utils.encode_addr(group_stride), mma_utils.encode_addr(strides[1][0]), tokens)


class Lane(BaseLane):
    """What one lane does with its registers, as LLVM values."""

    @staticmethod
    def codes(word, shift: int):
        """Two bfloat16, the codes in bits shift … shift + 3 and shift + 16 … of a word."""
        i32 = ir.IntegerType.get_signless(32)
        word = mgpu.utils.bitcast(word, i32)
        if shift:
            word = arith.shrui(word, Lane.integer(shift))
        # A code in offset binary, code + 8, is the last four bits of the bfloat16 that is 128 more.
        word = arith.xori(arith.andi(word, Lane.integer(0x000F000F)), Lane.integer(0x43084308))
        pair = ir.VectorType.get((2,), ir.BF16Type.get())
        offset = arith.constant(pair, ir.DenseElementsAttr.get_splat(pair, ir.FloatAttr.get(ir.BF16Type.get(), 136.0)))
        return mgpu.utils.bitcast(arith.subf(mgpu.utils.bitcast(word, pair), offset), i32)

    @staticmethod
    def multiply(codes, operands: _XOperands, g: int):
        """Sums float32 of 64 × 32 codes and all pieces of group g of x, on their way in one commit group."""
        codes = Lane.settled(codes)
        nvvm.wgmma_fence_aligned()
        sums = None
        for base in reversed(operands.bases):  # small terms first
            for half in range(2):
                offset = g * operands.group_stride + half * operands.half_stride
                descriptor = llvm.add(base, Lane.integer(offset, 64), overflow_flags=llvm.IntegerOverflowFlags.none)
                sums = Lane.wgmma(codes[4 * half : 4 * half + 4], descriptor, operands.tokens, sums)
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [], "wgmma.commit_group.sync.aligned;", "", has_side_effects=True)
        return sums

    @staticmethod
    def wgmma(a, b, n: int, sums):
        """a · b + sums, or a · b where there are none: m64nNk16, a in registers."""
        f32, count = ir.F32Type.get(), n // 2
        outputs = ",".join(f"${i}" for i in range(count))
        operands = count if sums is None else 2 * count
        a_names = ",".join(f"${operands + i}" for i in range(4))
        predicate = "0" if sums is None else "1"
        text = (
            f"{{ .reg .pred p; setp.ne.b32 p, {predicate}, 0; wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 "
            f"{{{outputs}}}, {{{a_names}}}, ${operands + 4}, p, 1, 1, 0; }}"
        )
        tied = [] if sums is None else [str(i) for i in range(count)]
        result = llvm.inline_asm(
            llvm.StructType.get_literal([f32] * count),
            [*(sums or []), *a, b],
            text,
            ",".join(["=f"] * count + tied + ["r"] * 4 + ["l"]),
            has_side_effects=True,
        )
        return [llvm.extractvalue(f32, result, [i]) for i in range(count)]

    @staticmethod
    def wait(groups: int, values):
        """Wait until no more than so many commit groups are on their way; the values are what they are only then."""
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"), [], f"wgmma.wait_group.sync.aligned {groups};", "", has_side_effects=True
        )
        return Lane.settled(values)

    @staticmethod
    def settled(values):
        """The values, which the compiler may neither compute later nor use earlier than here."""
        kind = values[0].type
        name = "f" if isinstance(kind, ir.F32Type) else "r"
        count = len(values)
        result = llvm.inline_asm(
            llvm.StructType.get_literal([kind] * count),
            list(values),
            "",
            ",".join([f"={name}"] * count + [str(i) for i in range(count)]),
            has_side_effects=True,
        )
        return [llvm.extractvalue(kind, result, [i]) for i in range(count)]

    @staticmethod
    def integer(value: int, bits: int = 32):
        """A constant."""
        kind = ir.IntegerType.get_signless(bits)
        return arith.constant(kind, ir.IntegerAttr.get(kind, value))
