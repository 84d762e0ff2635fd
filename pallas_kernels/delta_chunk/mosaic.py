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

from pallas_kernels.delta_chunk.mosaic_exact import launch_exact
from pallas_kernels.delta_chunk.mosaic_parts import (
    CHUNK,
    COLUMNS,
    MATRIX,
    PER_COLUMN,
    PER_ROW,
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

__all__ = ["MosaicTile", "launch_mosaic", "mosaic_unsupported"]

_KEY_DIMS = (64, 128)
"""With more, S does not fit into a warpgroup's registers."""
_LEAST_LOG_DECAY = -104.0
"""exp of it is 0 in float32. Sums over a chunk then stay below 6656, and their differences within 5e-4."""
_PRODUCER_REGISTERS, _STATE_REGISTERS, _OUTPUT_REGISTERS = 40, 240, 208
"""Of a thread of each warpgroup of `scan`."""


class MosaicTile(NamedTuple):
    """How `scan` runs; the bits of its results do not depend on it."""

    stages: int = 3
    """Chunks in shared memory at a time: at "exact" of their keys alone, and no more than two."""


def mosaic_unsupported(
    batch: int, tokens: int, key_heads: int, value_heads: int, key_dim: int, value_dim: int, precision: str
) -> str | None:
    """Why this form does not take operands of these sizes at this precision, or None."""
    del batch, tokens, key_heads, value_heads, precision
    if key_dim not in _KEY_DIMS or value_dim % COLUMNS or not value_dim:
        needs = f"K of {' or '.join(map(str, _KEY_DIMS))} and V a multiple of {COLUMNS}"
        return f"the tensor core form needs {needs}, got K = {key_dim}, V = {value_dim}"
    return None


@functools.partial(jax.jit, static_argnames=("precision", "tile"))
def launch_mosaic(s, q, k, v, beta, g, *, precision: str, tile: MosaicTile):
    """As `delta_chunk`, for operands that it has checked and of which `mosaic_unsupported` says nothing.

    "bf16" is what follows here, "exact" what `mosaic_exact` has. Returns o, in v's dtype at "bf16", and S.

    Raises:
        ValueError: `tile` is not one.
    """
    if not 1 <= tile.stages <= 3:
        raise ValueError(f"stages must be 1, 2 or 3, got {tile}")
    if precision == "exact":
        return launch_exact(s, q, k, v, beta, g, stages=tile.stages)
    tokens = v.shape[0]
    q, k, v16 = (copyable(x.astype(jnp.bfloat16)) for x in (q, k, v))
    solve, scores, decays = prepare(q, k, by_chunk(beta), by_chunk(g))
    o, s = scan(s, q, k, v16, solve, scores, decays, out_dtype=v.dtype, tile=tile)
    return o[:tokens], s


def prepare(q, k, beta, g):
    """T and A [n, B, H, c, c] in bfloat16, and d(i) and d(c, i) [n, B, H, 2, c]; beta and g are [n, B, H, c]."""
    chunks, batch, heads, _ = g.shape
    key_dim = k.shape[3]
    lead = (chunks, batch, heads)
    square = (CHUNK, CHUNK)
    return plgpu.kernel(
        _prepare,
        out_type=[
            jax.ShapeDtypeStruct((*lead, *square), jnp.bfloat16),
            jax.ShapeDtypeStruct((*lead, *square), jnp.bfloat16),
            jax.ShapeDtypeStruct((*lead, 2, CHUNK), jnp.float32),
        ],
        grid=lead,
        grid_names=("chunk", "row", "head"),
        scratch_types=[
            tiled((CHUNK, key_dim)),
            tiled((CHUNK, key_dim)),
            tiled((1, *square), jnp.float16),
            tiled((1, *square), jnp.float16),
            tiled((2, *square)),
            plgpu.SMEM((CHUNK,), jnp.float32),
            plgpu.Barrier(num_arrivals=2),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        kernel_name="delta_chunk_prepare",
    )(q, k, beta, g)


def _prepare(
    q_ref, k_ref, beta_ref, g_ref, solve_ref, scores_ref, decays_ref, q_s, k_s, left_s, right_s, out_s, sums_s, arrived
):
    chunk, row, head = (lax.axis_index(name) for name in ("chunk", "row", "head"))
    key_head = head // (g_ref.shape[2] // k_ref.shape[2])
    tokens = pl.ds(chunk * CHUNK, CHUNK)
    for source, target in ((q_ref, q_s), (k_ref, k_s)):
        plgpu.copy_gmem_to_smem(source.at[tokens, row, key_head], target, arrived)
    here = (chunk, row, head)

    i, j = (plgpu.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis, layout=MATRIX) for axis in (0, 1))
    zero = jnp.zeros_like(i, jnp.float32)
    g = jnp.maximum(plgpu.load(g_ref.at[here], layout=PER_COLUMN, optimized=False), _LEAST_LOG_DECAY)
    sums = jnp.sum(jnp.where(j <= i, along_rows(g), zero), axis=1)
    sums_s[...] = sums
    plgpu.commit_smem()
    total = sums_s[CHUNK - 1]
    decays_ref.at[here][0] = jnp.exp(sums)
    decays_ref.at[here][1] = jnp.exp(total - sums)
    decay = jnp.exp(along_columns(sums) - along_rows(plgpu.load(sums_s, layout=PER_COLUMN)))
    decay = jnp.where(j <= i, decay, zero)

    plgpu.barrier_wait(arrived)
    out_s[1] = (decay * Product.of(q_s, k_s.T)).astype(jnp.bfloat16)
    beta_rows = plgpu.load(beta_ref.at[here], layout=PER_ROW, optimized=False)
    system = jnp.where(j < i, along_columns(beta_rows) * decay * Product.of(k_s, k_s.T), zero)
    inverse = unit_lower_inverse(system, i, j, left_s, right_s, scale=1.0)
    beta_columns = plgpu.load(beta_ref.at[here], layout=PER_COLUMN, optimized=False)
    out_s[0] = (inverse * along_rows(beta_columns)).astype(jnp.bfloat16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(out_s.at[0], solve_ref.at[here])
    plgpu.copy_smem_to_gmem(out_s.at[1], scores_ref.at[here])
    plgpu.wait_smem_to_gmem(0)


def scan(s, q, k, v, solve, scores, decays, *, out_dtype, tile: MosaicTile):
    """o [T, B, H, V] and S after the last chunk, from S [B, H, K, V] and what `prepare` made of the chunks."""
    tokens, batch, heads, value_dim = v.shape
    key_dim = k.shape[3]
    width = COLUMNS
    state_t = (width, key_dim)

    def ring(shape):
        return tiled((tile.stages, *shape))

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
                q=ring((CHUNK, key_dim)),
                k=ring((CHUNK, key_dim)),
                v=ring((CHUNK, width)),
                solve=ring((CHUNK, CHUNK)),
                scores=ring((CHUNK, CHUNK)),
                decays=plgpu.SMEM((tile.stages, 2, CHUNK), jnp.float32),
                arrived=plgpu.Barrier(num_arrivals=6, num_barriers=tile.stages),
                consumed=plgpu.Barrier(num_arrivals=2, num_barriers=tile.stages),
            ),
            _Handover(
                s=tiled(state_t),
                u=tiled((width, CHUNK)),
                s_made=plgpu.Barrier(),
                u_made=plgpu.Barrier(),
                s_read=plgpu.Barrier(),
                u_read=plgpu.Barrier(),
            ),
            tiled((CHUNK, width), out_dtype),
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
    columns = pl.ds(part * COLUMNS, COLUMNS)
    chunks = solve_ref.shape[0]
    role = lax.axis_index("role")

    @pl.when(role == 0)
    def state():
        plgpu.set_max_registers(_STATE_REGISTERS, action="increase")
        start = load_state(s_ref.at[row, head, :, columns])
        end = lax.fori_loop(0, chunks, functools.partial(_next_state, ring, handover, stages, chunks), start)
        store_state(end_ref.at[row, head, :, columns], end)

    @pl.when(role == 1)
    def output():
        plgpu.set_max_registers(_OUTPUT_REGISTERS, action="increase")

        @pl.loop(0, chunks)
        def per_chunk(n):
            tokens = pl.ds(n * CHUNK, CHUNK)
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
            tokens = pl.ds(n * CHUNK, CHUNK)
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
    decay_in = plgpu.load(ring.decays.at[slot, 0], layout=PER_COLUMN)
    decay_out = plgpu.load(ring.decays.at[slot, 1], layout=PER_COLUMN)
    decay_through = ring.decays[slot, 0, CHUNK - 1]

    u = Product.chained(
        (half, ring.k.at[slot].T),
        (ring.v.at[slot].T, ring.solve.at[slot].T),
        lambda read: ((-along_rows(decay_in) * read).astype(jnp.bfloat16), ring.solve.at[slot].T),
        lambda: hand_over(half, handover.s, handover.s_made, handover.s_read),
    )
    kept = (u * along_rows(decay_out)).astype(jnp.bfloat16)
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
    decay_in = plgpu.load(ring.decays.at[slot, 0], layout=PER_ROW)
    plgpu.barrier_wait(handover.u_made)
    o = Product.added(before * along_columns(decay_in), ring.scores.at[slot], handover.u.T)
    plgpu.barrier_arrive(handover.u_read, predicate=n + 1 < chunks)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    o_s[...] = o.astype(o_s.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(o_s, o_ref)
    # Not before the commit: copies may overtake reads of the decays that come before it.
    plgpu.barrier_arrive(ring.consumed.at[slot], predicate=n + stages < chunks)
