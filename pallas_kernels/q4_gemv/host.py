"""The host function: what the kernel takes, the checks, and the launch."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.device import device_kind, gpu_objection, tensor_core_objection
from pallas_kernels.operands import ANYWHERE
from pallas_kernels.q4_gemv.kernel import gemv_body
from pallas_kernels.q4_gemv.mosaic import launch_mosaic, mosaic_unsupported
from pallas_kernels.q4_gemv.tuning import MosaicTile, Tile, choose_mosaic_tile, choose_tile

__all__ = [
    "GROUP",
    "MAX_BATCH",
    "MAX_MATRICES",
    "choose_backend",
    "digit_words",
    "grouped_codes",
    "q4_gemv",
    "supported",
]

GROUP = 32
MAX_BATCH = 8
"""Rows of x: each keeps its own partial sums in registers."""
MAX_MATRICES = 4
"""Matrices of one launch: each has its own copy of the code."""
MAX_LIMBS = 3
_MAX_SIZE = 2**31 - 2**16
"""Rows, columns and programs are counted in int32, with room for the last block."""

type Matrix = tuple[jax.Array, jax.Array]


def q4_gemv(
    matrices: Sequence[Matrix],
    digits: jax.Array,
    x_scales: jax.Array,
    layer: jax.Array,
    *,
    backend: str | None = None,
    tile: Tile | MosaicTile | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """y_m[b, n] = sum_g (D[b, n, g] · x_scales[b, g]) · scales_m[layer, n, g], D = d_1 + d_2 / 256 + d_3 / 65536.

    d_l[b, n, g] = sum_{j < 32} code_m[layer, n, 32g + j] · digits[l, b, 32g + j] is exact in int32, and D is rounded
    once ("mosaic" at batch 1, 2 and 4 sums the limbs apart instead). Terms are added in float32 in an order that
    depends on backend, `tile`, I and whether the batch is 1, 2 or 4: the same bits at every call, and a row of the
    batch does not depend on what the others hold. One launch serves all the matrices.

    Args:
        matrices: one to four pairs. codes uint32 [L, N_m, I/8]: bits 4(2b + h) … 4(2b + h) + 3 of word 4g + a are the
            code, in two's complement, of column 32g + 16h + 4a + b. scales float16 [L, N_m, I/32].
        digits: limbs of the activations, leading one first, int8 [limbs, B, I]; 1 to 3 limbs, 1 to 8 rows.
        x_scales: their scales, float32 [B, I/32]: x = scale · (l_1 + l_2 / 256 + l_3 / 65536). One that is NaN makes
            its row of every y NaN.
        layer: int32 [1], read by the kernel: the stacks are neither sliced nor copied. One below 0 or beyond L - 1
            is taken as 0 or L - 1.
        backend: "triton" (dot products on integer units) or "mosaic" (tensor cores of sm_90); chosen unless given.
        tile: how to cut the work; chosen by device and shape unless given.
        interpret: run the same body as plain XLA on any backend. Slow, for tests.

    Returns:
        y_m float32 [B, N_m] of each matrix.

    Raises:
        ValueError: shapes that contradict one another, or a tile that is not one.
        NotImplementedError: shapes, dtypes or a device that the kernel does not take; `supported` says so beforehand.
    """
    matrices = _pairs(matrices)
    shapes = _check_shapes(matrices, digits, x_scales, layer)
    _check_dtypes(matrices, digits, x_scales, layer)
    limbs, batch, columns = digits.shape
    if backend is None:
        backend = choose_backend(shapes, batch, interpret=interpret)
    if reason := supported(shapes, batch, limbs, backend=backend, interpret=interpret):
        raise NotImplementedError(f"q4_gemv: {reason}")
    rows = sum(shape[1] for shape in shapes)
    if backend == "mosaic":
        tile = choose_mosaic_tile(device_kind(), rows, columns, batch, limbs).tile if tile is None else tile
        _check_kind(tile, MosaicTile, backend)
        return launch_mosaic(matrices, digits, x_scales, layer, tile=tile)
    tile = choose_tile(device_kind(), rows, columns, batch, limbs).tile if tile is None else tile
    _check_kind(tile, Tile, backend)
    _check_powers(tile)
    return _launch(matrices, digits, x_scales, layer, tile=tile, interpret=interpret)


def choose_backend(shapes: Sequence[tuple[int, int, int]], batch: int, *, interpret: bool = False) -> str:
    """The faster form where both can: tensor cores from two rows on, since their products cost the same for eight."""
    if batch > 1 and not interpret and not (mosaic_unsupported(shapes) or tensor_core_objection()):
        return "mosaic"
    return "triton"


def supported(
    shapes: Sequence[tuple[int, int, int]],
    batch: int,
    limbs: int,
    *,
    backend: str | None = None,
    interpret: bool = False,
) -> str | None:
    """None where `q4_gemv` takes matrices of these shapes [L, N, I], this batch and these limbs; else why not."""
    if backend not in (None, "triton", "mosaic"):
        return f"the backend must be triton or mosaic, got {backend!r}"
    if not 1 <= len(shapes) <= MAX_MATRICES:
        return f"one launch takes 1 to {MAX_MATRICES} matrices, got {len(shapes)}; launch the others separately"
    if not 1 <= batch <= MAX_BATCH:
        return f"the batch must have 1 to {MAX_BATCH} rows, got {batch}; split it, or use a matrix product"
    if not 1 <= limbs <= MAX_LIMBS:
        return f"activations must have 1 to {MAX_LIMBS} limbs, got {limbs}"
    for layers, rows, columns in shapes:
        if min(layers, rows, columns) < 1:
            return f"L, N and I must be at least 1, got a matrix of shape {(layers, rows, columns)}"
        if columns % GROUP:
            return f"I must be a multiple of {GROUP}, got a matrix of shape {(layers, rows, columns)}"
    if max(shapes[0][2], sum(rows for _, rows, _ in shapes)) > _MAX_SIZE:
        return f"I and the rows of one launch must not exceed {_MAX_SIZE}, got matrices of shapes {list(shapes)}"
    if backend == "mosaic":
        if interpret:
            return "the tensor core form cannot be interpreted; use backend='triton'"
        return tensor_core_objection() or mosaic_unsupported(shapes)
    return None if interpret else gpu_objection()


def _pairs(matrices) -> tuple[Matrix, ...]:
    matrices = tuple(matrices)
    for matrix in matrices:
        if not isinstance(matrix, tuple | list) or len(matrix) != 2:
            raise ValueError(f"matrices must be pairs (codes, scales), got a {type(matrix).__name__} among them")
    return tuple((codes, scales) for codes, scales in matrices)


def _check_shapes(matrices, digits, x_scales, layer) -> list[tuple[int, int, int]]:
    """[L, N, I] of each matrix, all operands agreeing on L, I and B."""
    if digits.ndim != 3:
        raise ValueError(f"digits must be [limbs, B, I], got shape {digits.shape}")
    _, batch, columns = digits.shape
    _expect("x_scales", x_scales, "B, I/32", (batch, columns // GROUP))
    _expect("layer", layer, "1", (1,))
    shapes = []
    for m, (codes, scales) in enumerate(matrices):
        if codes.ndim != 3:
            raise ValueError(f"codes of matrix {m} must be [L, N, I/8], got shape {codes.shape}")
        layers, rows = codes.shape[:2]
        if shapes and layers != shapes[0][0]:
            raise ValueError(f"all matrices must have the same L, got {shapes[0][0]} and {layers} (matrix {m})")
        _expect(f"codes of matrix {m}", codes, "L, N, I/8", (layers, rows, columns // 8))
        _expect(f"scales of matrix {m}", scales, "L, N, I/32", (layers, rows, columns // GROUP))
        shapes.append((layers, rows, columns))
    return shapes


def _expect(name, array, axes, shape):
    if array.shape != shape:
        raise ValueError(f"{name} must be [{axes}] = {shape} to fit the other operands, got {array.shape}")


def _check_dtypes(matrices, digits, x_scales, layer):
    operands = [("digits", digits, jnp.int8), ("x_scales", x_scales, jnp.float32), ("layer", layer, jnp.int32)]
    for m, (codes, scales) in enumerate(matrices):
        operands += [(f"codes of matrix {m}", codes, jnp.uint32), (f"scales of matrix {m}", scales, jnp.float16)]
    for name, array, dtype in operands:
        if array.dtype != dtype:
            raise NotImplementedError(f"q4_gemv: {name} must be {jnp.dtype(dtype).name}, got {array.dtype}")


def _check_kind(tile: Any, kind: type, backend: str):
    if not isinstance(tile, kind):
        raise ValueError(f"backend {backend!r} takes a {kind.__name__}, got {tile!r}")


def _check_powers(tile: Any):
    for name, size in zip(Tile._fields, tile, strict=True):
        if size < 1 or size & (size - 1):
            raise ValueError(f"{name} of a tile must be a power of two, got {size} in {tile}")


# Compiled here, since outside of a jit the body would be traced and compiled again at every call.
@functools.partial(jax.jit, static_argnames=("tile", "interpret"))
def _launch(matrices, digits, x_scales, layer, *, tile: Tile, interpret: bool):
    batch = digits.shape[1]
    operands = [array for matrix in matrices for array in grouped_codes(matrix)]
    rows = [codes.shape[1] for codes, _ in matrices]
    return pl.pallas_call(
        functools.partial(gemv_body, tile=tile, interpret=interpret),
        out_shape=tuple(jax.ShapeDtypeStruct((batch, n), jnp.float32) for n in rows),
        grid=(sum(pl.cdiv(n, tile.rows) for n in rows),),
        in_specs=[ANYWHERE] * (3 + len(operands)),
        out_specs=(ANYWHERE,) * len(rows),
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=1),
        interpret=interpret,
        name="q4_gemv",
    )(layer, digit_words(digits), x_scales, *operands)


def digit_words(digits: jax.Array) -> jax.Array:
    """Limbs int8 [limbs, B, I] as the body reads them: int32 [limbs, B, I/32, 8], the same bytes."""
    limbs, batch, columns = digits.shape
    return lax.bitcast_convert_type(digits.reshape(limbs, batch, columns // GROUP, 8, 4), jnp.int32)


def grouped_codes(matrix: Matrix) -> Matrix:
    """Codes uint32 [L, N, I/8] with an axis for the groups, [L, N, I/32, 4], and the scales: the same bytes."""
    codes, scales = matrix
    return codes.reshape(*codes.shape[:2], -1, 4), scales
