"""What the tensor core kernels of both precisions have in common: tiles, products, the inverse, S in registers."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.delta_chunk.pieces import pieces

__all__ = [
    "CHUNK",
    "COLUMNS",
    "MATRIX",
    "PER_COLUMN",
    "PER_ROW",
    "TRANSPOSED",
    "Product",
    "along_columns",
    "along_rows",
    "by_chunk",
    "copyable",
    "load_state",
    "store_state",
    "terms",
    "tiled",
    "unit_lower_inverse",
]

CHUNK = 64
"""Tokens of a chunk: the rows of one warpgroup's matrix instruction."""
COLUMNS = 64
"""Columns of V of one block of `scan`: the rows of an instruction there."""

MATRIX = plgpu.Layout.WGMMA
TRANSPOSED = plgpu.Layout.WGMMA_TRANSPOSED
"""The same elements in pairs down the rows, for arrays in memory whose columns are contiguous."""
PER_ROW, PER_COLUMN = MATRIX.reduce(1), MATRIX.reduce(0)


def copyable(x):
    """x [T, …] with zeros behind, as copies of tiles want it: whole tiles of 8 tokens, and no fewer than a chunk.

    The rest of the last chunk needs no place in memory: a copy finds zeros there.
    """
    tokens = x.shape[0]
    return jnp.pad(x, [(0, max(-tokens % 8, CHUNK - tokens))] + [(0, 0)] * (x.ndim - 1))


def by_chunk(x):
    """[T, B, H] -> [n, B, H, c], zeros behind the end: such tokens write nothing and decay nothing."""
    x = jnp.pad(x, [(0, -x.shape[0] % CHUNK), (0, 0), (0, 0)])
    return jnp.moveaxis(x.reshape(-1, CHUNK, *x.shape[1:]), 1, -1)


def tiled(shape, dtype=jnp.bfloat16):
    """Shared memory in the tiles of matrix instructions, 128 bytes wide."""
    width = 128 // jnp.dtype(dtype).itemsize
    # pyright takes both for abstract: their base class declares a method that Mosaic's transforms do not have.
    tiling = plgpu.TilingTransform((8, width))  # pyright: ignore[reportAbstractUsage]
    swizzle = plgpu.SwizzleTransform(128)  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzle))


def load_state(ref):
    """Sᵀ in registers from S [K, columns] in memory."""
    return plgpu.layout_cast(plgpu.load(ref.T, layout=TRANSPOSED, optimized=False), MATRIX)


def store_state(ref, s):
    """The reverse."""
    ref.T[...] = plgpu.layout_cast(s, TRANSPOSED)


def unit_lower_inverse(system, i, j, left_s, right_s, *, scale):
    """(1 + system)⁻¹ for a strictly lower system, from the inverses of diagonal blocks that double in width.

    [[P, 0], [M, Q]]⁻¹ = [[P⁻¹, 0], [-Q⁻¹ M P⁻¹, Q⁻¹]], for all pairs of blocks at once. Entries are at most 1 for keys
    of length 1 and beta ≤ 1, so that float16 serves the products: in as many pieces as left_s and right_s [P, c, c]
    have, of values times `scale`, a power of two. One piece loses less than one of bfloat16 would.
    """
    zero = jnp.zeros_like(system)

    def cut(x):
        return pieces(x * scale, left_s.shape[0], jnp.float16)

    def right(memory):
        return [memory.at[n] for n in range(memory.shape[0])]

    def put(memory, found):
        for n, piece in enumerate(found):
            memory[n] = piece
        plgpu.commit_smem()

    inverse = jnp.where(i == j, zero + 1.0, jnp.where((i ^ j) == 1, -system, zero))
    system = cut(system)

    def double(bit, inverse):
        factor = cut(inverse)
        put(left_s, factor)
        i_block, j_block = i >> bit, j >> bit
        i_odd = jnp.where((i_block & 1) == 1, i_block, -1)
        corners = Product.of_pieces(system, right(left_s)) * scale**-2
        put(right_s, cut(jnp.where(i_odd == j_block + 1, corners, zero)))
        return inverse - Product.of_pieces(factor, right(right_s)) * scale**-2

    return lax.fori_loop(1, 6, double, inverse)


class Product:
    """Matrix products of a warpgroup, waited for: of arrays or shared memory with shared memory, in float32."""

    @staticmethod
    def of(a, b):
        """a b."""
        return Product.of_pieces([a], [b])

    @staticmethod
    def of_pieces(a, b, meanwhile=lambda: None):
        """The product of two matrices given in pieces; `meanwhile` runs while it is computed."""

        def multiply(sums):
            Product._add(sums, a, b)
            meanwhile()
            return sums[...]

        return pl.run_scoped(multiply, Product._sums(a[0], b[0]))

    @staticmethod
    def overlapped(first, second, between):
        """between(the product of `first`), and the product of second(): both of one shape, of matrices in pieces.

        second() runs while the first is computed, `between` while the second is.
        """

        def both(sums):
            def early(sums_of_first):
                Product._add(sums_of_first, *first)
                behind = Product._add(sums, *second())
                return plgpu.wgmma_accumulator_load(sums_of_first, wait_n=behind)

            found = between(pl.run_scoped(early, shape))
            return found, sums[...]

        shape = Product._sums(first[0][0], first[1][0])
        return pl.run_scoped(both, shape)

    @staticmethod
    def added(start, a, b, meanwhile=lambda: None) -> Any:
        """start + a b; `meanwhile` runs while it is computed."""

        def multiply(sums):
            plgpu.wgmma(sums, a, b)
            meanwhile()

        return pl.run_state(multiply)(plgpu.WGMMAAccumulatorRef.init(start))

    @staticmethod
    def chained(first, beside, last, meanwhile):
        """The product of `beside` plus that of last(the product of `first`), which needs not wait for `beside`.

        `meanwhile` runs while the first two are computed.
        """

        def both(sums):
            def early(sums_of_first):
                plgpu.wgmma(sums_of_first, *first)
                plgpu.wgmma(sums, *beside)
                meanwhile()
                return plgpu.wgmma_accumulator_load(sums_of_first, wait_n=1)

            plgpu.wgmma(sums, *last(pl.run_scoped(early, Product._sums(*first))))
            return sums[...]

        return pl.run_scoped(both, Product._sums(*beside))

    @staticmethod
    def _sums(a, b):
        return plgpu.WGMMAAccumulatorRef((a.shape[0], b.shape[1]), jnp.float32)

    @staticmethod
    def _add(sums, a, b):
        """Set out on sums + a b, in so many groups of instructions."""
        pairs = terms(a, b)
        for pair in pairs:
            plgpu.wgmma(sums, *pair)
        return len(pairs)


def terms(a, b):
    """The pairs whose products make up that of two matrices in pieces, the least first: tensor cores cut off sums.

    Of n pieces, the largest first, each is 2⁻⁸ of the one before or less: products below the last piece's are left out.
    """
    most = max(len(a), len(b))
    pairs = [(m, n) for m in range(len(a)) for n in range(len(b)) if m + n < most]
    return [(a[m], b[n]) for m, n in sorted(pairs, key=sum, reverse=True)]


def along_rows(x):
    """One value per column, in every row."""
    return lax.broadcast_in_dim(x, (CHUNK, x.shape[0]), (1,))


def along_columns(x, columns=CHUNK):
    """One value per row, in every column."""
    return lax.broadcast_in_dim(x, (x.shape[0], columns), (0,))
