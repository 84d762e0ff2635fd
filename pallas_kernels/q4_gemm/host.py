"""The host function: what the kernel takes, the checks, the pieces of x, and the launches."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.device import device_kind, tensor_core_objection
from pallas_kernels.operands import check_operand
from pallas_kernels.q4_gemm.mosaic import COLUMN_ORDER, STEP_COLUMNS, launch
from pallas_kernels.q4_gemm.tuning import Tile, choose_tile

__all__ = ["MAX_PIECES", "Matrix", "check_tile", "q4_gemm", "split_pieces", "supported"]

MAX_PIECES = 3
"""Three bfloat16 hold the 24 significant bits of a float32."""
_LEAST_ROWS = 64
_GROUP = 32
_MAX_SIZE = 2**31 - 2**16
"""Rows, tokens and blocks are counted in int32, with room for the last block."""

type Matrix = tuple[jax.Array, jax.Array]


def q4_gemm(
    matrices: Sequence[Matrix], x: jax.Array, layer: jax.Array, *, pieces: int, tile: Tile | None = None
) -> tuple[jax.Array, ...]:
    """y_m[t, n] = sum_g scales_m[layer, n, g] · sum_{j < 32} code_m[layer, n, 32g + j] · x'[t, 32g + j].

    x' is x in `pieces` bfloat16 numbers: one rounds it to 8 significant bits, three keep all 24. Codes are exact. The
    inner sums are those of the tensor cores in float32, which keep a little less than a float32's last bit; terms of
    the outer sum are added in float32, groups in ascending order. A row of y depends on nothing but its row of x, and
    its bits on `pieces` alone. No matrix is written out dequantised: codes become bfloat16 in registers.

    Args:
        matrices: pairs of codes uint32 [L, N_m, I/8] and scales float16 [L, N_m, I/32], laid out as for `q4_gemv`.
        x: float32 [M, I]. Values that are not finite make those y that they meet not finite.
        layer: int32 [1], read by the kernel; one below 0 or beyond L - 1 is taken as 0 or L - 1.
        pieces: 1, 2 or 3.
        tile: how to cut the work; chosen by device and shape unless given.

    Returns:
        y_m float32 [M, N_m] of each matrix.

    Raises:
        ValueError: shapes that contradict one another, or a tile that is not one. NotImplementedError: shapes, dtypes
        or a device that the kernel does not take; `supported` says so beforehand.
    """
    if x.ndim != 2:
        raise ValueError(f"x must be [M, I], got shape {x.shape}")
    tokens, columns = x.shape
    check_operand("x", x, (tokens, columns))
    check_operand("layer", layer, (1,), jnp.int32)
    for m, (codes, scales) in enumerate(matrices):
        if codes.ndim != 3:
            raise ValueError(f"codes of matrix {m} must be [L, N, I/8], got shape {codes.shape}")
        layers, rows = codes.shape[:2]
        check_operand(f"codes of matrix {m}", codes, (layers, rows, columns // 8), jnp.uint32)
        check_operand(f"scales of matrix {m}", scales, (layers, rows, columns // _GROUP), jnp.float16)
    if reason := supported([(codes.shape[0], codes.shape[1], columns) for codes, _ in matrices], tokens, pieces):
        raise NotImplementedError(f"q4_gemm: {reason}")
    tiles = [tile or choose_tile(device_kind(), codes.shape[1], tokens, pieces).tile for codes, _ in matrices]
    for cut, (codes, _) in zip(tiles, matrices, strict=True):
        check_tile(cut, codes.shape[1])
    padded = max(max(cut.tokens for cut in tiles), math.ceil(tokens / 8) * 8)
    split = split_pieces(jnp.pad(x, ((0, padded - tokens), (0, 0))), pieces)
    return tuple(
        launch(codes, scales, split, layer, tile=cut)[:tokens]
        for (codes, scales), cut in zip(matrices, tiles, strict=True)
    )


def supported(shapes: Sequence[tuple[int, int, int]], tokens: int, pieces: int) -> str | None:
    """None where `q4_gemm` takes matrices of these shapes [L, N, I] and so many rows of x; else why not."""
    if not 1 <= pieces <= MAX_PIECES:
        return f"x must be in 1 to {MAX_PIECES} pieces, got {pieces}"
    if not shapes:
        return "there must be at least one matrix, got none"
    if tokens < 1:
        return f"x must have at least one row, got {tokens}"
    for layers, rows, columns in shapes:
        if layers < 1 or rows < _LEAST_ROWS or rows % 8 or columns < 1 or columns % STEP_COLUMNS:
            return (
                f"matrices must be [L, N, I] with N a multiple of 8 from {_LEAST_ROWS} on and I a multiple of "
                f"{STEP_COLUMNS}, got one of shape {(layers, rows, columns)}"
            )
        if max(rows, tokens, columns) > _MAX_SIZE:
            return f"N, M and I must not exceed {_MAX_SIZE}, got {rows}, {tokens} and {columns}"
    return tensor_core_objection()


def check_tile(tile: Tile, rows: int) -> None:
    """Refuse a cut that is none, or larger than a matrix of so many rows.

    Raises:
        ValueError: saying what is wrong.
    """
    shares = tile.warpgroups > 0 and tile.rows in (64 * tile.warpgroups, 128 * tile.warpgroups)
    for good, wanted in (
        (shares, "rows that are 64 or 128 for each compute warpgroup"),
        (tile.rows <= rows, f"no more than the {rows} rows of the matrix"),
        (tile.tokens in range(8, 257, 8), "a multiple of 8 tokens, 256 at most"),
        (tile.stages > 0, "at least one stage"),
        (tile.in_flight in (1, 2), "1 or 2 sums in flight"),
        (tile.cluster in (1, 2, 4), "1, 2 or 4 blocks in a cluster"),
        (tile.tokens % (8 * tile.cluster) == 0, "a multiple of 8 tokens for each block of a cluster"),
    ):
        if not good:
            raise ValueError(f"a tile must have {wanted}, got {tile}")


def split_pieces(x: jax.Array, pieces: int) -> jax.Array:
    """x float32 [M, I] as the kernel reads it: bfloat16 [pieces, M, I] that add up to x, columns in `COLUMN_ORDER`."""
    found = []
    for _ in range(pieces):
        # Without the barrier XLA may take a conversion to bfloat16 and back for nothing.
        found.append(lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7).astype(jnp.bfloat16))
        x = x - found[-1].astype(jnp.float32)
    split = jnp.stack(found)
    return split.reshape(*split.shape[:-1], -1, COLUMN_ORDER.size)[..., COLUMN_ORDER].reshape(split.shape)
