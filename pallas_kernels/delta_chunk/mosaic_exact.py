"""The chunked gated delta rule on the tensor cores of sm_90 with float32 quality (Pallas on Mosaic GPU): three kernels.

The formulas, and the chain of products in registers, are those of `mosaic.py`. Operands of products come in 16-bit
pieces (`pieces.py`), whose own products are exact: k, q, S and what is written in float16, times a power of two for
each token or value column; T, A, v - d(i) · k S and u, which hold tokens of several documents, in bfloat16, since a
power of two for all would let a token change bits behind a reset.

`overlap` makes the pieces of k and q, k_i · k_j and q_i · k_j of every chunk and key head; `solve` T, A and the decays
of every chunk and value head; `scan` takes 64 of the V columns of a head from chunk to chunk. There is no room for the
chunks to come beside a second copy of S and u: one warpgroup makes o as well, by products of the same registers,

    oᵀ = d(i) · Sᵀ qᵀ + uᵀ Aᵀ,

while it does what lies between the products of its chain. A second one fetches each part of a chunk as soon as the same
part of the chunk before has been used; the keys, which are used first and last, a chunk ahead.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.delta_chunk.mosaic_parts import (
    CHUNK,
    COLUMNS,
    MATRIX,
    PER_COLUMN,
    PER_ROW,
    TRANSPOSED,
    Product,
    along_columns,
    along_rows,
    by_chunk,
    copyable,
    load_state,
    store_state,
    tiled,
    unit_lower_inverse,
)
from pallas_kernels.delta_chunk.pieces import INVERSE_SCALE, LEAST_LOG_DECAY, LOG_DECAY_SCALE, pieces, scales

__all__ = ["launch_exact"]

_KEY_PIECES = 3
"""The third serves the writes alone: S is far more sensitive to the last digits of k than to any others."""
_QUERY_PIECES = 2
_MATRIX_PIECES = 3
"""Of T and A, in bfloat16: all of a float32."""
_KEYS_AHEAD = 2
"""Chunks whose keys are in shared memory at a time, at most."""
_READ, _QUERY, _WRITE, _DECAY = range(4)
"""Weights of a chunk's tokens: d(i) times the scale of k and of q, d(c, i) times the scale of k, d(i)."""


def launch_exact(s, q, k, v, beta, g, *, stages: int):
    """o and S, float32, with the keys of so many chunks in shared memory, if there is room."""
    tokens = v.shape[0]
    q, k, v = (copyable(x.astype(jnp.float32)) for x in (q, k, v))
    vectors, vector_scales, overlaps = overlap(q, k)
    solved = solve(vector_scales, overlaps, by_chunk(beta), by_chunk(g))
    o, s = scan(s, v, vectors, *solved, stages=stages)
    return o[:tokens], s


def overlap(q, k):
    """The pieces of k, then of q, [n, B, G, 5, c, K] in float16, their scales [n, B, G, 2, c]; and [n, B, G, 2, c, c].

    The last are k_i · k_j, then q_i · k_j.
    """
    tokens, batch, key_heads, key_dim = k.shape
    lead = (pl.cdiv(tokens, CHUNK), batch, key_heads)
    cut = (_KEY_PIECES + _QUERY_PIECES, CHUNK, key_dim)
    return plgpu.kernel(
        _overlap,
        out_type=[
            jax.ShapeDtypeStruct((*lead, *cut), jnp.float16),
            jax.ShapeDtypeStruct((*lead, 2, CHUNK), jnp.float32),
            jax.ShapeDtypeStruct((*lead, 2, CHUNK, CHUNK), jnp.float32),
        ],
        grid=lead,
        grid_names=("chunk", "row", "head"),
        scratch_types=[
            tiled((2, CHUNK, key_dim), jnp.float32),
            tiled(cut, jnp.float16),
            plgpu.SMEM((CHUNK,), jnp.float32),
            plgpu.Barrier(num_arrivals=2),
        ],
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        kernel_name="delta_chunk_overlap",
    )(q, k)


def _overlap(q_ref, k_ref, vectors_ref, scales_ref, overlaps_ref, whole_s, vectors_s, key_scale_s, arrived):
    here = chunk, row, head = tuple(lax.axis_index(name) for name in ("chunk", "row", "head"))
    tokens = pl.ds(chunk * CHUNK, CHUNK)
    for n, ref in enumerate((k_ref, q_ref)):
        plgpu.copy_gmem_to_smem(ref.at[tokens, row, head], whole_s.at[n], arrived)
    plgpu.barrier_wait(arrived)

    def cut(n, first, count):
        found, scale = _scaled(plgpu.load(whole_s.at[n], layout=MATRIX), count)
        for m, piece in enumerate(found):
            vectors_s[first + m] = piece
        scales_ref.at[here][n] = scale
        return scale

    key_scale, query_scale = cut(0, 0, _KEY_PIECES), cut(1, _KEY_PIECES, _QUERY_PIECES)
    key_scale_s[...] = key_scale
    plgpu.commit_smem()
    _put_out(vectors_s, vectors_ref.at[here])
    keys = _transposed(vectors_s, 2)
    columns = along_rows(plgpu.load(key_scale_s, layout=PER_COLUMN))
    for n, first, scale in ((0, 0, key_scale), (1, _KEY_PIECES, query_scale)):
        overlap = Product.of_pieces(_stack(vectors_s, first, 2), keys)
        overlaps_ref.at[here][n] = overlap * along_columns(scale) * columns
    plgpu.wait_smem_to_gmem(0)


def solve(vector_scales, overlaps, beta, g):
    """T and A in pieces [n, B, H, 3, c, c] in bfloat16, and weights [n, B, H, 4, c]; beta and g are [n, B, H, c]."""
    lead = g.shape[:3]
    square = (CHUNK, CHUNK)
    cut = (_MATRIX_PIECES, *square)
    return plgpu.kernel(
        _solve,
        out_type=[
            jax.ShapeDtypeStruct((*lead, *cut), jnp.bfloat16),
            jax.ShapeDtypeStruct((*lead, *cut), jnp.bfloat16),
            jax.ShapeDtypeStruct((*lead, 4, CHUNK), jnp.float32),
        ],
        grid=lead,
        grid_names=("chunk", "row", "head"),
        scratch_types=[tiled((2, *square), jnp.float16), tiled((2, *square), jnp.float16), tiled(cut)],
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        kernel_name="delta_chunk_solve",
    )(vector_scales, overlaps, beta, g)


def _solve(scales_ref, overlaps_ref, beta_ref, g_ref, solve_ref, scores_ref, weights_ref, left_s, right_s, out_s):
    here = chunk, row, head = tuple(lax.axis_index(name) for name in ("chunk", "row", "head"))
    of_keys = chunk, row, head // (g_ref.shape[2] // overlaps_ref.shape[2])

    def load(ref, layout):
        return plgpu.load(ref, layout=layout, optimized=False)

    i, j = (plgpu.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis, layout=MATRIX) for axis in (0, 1))
    zero = jnp.zeros_like(i, jnp.float32)
    g_columns = along_rows(jnp.maximum(load(g_ref.at[here], PER_COLUMN), LEAST_LOG_DECAY))
    from_start = jnp.sum(jnp.where(j <= i, g_columns, zero), axis=1)
    to_end = jnp.sum(jnp.where(j > i, g_columns, zero), axis=1)
    decay_in = jnp.exp(from_start)
    key_scale, query_scale = (load(scales_ref.at[of_keys].at[n], PER_ROW) for n in range(2))
    weights = weights_ref.at[here]
    weights[_READ] = decay_in * key_scale
    weights[_QUERY] = decay_in * query_scale
    weights[_WRITE] = jnp.exp(to_end) * key_scale
    weights[_DECAY] = decay_in

    # Every sum over the tokens after j up to i is taken over its own terms, as a product with a triangle of ones: as a
    # difference of sums it would lose what a strong decay before token j leaves below its last digit.
    g_rows = along_columns(jnp.maximum(load(g_ref.at[here], PER_ROW), LEAST_LOG_DECAY))
    after = jnp.where(i > j, g_rows, zero) * LOG_DECAY_SCALE
    for n, piece in enumerate(pieces(after, 2, jnp.float16)):
        right_s[n] = piece
    # Not an operand in registers: ptxas sets one that is the same constant in all threads after its first use.
    left_s[0] = jnp.where(j <= i, zero + 1.0, zero).astype(jnp.float16)
    plgpu.commit_smem()
    log_decay = Product.of_pieces([left_s.at[0]], _stack(right_s, 0, 2)) * (1 / LOG_DECAY_SCALE)
    # A system cut off by a condition of its own would be such an operand, where all its columns are after its rows.
    decay_between = jnp.where(j < i, jnp.exp(log_decay), zero)
    decay = jnp.where(i == j, zero + 1.0, decay_between)

    def keep(x, ref):
        for n, piece in enumerate(pieces(x, _MATRIX_PIECES, jnp.bfloat16)):
            out_s[n] = piece
        plgpu.commit_smem()
        _put_out(out_s, ref.at[here])

    keys, queries = overlaps_ref.at[of_keys].at[0], overlaps_ref.at[of_keys].at[1]
    keep(decay * load(queries, MATRIX), scores_ref)
    beta = along_columns(load(beta_ref.at[here], PER_ROW))
    system = beta * decay_between * load(keys, MATRIX)
    inverse = unit_lower_inverse(system, i, j, left_s, right_s, scale=INVERSE_SCALE)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    # Not beside the other load of beta: the compiler would make them one, in neither layout.
    keep(inverse * along_rows(load(beta_ref.at[here], PER_COLUMN)), solve_ref)
    plgpu.wait_smem_to_gmem(0)


def scan(s, v, vectors, solve, scores, weights, *, stages: int):
    """o [T, B, H, V] and S after the last chunk, from S [B, H, K, V], v and what the other kernels made of the rest."""
    _, batch, heads, value_dim = v.shape
    key_dim = vectors.shape[-1]

    return plgpu.kernel(
        _scan,
        out_type=[jax.ShapeDtypeStruct(v.shape, v.dtype), jax.ShapeDtypeStruct(s.shape, s.dtype)],
        grid=(batch, heads, value_dim // COLUMNS),
        grid_names=("row", "head", "columns"),
        num_threads=2,
        thread_name="role",
        scratch_types=[
            _Chunks(
                k=_ring(min(stages, _KEYS_AHEAD), tiled, (_KEY_PIECES, CHUNK, key_dim), jnp.float16),
                weights=_ring(min(stages, _KEYS_AHEAD), plgpu.SMEM, (1, 4, CHUNK), jnp.float32),
                q=_ring(1, tiled, (_QUERY_PIECES, CHUNK, key_dim), jnp.float16),
                v=_ring(1, tiled, (1, CHUNK, COLUMNS), jnp.float32),
                solve=_ring(1, tiled, (_MATRIX_PIECES, CHUNK, CHUNK), jnp.bfloat16),
                scores=_ring(1, tiled, (_MATRIX_PIECES, CHUNK, CHUNK), jnp.bfloat16),
            ),
            tiled((CHUNK, COLUMNS), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        kernel_name="delta_chunk_scan",
    )(s, v, vectors, solve, scores, weights)


def _ring(stages, kind, shape, dtype):
    return _Ring(
        kind((stages, *shape), dtype),
        arrived=plgpu.Barrier(num_arrivals=shape[0], num_barriers=stages),
        consumed=plgpu.Barrier(num_barriers=stages),
    )


class _Ring(NamedTuple):
    """One part of a chunk or of several, in shared memory."""

    memory: Any
    """[stages, arrays, …]."""
    arrived: Any
    consumed: Any

    def fetch(self, n, *sources):
        """The arrays of chunk n, by the fetching warpgroup."""
        slot = self._slot(n)
        pl.when(n >= self.memory.shape[0])(lambda: plgpu.barrier_wait(self.consumed.at[slot]))
        for m, source in enumerate(sources):
            plgpu.copy_gmem_to_smem(source, self.memory.at[slot, m], self.arrived.at[slot])

    def wait(self, n):
        """The memory, which holds the arrays of chunk n by now."""
        slot = self._slot(n)
        plgpu.barrier_wait(self.arrived.at[slot])
        return self.memory.at[slot]

    def release(self, n, chunks):
        """The memory is not read again for chunk n, the n-th of so many."""
        following = n + self.memory.shape[0]
        plgpu.barrier_arrive(self.consumed.at[self._slot(n)], predicate=following < chunks)

    def _slot(self, n):
        # The compiler is not to know that it may be the same in every turn of a loop: it would then keep the addresses
        # of all operands of matrix instructions in registers.
        return lax.optimization_barrier(lax.rem(n, self.memory.shape[0]))


class _Chunks(NamedTuple):
    """Parts of chunks, each with a ring of its own."""

    k: _Ring
    weights: _Ring
    q: _Ring
    v: _Ring
    solve: _Ring
    scores: _Ring


def _scan(s_ref, v_ref, vectors_ref, solve_ref, scores_ref, weights_ref, o_ref, end_ref, rings, o_s):
    row, head, part = (lax.axis_index(name) for name in ("row", "head", "columns"))
    columns = pl.ds(part * COLUMNS, COLUMNS)
    chunks = solve_ref.shape[0]
    role = lax.axis_index("role")

    @pl.when(role == 0)
    def compute():
        def advance(n, s):
            tokens = pl.ds(n * CHUNK, CHUNK)
            return _advance(rings, chunks, n, s, o_s, o_ref.at[tokens, row, head, columns])

        end = lax.fori_loop(0, chunks, advance, load_state(s_ref.at[row, head, :, columns]))
        store_state(end_ref.at[row, head, :, columns], end)
        plgpu.wait_smem_to_gmem(0)

    @pl.when(role == 1)
    def fetch():
        key_head = head // (v_ref.shape[2] // vectors_ref.shape[2])

        @pl.loop(0, chunks)
        def per_chunk(n):
            vectors = _stack(vectors_ref.at[n, row, key_head], 0, _KEY_PIECES + _QUERY_PIECES)
            rings.k.fetch(n, *vectors[:_KEY_PIECES])
            rings.weights.fetch(n, weights_ref.at[n, row, head])
            rings.q.fetch(n, *vectors[_KEY_PIECES:])
            rings.v.fetch(n, v_ref.at[pl.ds(n * CHUNK, CHUNK), row, head, columns])
            rings.solve.fetch(n, *_stack(solve_ref.at[n, row, head], 0, _MATRIX_PIECES))
            rings.scores.fetch(n, *_stack(scores_ref.at[n, row, head], 0, _MATRIX_PIECES))


def _advance(rings, chunks, n, s, o_s, o_ref):
    """Sᵀ after chunk n, in registers as before it; o of the chunk goes to memory."""
    before, s_scale = _scaled(s, 2)
    k, weights = rings.k.wait(n), rings.weights.wait(n).at[0]

    def weight(which):
        return along_rows(plgpu.load(weights.at[which], layout=PER_COLUMN))

    def queried():
        return before, _transposed(rings.q.wait(n), _QUERY_PIECES)

    def known(read):
        return along_columns(s_scale) * read * weight(_READ)

    # What is to be written is not made before the pieces of S are done with: there are no registers for both.
    known, o = Product.overlapped((before, _transposed(k, 2)), queried, known)
    v = plgpu.layout_cast(plgpu.load(rings.v.wait(n).at[0].T, layout=TRANSPOSED), MATRIX)
    news = pieces(v - known, _MATRIX_PIECES, jnp.bfloat16)
    u = Product.of_pieces(news, _transposed(rings.solve.wait(n), _MATRIX_PIECES))
    # Copies may overtake reads that come before them, unless there is this between.
    plgpu.commit_smem()
    for ring in (rings.q, rings.v, rings.solve):
        ring.release(n, chunks)
    attended = pieces(u, _MATRIX_PIECES, jnp.bfloat16), _transposed(rings.scores.wait(n), _MATRIX_PIECES)
    o = o * along_columns(s_scale) * weight(_QUERY) + Product.of_pieces(*attended)
    rings.scores.release(n, chunks)

    def put_out():
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        o_s.T[...] = plgpu.layout_cast(o, TRANSPOSED)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_s, o_ref)

    kept, scale = _scaled(u * weight(_WRITE), 2)
    decay = weights[_DECAY, CHUNK - 1]
    grown = Product.of_pieces(kept, _stack(k, 0, _KEY_PIECES), put_out)
    for ring in (rings.k, rings.weights):
        ring.release(n, chunks)
    return s * decay + grown * along_columns(scale, s.shape[1])


def _put_out(matrices, ref):
    """Copy matrices [n, …] to memory: one by one, since a copy has no more than so many axes."""
    for n in range(matrices.shape[0]):
        plgpu.copy_smem_to_gmem(matrices.at[n], ref.at[n])


def _scaled(x, count):
    """The rows of x in float16 pieces, each multiplied by a power of two of its own; and the reciprocals of these."""
    up, down = scales(jnp.max(jnp.abs(x), axis=1))
    return pieces(x * along_columns(up, x.shape[1]), count, jnp.float16), down


def _stack(memory, first, count):
    """So many of the matrices in memory [n, …], from the first on."""
    return [memory.at[first + n] for n in range(count)]


def _transposed(memory, count):
    return [matrix.T for matrix in _stack(memory, 0, count)]
