"""The chunked gated delta rule on the tensor cores of sm_90 (Pallas on Mosaic GPU): two kernels, bfloat16 products.

With d(i, j) the decay from token j to token i of a chunk of c = 64 tokens, and d(i) that from the chunk's beginning, a
chunk that finds S computes

    u = T (v - d(i) · k S)        T = (1 + tril(beta_i · d(i, j) · k_i · k_j, -1))⁻¹ diag(beta)
    o = d(i) · q S + A u          A = tril(d(i, j) · q_i · k_j)
    S' = d(c) · S + kᵀ (d(c, i) · u)

`prepare` makes T, A and the decays of every chunk, all independent: one block each. `scan` takes S from chunk to chunk,
one block for 64 of the V columns of a head. Its chain of dependent products never leaves the registers of one
warpgroup: with everything transposed, Sᵀ and uᵀ come out of one product laid as the left operand of the next,

    Sᵀ kᵀ  →  uᵀ = vᵀ Tᵀ - (d(i) · Sᵀ kᵀ) Tᵀ  →  S'ᵀ = d(c) · Sᵀ + (d(c, i) · uᵀ) k.

A second warpgroup makes o from copies of S and u in shared memory, and a third fetches the chunks to come.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

__all__ = ["MosaicTile", "launch_mosaic", "mosaic_unsupported"]

_CHUNK = 64
"""Tokens of a chunk: the rows of one warpgroup's matrix instruction."""
_COLUMNS = 64
"""Columns of V of one block of `scan`: the rows of an instruction there."""
_KEY_DIMS = (64, 128)
"""With more, S does not fit into a warpgroup's registers."""
_LEAST_LOG_DECAY = -104.0
"""exp of it is 0 in float32. Sums over a chunk then stay below 6656, and their differences within 5e-4."""
_PRODUCER_REGISTERS, _STATE_REGISTERS, _OUTPUT_REGISTERS = 40, 240, 208
"""Of a thread of each warpgroup of `scan`."""

_MATRIX = plgpu.Layout.WGMMA
# The same elements in pairs down the rows, for arrays in memory whose columns are contiguous.
_TRANSPOSED = plgpu.Layout.WGMMA_TRANSPOSED
_PER_ROW, _PER_COLUMN = _MATRIX.reduce(1), _MATRIX.reduce(0)


class MosaicTile(NamedTuple):
    """How `scan` runs; the bits of its results do not depend on it."""

    stages: int = 3
    """Chunks in shared memory at a time."""


def mosaic_unsupported(
    batch: int, tokens: int, key_heads: int, value_heads: int, key_dim: int, value_dim: int, precision: str
) -> str | None:
    """Why this form does not take operands of these sizes at this precision, or None."""
    del batch, tokens, key_heads, value_heads
    if precision != "bf16":
        return f"the tensor core form has precision 'bf16' only, got {precision!r}"
    if key_dim not in _KEY_DIMS or value_dim % _COLUMNS or not value_dim:
        needs = f"K of {' or '.join(map(str, _KEY_DIMS))} and V a multiple of {_COLUMNS}"
        return f"the tensor core form needs {needs}, got K = {key_dim}, V = {value_dim}"
    return None


@functools.partial(jax.jit, static_argnames=("tile",))
def launch_mosaic(s, q, k, v, beta, g, *, tile: MosaicTile):
    """As `delta_chunk`, for operands that it has checked and of which `mosaic_unsupported` says nothing.

    Products are of bfloat16 values, summed in float32; S is float32 throughout. Returns o in v's dtype, and S.

    Raises:
        ValueError: `tile` is not one.
    """
    if not 1 <= tile.stages <= 3:
        raise ValueError(f"stages must be 1, 2 or 3, got {tile}")
    tokens = v.shape[0]
    q, k, v16 = (_copyable(x.astype(jnp.bfloat16)) for x in (q, k, v))
    solve, scores, decays = prepare(q, k, _by_chunk(beta), _by_chunk(g))
    o, s = scan(s, q, k, v16, solve, scores, decays, out_dtype=v.dtype, tile=tile)
    return o[:tokens], s


def _copyable(x):
    """x [T, …] with zeros behind, as copies of tiles want it: whole tiles of 8 tokens, and no fewer than a chunk.

    The rest of the last chunk needs no place in memory: a copy finds zeros there.
    """
    tokens = x.shape[0]
    return jnp.pad(x, [(0, max(-tokens % 8, _CHUNK - tokens))] + [(0, 0)] * (x.ndim - 1))


def _by_chunk(x):
    """[T, B, H] -> [n, B, H, c], zeros behind the end: such tokens write nothing and decay nothing."""
    x = jnp.pad(x, [(0, -x.shape[0] % _CHUNK), (0, 0), (0, 0)])
    return jnp.moveaxis(x.reshape(-1, _CHUNK, *x.shape[1:]), 1, -1)


def prepare(q, k, beta, g):
    """T and A [n, B, H, c, c] in bfloat16, and d(i) and d(c, i) [n, B, H, 2, c]; beta and g are [n, B, H, c]."""
    chunks, batch, heads, _ = g.shape
    key_dim = k.shape[3]
    lead = (chunks, batch, heads)
    square = (_CHUNK, _CHUNK)
    return plgpu.kernel(
        _prepare,
        out_type=[
            jax.ShapeDtypeStruct((*lead, *square), jnp.bfloat16),
            jax.ShapeDtypeStruct((*lead, *square), jnp.bfloat16),
            jax.ShapeDtypeStruct((*lead, 2, _CHUNK), jnp.float32),
        ],
        grid=lead,
        grid_names=("chunk", "row", "head"),
        scratch_types=[
            _tiled((_CHUNK, key_dim)),
            _tiled((_CHUNK, key_dim)),
            _tiled(square, jnp.float16),
            _tiled(square, jnp.float16),
            _tiled((2, *square)),
            plgpu.SMEM((_CHUNK,), jnp.float32),
            plgpu.Barrier(num_arrivals=2),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        kernel_name="delta_chunk_prepare",
    )(q, k, beta, g)


def _tiled(shape, dtype=jnp.bfloat16):
    """Shared memory in the tiles of matrix instructions, 128 bytes wide."""
    width = 128 // jnp.dtype(dtype).itemsize
    # pyright takes both for abstract: their base class declares a method that Mosaic's transforms do not have.
    tiling = plgpu.TilingTransform((8, width))  # pyright: ignore[reportAbstractUsage]
    swizzle = plgpu.SwizzleTransform(128)  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzle))


def _prepare(
    q_ref, k_ref, beta_ref, g_ref, solve_ref, scores_ref, decays_ref, q_s, k_s, left_s, right_s, out_s, sums_s, arrived
):
    chunk, row, head = (lax.axis_index(name) for name in ("chunk", "row", "head"))
    key_head = head // (g_ref.shape[2] // k_ref.shape[2])
    tokens = pl.ds(chunk * _CHUNK, _CHUNK)
    for source, target in ((q_ref, q_s), (k_ref, k_s)):
        plgpu.copy_gmem_to_smem(source.at[tokens, row, key_head], target, arrived)
    here = (chunk, row, head)

    i, j = (plgpu.broadcasted_iota(jnp.int32, (_CHUNK, _CHUNK), axis, layout=_MATRIX) for axis in (0, 1))
    zero = jnp.zeros_like(i, jnp.float32)
    g = jnp.maximum(plgpu.load(g_ref.at[here], layout=_PER_COLUMN, optimized=False), _LEAST_LOG_DECAY)
    sums = jnp.sum(jnp.where(j <= i, _along_rows(g), zero), axis=1)
    sums_s[...] = sums
    plgpu.commit_smem()
    total = sums_s[_CHUNK - 1]
    decays_ref.at[here][0] = jnp.exp(sums)
    decays_ref.at[here][1] = jnp.exp(total - sums)
    decay = jnp.exp(_along_columns(sums) - _along_rows(plgpu.load(sums_s, layout=_PER_COLUMN)))
    decay = jnp.where(j <= i, decay, zero)

    plgpu.barrier_wait(arrived)
    out_s[1] = (decay * Product.of(q_s, k_s.T)).astype(jnp.bfloat16)
    beta_rows = plgpu.load(beta_ref.at[here], layout=_PER_ROW, optimized=False)
    system = jnp.where(j < i, _along_columns(beta_rows) * decay * Product.of(k_s, k_s.T), zero)
    inverse = _unit_lower_inverse(system, i, j, left_s, right_s)
    beta_columns = plgpu.load(beta_ref.at[here], layout=_PER_COLUMN, optimized=False)
    out_s[0] = (inverse * _along_rows(beta_columns)).astype(jnp.bfloat16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(out_s.at[0], solve_ref.at[here])
    plgpu.copy_smem_to_gmem(out_s.at[1], scores_ref.at[here])
    plgpu.wait_smem_to_gmem(0)


def _unit_lower_inverse(system, i, j, left_s, right_s):
    """(1 + system)⁻¹ for a strictly lower system, from the inverses of diagonal blocks that double in width.

    [[P, 0], [M, Q]]⁻¹ = [[P⁻¹, 0], [-Q⁻¹ M P⁻¹, Q⁻¹]], for all pairs of blocks at once. Entries are at most 1 for keys
    of length 1 and beta ≤ 1, so that float16 serves the products and loses less than bfloat16 would.
    """
    zero = jnp.zeros_like(system)
    inverse = jnp.where(i == j, zero + 1.0, jnp.where((i ^ j) == 1, -system, zero))
    system = system.astype(jnp.float16)

    def double(bit, inverse):
        half = inverse.astype(jnp.float16)
        left_s[...] = half
        plgpu.commit_smem()
        i_block, j_block = i >> bit, j >> bit
        i_odd = jnp.where((i_block & 1) == 1, i_block, -1)
        right_s[...] = jnp.where(i_odd == j_block + 1, Product.of(system, left_s), zero).astype(jnp.float16)
        plgpu.commit_smem()
        return inverse - Product.of(half, right_s)

    return lax.fori_loop(1, 6, double, inverse)


def scan(s, q, k, v, solve, scores, decays, *, out_dtype, tile: MosaicTile):
    """o [T, B, H, V] and S after the last chunk, from S [B, H, K, V] and what `prepare` made of the chunks."""
    tokens, batch, heads, value_dim = v.shape
    key_dim = k.shape[3]
    width = _COLUMNS
    state_t = (width, key_dim)

    def ring(shape):
        return _tiled((tile.stages, *shape))

    return plgpu.kernel(
        functools.partial(_scan, stages=tile.stages),
        out_type=[
            jax.ShapeDtypeStruct((tokens, batch, heads, value_dim), out_dtype),
            jax.ShapeDtypeStruct(s.shape, s.dtype),
        ],
        grid=(batch, heads, value_dim // width),
        grid_names=("row", "head", "columns"),
        num_threads=3,
        thread_name="role",
        scratch_types=[
            _Chunks(
                q=ring((_CHUNK, key_dim)),
                k=ring((_CHUNK, key_dim)),
                v=ring((_CHUNK, width)),
                solve=ring((_CHUNK, _CHUNK)),
                scores=ring((_CHUNK, _CHUNK)),
                decays=plgpu.SMEM((tile.stages, 2, _CHUNK), jnp.float32),
                arrived=plgpu.Barrier(num_arrivals=6, num_barriers=tile.stages),
                consumed=plgpu.Barrier(num_arrivals=2, num_barriers=tile.stages),
            ),
            _Handover(
                s=_tiled(state_t),
                u=_tiled((width, _CHUNK)),
                s_made=plgpu.Barrier(),
                u_made=plgpu.Barrier(),
                s_read=plgpu.Barrier(),
                u_read=plgpu.Barrier(),
            ),
            _tiled((_CHUNK, width), out_dtype),
        ],
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        kernel_name="delta_chunk_scan",
    )(s, q, k, v, solve, scores, decays)


class _Chunks(NamedTuple):
    """A ring of chunks in shared memory, and its barriers."""

    q: Any
    k: Any
    v: Any
    solve: Any
    scores: Any
    decays: Any
    arrived: Any
    consumed: Any


class _Handover(NamedTuple):
    """Sᵀ and uᵀ in bfloat16, from the warpgroup that makes them to the one that makes o; and barriers."""

    s: Any
    u: Any
    s_made: Any
    u_made: Any
    s_read: Any
    u_read: Any


def _scan(
    s_ref, q_ref, k_ref, v_ref, solve_ref, scores_ref, decays_ref, o_ref, end_ref, ring, handover, o_s, *, stages
):
    row, head, part = (lax.axis_index(name) for name in ("row", "head", "columns"))
    columns = pl.ds(part * _COLUMNS, _COLUMNS)
    chunks = solve_ref.shape[0]
    role = lax.axis_index("role")

    @pl.when(role == 0)
    def state():
        plgpu.set_max_registers(_STATE_REGISTERS, action="increase")
        start = plgpu.load(s_ref.at[row, head, :, columns].T, layout=_TRANSPOSED, optimized=False)
        start = plgpu.layout_cast(start, _MATRIX)
        end = lax.fori_loop(0, chunks, functools.partial(_next_state, ring, handover, stages, chunks), start)
        end_ref.at[row, head, :, columns].T[...] = plgpu.layout_cast(end, _TRANSPOSED)

    @pl.when(role == 1)
    def output():
        plgpu.set_max_registers(_OUTPUT_REGISTERS, action="increase")

        @pl.loop(0, chunks)
        def per_chunk(n):
            tokens = pl.ds(n * _CHUNK, _CHUNK)
            _output(ring, handover, stages, chunks, n, o_s, o_ref.at[tokens, row, head, columns])

        plgpu.wait_smem_to_gmem(0)

    @pl.when(role == 2)
    def fetch():
        plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
        key_head = head // (v_ref.shape[2] // k_ref.shape[2])

        @pl.loop(0, chunks)
        def per_chunk(n):
            slot = lax.rem(n, stages)
            pl.when(n >= stages)(lambda: plgpu.barrier_wait(ring.consumed.at[slot]))
            tokens = pl.ds(n * _CHUNK, _CHUNK)
            for source, target in (
                (k_ref.at[tokens, row, key_head], ring.k),
                (v_ref.at[tokens, row, head, columns], ring.v),
                (solve_ref.at[n, row, head], ring.solve),
                (decays_ref.at[n, row, head], ring.decays),
                (q_ref.at[tokens, row, key_head], ring.q),
                (scores_ref.at[n, row, head], ring.scores),
            ):
                plgpu.copy_gmem_to_smem(source, target.at[slot], ring.arrived.at[slot])


def _next_state(ring, handover, stages, chunks, n, s):
    """Sᵀ after chunk n, in registers as before it."""
    slot = lax.rem(n, stages)
    half = s.astype(jnp.bfloat16)

    def hand_over(array, memory, made, read):
        pl.when(n > 0)(lambda: plgpu.barrier_wait(read))
        memory[...] = array
        plgpu.commit_smem()
        plgpu.barrier_arrive(made)

    plgpu.barrier_wait(ring.arrived.at[slot])
    decay_in = plgpu.load(ring.decays.at[slot, 0], layout=_PER_COLUMN)
    decay_out = plgpu.load(ring.decays.at[slot, 1], layout=_PER_COLUMN)
    decay_through = ring.decays[slot, 0, _CHUNK - 1]

    u = Product.chained(
        (half, ring.k.at[slot].T),
        (ring.v.at[slot].T, ring.solve.at[slot].T),
        lambda read: ((-_along_rows(decay_in) * read).astype(jnp.bfloat16), ring.solve.at[slot].T),
        lambda: hand_over(half, handover.s, handover.s_made, handover.s_read),
    )
    kept = (u * _along_rows(decay_out)).astype(jnp.bfloat16)
    s = Product.added(
        s * decay_through,
        kept,
        ring.k.at[slot],
        lambda: hand_over(u.astype(jnp.bfloat16), handover.u, handover.u_made, handover.u_read),
    )
    plgpu.barrier_arrive(ring.consumed.at[slot], predicate=n + stages < chunks)
    return s


def _output(ring, handover, stages, chunks, n, o_s, o_ref):
    slot = lax.rem(n, stages)
    plgpu.barrier_wait(ring.arrived.at[slot])
    plgpu.barrier_wait(handover.s_made)
    before = Product.of(ring.q.at[slot], handover.s.T)
    plgpu.barrier_arrive(handover.s_read, predicate=n + 1 < chunks)
    decay_in = plgpu.load(ring.decays.at[slot, 0], layout=_PER_ROW)
    plgpu.barrier_wait(handover.u_made)
    o = Product.added(before * _along_columns(decay_in), ring.scores.at[slot], handover.u.T)
    plgpu.barrier_arrive(handover.u_read, predicate=n + 1 < chunks)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    o_s[...] = o.astype(o_s.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(o_s, o_ref)
    # Not before the commit: copies may overtake reads of the decays that come before it.
    plgpu.barrier_arrive(ring.consumed.at[slot], predicate=n + stages < chunks)


class Product:
    """Matrix products of a warpgroup, waited for: of arrays or shared memory with shared memory, in float32."""

    @staticmethod
    def of(a, b):
        """a b."""

        def multiply(sums):
            plgpu.wgmma(sums, a, b)
            return sums[...]

        return pl.run_scoped(multiply, Product._sums(a, b))

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


def _along_rows(x):
    """One value per column, in every row."""
    return lax.broadcast_in_dim(x, (_CHUNK, x.shape[0]), (1,))


def _along_columns(x):
    """One value per row, in every column."""
    return lax.broadcast_in_dim(x, (x.shape[0], _CHUNK), (0,))
