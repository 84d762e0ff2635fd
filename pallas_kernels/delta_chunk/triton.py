"""The chunked gated delta rule in Pallas on Triton: three kernels.

With d(i, j) the decay from token j to token i of a chunk of c = 64 tokens, and d(i) that from the chunk's beginning, a
chunk that finds S computes

    u = T (v - d(i) · k S)        T = (1 + tril(beta_i · d(i, j) · k_i · k_j, -1))⁻¹ diag(beta)
    o = d(i) · q S + A u          A = tril(d(i, j) · q_i · k_j)
    S' = d(c) · S + kᵀ (d(c, i) · u)

In `prepare`, `_overlap` makes k_i · k_j and q_i · k_j of every chunk and key head, and `_solve` T, A and the decays of
every chunk and value head; `scan` takes some columns of S from chunk to chunk. Refs are whole arrays. Arrays in a
program have powers of two of rows and columns: tokens past the last, and columns past the last, are read as zeros and
not written.

At "exact" operands of products come in pieces whose own products are exact. k, q, S and the writes come in float16 with
a power of two for each row or column, which needs fewest products. What a power of two would have to be shared for by
all tokens comes in bfloat16, so that no bit of a token depends on tokens that a reset keeps from it.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.delta_chunk.pieces import INVERSE_SCALE, LEAST_LOG_DECAY, LOG_DECAY_SCALE, pieces, scales
from pallas_kernels.delta_chunk.tuning import TritonTile
from pallas_kernels.operands import ANYWHERE, next_power_of_two

__all__ = ["launch_triton", "prepare", "scan", "triton_unsupported"]

_CHUNK = 64
"""Tokens of a chunk: the rows of one warpgroup's matrix instruction."""
_LEAST = 16
"""Columns that an array in a matrix product has at least."""
_MOST = 128
"""The largest K and V for which the default tiles are known not to spill registers."""
_MOST_HEADS = 2**16 - 1
"""Programs along the second and third axis of a grid."""
_WARPS = 4
"""Of a program of `_overlap` and `_solve`: with 8 there is room for half as many programs."""


class Operand(NamedTuple):
    """A matrix as matrix units take it: the sum of its pieces, times its scale."""

    pieces: Any
    """float16 or bfloat16, the largest first: a tuple, or an array with a leading axis P."""
    scale: Any = None
    """float32: one factor, or one for each row or column; None for ones."""


class Overlaps(NamedTuple):
    """What the vectors of a chunk's tokens have to do with its keys; N chunks."""

    k: Operand
    """k_i: pieces [P, N, B, G, c, K] and scale [N, B, G, c]."""
    q: Operand
    """q_i, likewise."""
    keys: Any
    """k_i · k_j: float32 [N, B, G, c, c]."""
    queries: Any
    """q_i · k_j, likewise."""


class Solved(NamedTuple):
    """All that a chunk does to S and v, beside k and q."""

    solve: Any
    """T: pieces [P, N, B, H, c, c]."""
    scores: Any
    """A, likewise."""
    read: Any
    """d(i), times the scale of k: float32 [N, B, H, c]."""
    query: Any
    """d(i), times the scale of q."""
    write: Any
    """d(c, i), times the scale of k."""
    decay: Any
    """d(c): float32 [N, B, H]."""


def triton_unsupported(
    batch: int, tokens: int, key_heads: int, value_heads: int, key_dim: int, value_dim: int, precision: str
) -> str | None:
    """Why this form does not take operands of these sizes at this precision, or None."""
    del precision, key_heads
    if max(key_dim, value_dim) > _MOST:
        return f"K and V must be at most {_MOST}, got K = {key_dim}, V = {value_dim}"
    if max(batch, value_heads) > _MOST_HEADS or tokens > 2**31 - _CHUNK:
        return f"B and H must be at most {_MOST_HEADS} and T below 2^31, got {batch}, {value_heads} and {tokens}"
    return None


@functools.partial(jax.jit, static_argnames=("precision", "tile", "interpret"))
def launch_triton(s, q, k, v, beta, g, *, precision: str, tile: TritonTile, interpret: bool):
    """As `delta_chunk`, for operands that it has checked and of which `triton_unsupported` says nothing."""
    overlaps, solved = prepare(q, k, beta, g, precision=precision, interpret=interpret)
    return scan(s, v, overlaps, solved, precision=precision, tile=tile, interpret=interpret)


def prepare(q, k, beta, g, *, precision: str, interpret: bool) -> tuple[Overlaps, Solved]:
    """What chunks do to any S and v: two launches."""
    exact = precision == "exact"
    tokens, batch, key_heads, key_dim = k.shape
    heads = g.shape[2]
    of_keys = pl.cdiv(tokens, _CHUNK), batch, key_heads
    of_values = *of_keys[:2], heads
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)

    def vectors(pieces):
        dims = *of_keys, _CHUNK, _padded(key_dim)
        if not exact:
            return Operand(jax.ShapeDtypeStruct((1, *dims), jnp.bfloat16))
        return Operand(jax.ShapeDtypeStruct((pieces, *dims), jnp.float16), shape(dims[:-1]))

    overlaps = _launch(
        _overlap,
        (of_keys[0], key_heads, batch),
        (q, k),
        Overlaps(
            # A third piece serves the writes alone: S is far more sensitive to the last digits of k than to any others.
            k=vectors(3),
            q=vectors(2),
            keys=shape((*of_keys, _CHUNK, _CHUNK)),
            queries=shape((*of_keys, _CHUNK, _CHUNK)),
        ),
        exact=exact,
        warps=_WARPS,
        interpret=interpret,
    )
    matrix = jax.ShapeDtypeStruct((3 if exact else 1, *of_values, _CHUNK, _CHUNK), jnp.bfloat16)
    weights = shape((*of_values, _CHUNK))
    solved = _launch(
        _solve,
        (of_keys[0], heads, batch),
        (overlaps, beta, g),
        Solved(solve=matrix, scores=matrix, read=weights, query=weights, write=weights, decay=shape(of_values)),
        exact=exact,
        warps=_WARPS,
        interpret=interpret,
    )
    return overlaps, solved


def scan(s, v, overlaps: Overlaps, solved: Solved, *, precision: str, tile: TritonTile, interpret: bool):
    """o and S after the last chunk, from S and v and what `prepare` made of the chunks: one launch."""
    batch, heads, value_dim = v.shape[1:]
    block_v = min(tile.block_v, _padded(value_dim))
    o_dtype = jnp.float32 if precision == "exact" else v.dtype
    return _launch(
        functools.partial(_scan, block_v=block_v),
        (pl.cdiv(value_dim, block_v), heads, batch),
        (s, v, overlaps.k.pieces, overlaps.q.pieces, solved),
        (jax.ShapeDtypeStruct(v.shape, o_dtype), jax.ShapeDtypeStruct(s.shape, s.dtype)),
        exact=precision == "exact",
        warps=tile.warps,
        stages=tile.stages,
        interpret=interpret,
    )


def _launch(body, grid, operands, out_shape, *, exact, warps, stages=1, interpret):
    """One kernel over whole arrays: body(operands, out), pytrees of refs."""
    arrays, ins = jax.tree.flatten(operands)
    shapes, outs = jax.tree.flatten(out_shape)
    name = getattr(body, "func", body).__name__.strip("_")

    def kernel(*refs):
        out = jax.tree.unflatten(outs, refs[len(arrays) :])
        body(jax.tree.unflatten(ins, refs[: len(arrays)]), out, exact=exact)

    results = pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=[ANYWHERE] * len(arrays),
        out_specs=(ANYWHERE,) * len(shapes),
        out_shape=tuple(shapes),
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name=f"delta_chunk_{name}",
    )(*arrays)
    return jax.tree.unflatten(outs, results)


def _overlap(operands, out, *, exact):
    """One chunk of one key head; grid (N, G, B)."""
    q_ref, k_ref = operands
    chunk, head, row = (pl.program_id(axis) for axis in range(3))
    at = chunk, row, head
    tokens = _range(chunk * _CHUNK, _CHUNK, k_ref.shape[0])
    columns = _range(0, out.k.pieces.shape[-1], k_ref.shape[-1])

    def rows(ref, pieces):
        x = _load_tile(ref, tokens, (row, head), columns)
        return _scaled(x, 1, pieces) if exact else _rounded(x)

    k = rows(k_ref, 3)
    _store(out.k, at, k)
    k = k._replace(pieces=k.pieces[:2])
    keys = Operand(tuple(piece.T for piece in k.pieces), None if k.scale is None else k.scale.T)
    out.keys[at] = _dot(k, keys)
    q = rows(q_ref, 2)
    _store(out.q, at, q)
    out.queries[at] = _dot(q, keys)


def _solve(operands, out, *, exact):
    """One chunk of one value head; grid (N, H, B)."""
    overlaps, beta_ref, g_ref = operands
    chunk, head, row = (pl.program_id(axis) for axis in range(3))
    at = chunk, row, head
    of_keys = chunk, row, head // (g_ref.shape[2] // overlaps.keys.shape[2])
    token, inside = _range(chunk * _CHUNK, _CHUNK, g_ref.shape[0])
    beta, g = (_load(ref.at[token, row, head], inside) for ref in (beta_ref, g_ref))
    g = jnp.maximum(g, LEAST_LOG_DECAY)

    i, j = (lax.broadcasted_iota(jnp.int32, (_CHUNK, _CHUNK), axis) for axis in (0, 1))
    # Every sum over the tokens after j up to i is taken over its own terms, as a product with a triangle of ones.
    g_after = jnp.where(i > j, g[:, None], 0.0)
    ones = Operand(((i >= j).astype(jnp.float16),))
    decay = jnp.where(i >= j, jnp.exp(_dot(ones, _fixed(g_after, LOG_DECAY_SCALE))), 0.0)
    from_start, to_end = jnp.sum(jnp.where(i >= j, g[None], 0.0), axis=1), jnp.sum(g_after, axis=0)
    for ref, vectors, log_decay in (
        (out.read, overlaps.k, from_start),
        (out.query, overlaps.q, from_start),
        (out.write, overlaps.k, to_end),
    ):
        weights = jnp.exp(log_decay)
        ref[at] = weights if vectors.scale is None else weights * vectors.scale[of_keys]
    out.decay[at] = jnp.exp(jnp.sum(g))

    def keep(ref, x):
        for n, piece in enumerate(_rounded(x, ref.shape[0]).pieces):
            ref[n, *at] = piece

    keep(out.scores, decay * overlaps.queries[of_keys])
    system = jnp.where(i > j, beta[:, None] * decay * overlaps.keys[of_keys], 0.0)
    keep(out.solve, _unit_lower_inverse(system, i ^ j) * beta[None])


def _unit_lower_inverse(a, apart):
    """(1 + a)⁻¹ for a strictly lower a, from the inverses of diagonal blocks that double in width.

    [[P, 0], [M, Q]]⁻¹ = [[P⁻¹, 0], [-Q⁻¹ M P⁻¹, Q⁻¹]], for all pairs of blocks at once, within the whole matrix. Powers
    of `a`, the shorter way, would cancel where keys are alike. apart[i, j] = i xor j is from w to 2w - 1 just where M
    is, for blocks of width w.
    """

    def below(width):
        return jnp.where((apart >= width) & (apart < 2 * width), a, 0.0)

    def double(level, inverse):
        factor = _fixed(inverse, INVERSE_SCALE)
        corners = _dot(_fixed(below(1 << level), INVERSE_SCALE), factor)
        return inverse - _dot(factor, _fixed(corners, INVERSE_SCALE))

    inverse = jnp.where(apart == 0, 1.0, 0.0) - below(1)
    return lax.fori_loop(1, _CHUNK.bit_length() - 1, double, inverse)


def _scan(operands, out, *, exact, block_v):
    """Some value columns of one head, over all chunks; grid (blocks of V, H, B)."""
    s_ref, v_ref, k_ref, q_ref, solved = operands
    o_ref, s_out_ref = out
    block, head, row = (pl.program_id(axis) for axis in range(3))
    _, chunks, _, key_heads, _, key_columns = k_ref.shape
    tokens, _, heads, value_dim = v_ref.shape
    values = _range(block * block_v, block_v, value_dim)

    def scaled(x):
        return _scaled(x, 0, 2) if exact else _rounded(x)

    def advance(chunk, s):
        at, of_keys = (chunk, row, head), (chunk, row, head // (heads // key_heads))
        token = _range(chunk * _CHUNK, _CHUNK, tokens)

        def weighted(matrix, x):
            return _dot_in_turn(_stored(matrix, at), _rounded(x, matrix.shape[0]))

        k, before = _stored(k_ref, of_keys), scaled(s)
        read = solved.read[at][:, None] * _dot_in_turn(k, before, most=2)
        u = weighted(solved.solve, _load_tile(v_ref, token, (row, head), values).astype(jnp.float32) - read)
        o = solved.query[at][:, None] * _dot_in_turn(_stored(q_ref, of_keys), before)
        _store_tile(o_ref, token, (row, head), values, o + weighted(solved.scores, u))
        written = scaled(solved.write[at][:, None] * u)
        return solved.decay[at] * s + _dot_in_turn(k, written, transposed=True)

    keys = _range(0, key_columns, s_ref.shape[2])
    state, mask = (row, head, keys[0][:, None], values[0][None]), _tile_mask(keys, values)
    s = lax.fori_loop(0, chunks, advance, _load(s_ref.at[state], mask))
    plt.store(s_out_ref.at[state], s, mask=mask)


def _rounded(x, count=1):
    """x in bfloat16 pieces of 8 bits: one rounds, three are all of a float32."""
    return Operand(pieces(x, count, jnp.bfloat16))


def _fixed(x, factor):
    """x in two float16 pieces of 11 bits, after multiplication by a power of two."""
    return Operand(pieces(x * factor, 2, jnp.float16), jnp.float32(1 / factor))


def _scaled(x, axis, count):
    """x in float16 pieces of 11 bits, each row (axis 1) or column (axis 0) multiplied by a power of two of its own."""
    x = x.astype(jnp.float32)
    up, down = (jnp.expand_dims(scale, axis) for scale in scales(jnp.max(jnp.abs(x), axis=axis)))
    return Operand(pieces(x * up, count, jnp.float16), down)


def _dot(a, b):
    """The matrix product, in float32. Products of pieces are exact; those of two that are not the largest are left out.

    The least come first, since matrix units cut off every partial sum.
    """
    pairs = [(piece, b.pieces[0]) for piece in a.pieces[:0:-1]] + [(a.pieces[0], piece) for piece in b.pieces[::-1]]
    total = sum(jnp.dot(*pair, preferred_element_type=jnp.float32) for pair in pairs)
    for scale in (a.scale, b.scale):
        total = total if scale is None else total * scale
    return total


class _Stored(NamedTuple):
    """A matrix whose pieces are ref[:, *at]."""

    ref: Any
    at: tuple[Any, ...]


def _stored(ref, at):
    """Such a matrix; if it is of one piece, that piece, which is then read once for all products with it."""
    return _Stored(ref, at) if ref.shape[0] > 1 else ref[0, *at]


def _dot_in_turn(a, b, *, most=3, transposed=False):
    """The matrix product with b of `_stored` a, or of its transpose, whose `most` largest pieces are read in turn.

    In a loop, since the compiler keeps addresses for every load and product that it sees in registers. The two largest
    pieces of b stand side by side, so that it has to read every piece of a once; a third meets only the largest.
    """

    def dot(piece, right):
        return jnp.dot(piece.T if transposed else piece, right, preferred_element_type=jnp.float32)

    if isinstance(a, _Stored):
        columns = b.pieces[0].shape[1]
        pieces = min(a.ref.shape[0], most)
        right = _side_by_side(*b.pieces[:2])
        zeros = jnp.zeros((a.ref.shape[-1 if transposed else -2], 2 * columns), jnp.float32)
        total = lax.fori_loop(0, pieces, lambda n, total: total + dot(a.ref[pieces - 1 - n, *a.at], right), zeros)
        total = jnp.sum(total.reshape(-1, 2, columns), axis=1)
        total = sum((dot(a.ref[0, *a.at], piece) for piece in b.pieces[2:]), total)
    else:
        total = dot(a, *b.pieces)
    return total if b.scale is None else total * b.scale


def _side_by_side(a, b):
    return jnp.stack([a, b], axis=-1).transpose(0, 2, 1).reshape(a.shape[0], 2 * a.shape[1])


def _store(ref, at, x):
    """The pieces, and the scales of rows if there are any."""
    for n, piece in enumerate(x.pieces):
        ref.pieces[n, *at] = piece
    if x.scale is not None:
        ref.scale[at] = x.scale.reshape(x.scale.shape[0])


def _padded(columns):
    return max(_LEAST, next_power_of_two(columns))


def _range(start, length, size):
    """The indices from `start` on, and which of them are below `size`: None if all are, wherever it is."""
    index = start + jnp.arange(length, dtype=jnp.int32)
    return index, None if size % length == 0 else index < size


def _load_tile(ref, rows, between, columns):
    """ref[rows, *between, columns], and 0 outside."""
    return _load(ref.at[rows[0][:, None], *between, columns[0][None]], _tile_mask(rows, columns))


def _store_tile(ref, rows, between, columns, x):
    at = rows[0][:, None], *between, columns[0][None]
    plt.store(ref.at[at], x.astype(ref.dtype), mask=_tile_mask(rows, columns))


def _tile_mask(rows, columns):
    """The mask of a tile, from two of `_range`."""
    masks = [] if rows[1] is None else [rows[1][:, None]]
    masks += [] if columns[1] is None else [columns[1][None]]
    return functools.reduce(jnp.logical_and, masks) if masks else None


def _load(ref, mask):
    """The referred values, 0 where masked."""
    return plt.load(ref, mask=mask, other=None if mask is None else 0.0)
