"""The chunked form of the gated delta rule: what one chunk computes, and S going from chunk to chunk.

For one value head and a chunk of c tokens that finds S: with d(i, j) = exp(g_{j+1} + … + g_i) the decay from token j to
token i, and d(i) that from the chunk's beginning to token i, unrolling the serial form gives

    u_i = beta_i · (v_i - d(i) · Sᵀk_i - sum_{j < i} d(i, j) · (k_i · k_j) · u_j)
    o_i = d(i) · Sᵀq_i + sum_{j ≤ i} d(i, j) · (q_i · k_j) · u_j
    S' = d(c) · S + sum_j d(c, j) · k_j u_jᵀ

of which the first line is a unit-lower-triangular system in the u of the chunk. With tokens as rows of matrices, and
d(i), d(c, i) and beta as factors of rows, that is

    N_ij = beta_i · d(i, j) · (k_i · k_j) for j < i,    A_ij = d(i, j) · (q_i · k_j) for j ≤ i,    T = (1 + N)⁻¹
    r = v - d(i) · k S,    u = T (beta · r),    o = d(i) · q S + A u,    S' = d(c) · S + kᵀ (d(c, i) · u)

All that does not depend on S is computed for all chunks at once; then S goes from chunk to chunk. Derivatives are in
`delta_backward`; what is here knows nothing of them.

Axes of this module beside the glossary's: n chunks, c tokens in a chunk, both: 2c, those of keys and then of queries.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from gdn_jax.axes import Array, Bool, Float32
from gdn_jax.products import einsum

__all__ = [
    "CHUNK",
    "Chunks",
    "Pairs",
    "by_chunks",
    "earlier",
    "grouped",
    "in_chunks",
    "split",
    "sum_of_writes",
    "writes",
]

CHUNK = 64
"""Tokens per chunk, unless told otherwise."""

_WRITES = 8
"""Tokens whose writes to S are summed by one matrix product."""


class Chunks(NamedTuple):
    """All that the chunks need beside S."""

    keys_and_queries: Float32[Array, "n B G both K"]
    v: Float32[Array, "n B G R c V"]
    beta: Float32[Array, "n B G R c"]
    solve: Float32[Array, "n B G R c c"]
    """T, the inverse of the triangular system."""
    scores: Float32[Array, "n B G R c c"]
    """A."""
    decay_in: Float32[Array, "n B G R c"]
    """d(i), from the chunk's beginning."""
    decay_out: Float32[Array, "n B G R c"]
    """d(c, j), to the chunk's end."""


class Pairs(NamedTuple):
    """What N and A consist of, for every two tokens of a chunk."""

    decay: Float32[Array, "n B G R c c"]
    """d(i, j), and 0 for j > i."""
    keys: Float32[Array, "n B G 1 c c"]
    """k_i · k_j."""
    queries: Float32[Array, "n B G 1 c c"]
    """q_i · k_j."""


def by_chunks(
    s: Float32[Array, "B H K V"],
    q: Float32[Array, "T B G K"],
    k: Float32[Array, "T B G K"],
    v: Float32[Array, "T B H V"],
    beta: Float32[Array, "T B H"],
    g: Float32[Array, "T B H"],
    *,
    precision: str,
    chunk: int,
) -> tuple[Float32[Array, "T B H V"], Float32[Array, "B H K V"]]:
    """o of all tokens and S after the last, `chunk` tokens at a time; operands as for `delta.clean_chunks`."""
    chunks, _ = in_chunks(q, k, v, beta, g, precision=precision, chunk=chunk)
    o, end = _over_chunks(grouped(s, 1, q.shape[2]), chunks, precision)
    return jnp.moveaxis(o, -2, 1).reshape(-1, *v.shape[1:])[: len(v)], end.reshape(s.shape)


def in_chunks(
    q: Float32[Array, "T B G K"],
    k: Float32[Array, "T B G K"],
    v: Float32[Array, "T B H V"],
    beta: Float32[Array, "T B H"],
    g: Float32[Array, "T B H"],
    *,
    precision: str,
    chunk: int,
) -> tuple[Chunks, Pairs]:
    """Whatever does not depend on S; the last chunk is filled up with tokens that write nothing and decay nothing."""
    key_heads = q.shape[2]
    q, k = (jnp.moveaxis(split(x, chunk), 1, -2) for x in (q, k))
    v = jnp.moveaxis(grouped(split(v, chunk), 3, key_heads), 1, -2)
    beta, g = (jnp.moveaxis(grouped(split(x, chunk), 3, key_heads), 1, -1) for x in (beta, g))
    keys_and_queries = jnp.concatenate([k, q], axis=-2)
    products = einsum("nbgik,nbgjk->nbgij", keys_and_queries, k, precision=precision)[:, :, :, None]
    seen = jnp.tri(chunk, dtype=jnp.bool_)
    decay = jnp.where(_leading(seen, g[..., None]), jnp.exp(_segment_sums(g)), 0.0)
    pairs = Pairs(decay, *jnp.split(products, 2, axis=-2))
    chunks = Chunks(
        keys_and_queries=keys_and_queries,
        v=v,
        beta=beta,
        solve=_unit_lower_inverse(earlier(beta[..., None] * decay * pairs.keys)),
        scores=decay * pairs.queries,
        decay_in=jnp.exp(jnp.cumsum(g, axis=-1)),
        decay_out=decay[..., -1, :],
    )
    return chunks, pairs


def _over_chunks(
    s: Float32[Array, "B G R K V"], chunks: Chunks, precision: str
) -> tuple[Float32[Array, "n B G R c V"], Float32[Array, "B G R K V"]]:
    def body(s, now):
        c = now.v.shape[-2]
        read = einsum("bgck,bgrkv->bgrcv", now.keys_and_queries, s, precision=precision)
        read = read * jnp.concatenate([now.decay_in] * 2, axis=-1)[..., None]
        _, u, s = writes(s, read[..., :c, :], now, precision)
        return s, read[..., c:, :] + einsum("bgrij,bgrjv->bgriv", now.scores, u, precision=precision)

    s, o = lax.scan(body, s, chunks)
    return o, s


def writes(
    s: Float32[Array, "B G R K V"], read: Float32[Array, "B G R c V"], now: Chunks, precision: str
) -> tuple[Float32[Array, "B G R c V"], Float32[Array, "B G R c V"], Float32[Array, "B G R K V"]]:
    """r, u and S' of one chunk that finds S and has `read` d(i) · k S from it."""
    r = now.v - read
    u = einsum("bgrij,bgrjv->bgriv", now.solve, now.beta[..., None] * r, precision=precision)
    keys = now.keys_and_queries[..., : r.shape[-2], :]
    written = sum_of_writes(keys, now.decay_out[..., None] * u, precision)
    return r, u, now.decay_in[..., -1, None, None] * s + written


def sum_of_writes(
    k: Float32[Array, "B G c K"], u: Float32[Array, "B G R c V"], precision: str
) -> Float32[Array, "B G R K V"]:
    """sum_j k_j u_jᵀ, in partial sums of `_WRITES` consecutive tokens.

    Where keys are alike, each write takes back most of the one before. Sums in the order of the tokens, as in the
    serial form, then stay small; a matrix product adds in an order of its own, in which they grow and are rounded more.
    """
    k, u = (split(jnp.moveaxis(x, -2, 0), _WRITES) for x in (k, u))
    return jnp.sum(einsum("mcbgk,mcbgrv->mbgrkv", k, u, precision=precision), axis=0)


def earlier(x: Float32[Array, "... c c"]) -> Float32[Array, "... c c"]:
    """x_ij for j < i, else 0."""
    return jnp.where(_leading(jnp.tri(x.shape[-1], k=-1, dtype=jnp.bool_), x), x, 0.0)


def _segment_sums(g: Float32[Array, "... c"]) -> Float32[Array, "... c c"]:
    """L[i, j] = g_{j+1} + … + g_i, and 0 for j ≥ i.

    Each sum is taken over its own terms. As the difference of two prefix sums it would lose what a strong decay before
    token j leaves below its last digit, and be NaN after a full reset.
    """
    return jnp.cumsum(earlier(jnp.broadcast_to(g[..., None], (*g.shape, g.shape[-1]))), axis=-2)


def _unit_lower_inverse(a: Float32[Array, "... c c"]) -> Float32[Array, "... c c"]:
    """(1 + a)⁻¹ for a strictly lower a, from the inverses of diagonal blocks that double in width.

    [[P, 0], [M, Q]]⁻¹ = [[P⁻¹, 0], [-Q⁻¹ M P⁻¹, Q⁻¹]], for all pairs of blocks at once, within the whole matrix. Every
    block's inverse belongs to a shorter chunk, so its entries are at most 1 where keys have length 1 and beta ≤ 1, and
    the error is that of forward substitution. Powers of `a`, the shorter way, would pass through binomial coefficients
    and cancel where keys are alike.
    """
    c = a.shape[-1]
    index = jnp.arange(c, dtype=jnp.int32)
    multiply = functools.partial(einsum, "...ij,...jk->...ik")

    def double(inverse, level):
        block = index >> level  # of width 2^level
        row, column = block[:, None], block[None]
        below = jnp.where(_leading((row == column + 1) & (row & 1 == 1), a), a, 0.0)
        return inverse - multiply(inverse, multiply(below, inverse)), None

    levels = jnp.arange((c - 1).bit_length(), dtype=jnp.int32)
    return lax.scan(double, jnp.broadcast_to(jnp.eye(c, dtype=jnp.float32), a.shape), levels)[0]


def split(x: Float32[Array, "T ..."], chunk: int) -> Float32[Array, "n c ..."]:
    """The tokens in chunks, with zeros after the last: they write nothing and decay nothing."""
    padding = [(0, -x.shape[0] % chunk)] + [(0, 0)] * (x.ndim - 1)
    return jnp.pad(x, padding).reshape(-1, chunk, *x.shape[1:])


def grouped(x: Array, axis: int, key_heads: int) -> Array:
    """Value heads at `axis` as [G, R]."""
    return x.reshape(*x.shape[:axis], key_heads, -1, *x.shape[axis + 1 :])


def _leading(mask: Bool[Array, "c c"], x: Array) -> Bool[Array, "..."]:
    """The mask with axes of size 1 before it, up to the rank of x."""
    return mask.reshape(*(1,) * (x.ndim - mask.ndim), *mask.shape)
