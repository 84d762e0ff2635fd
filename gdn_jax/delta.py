"""The gated delta rule in plain XLA: its serial form, and its chunked form for whole sequences.

The chunked form, for one value head and a chunk of c tokens that finds S: with d(i, j) = exp(g_{j+1} + … + g_i)
the decay from token j to token i, and d(i) that from the chunk's beginning to token i, unrolling the serial form gives

    u_i = beta_i · (v_i - d(i) · Sᵀk_i - sum_{j < i} d(i, j) · (k_i · k_j) · u_j)
    o_i = d(i) · Sᵀq_i + sum_{j ≤ i} d(i, j) · (q_i · k_j) · u_j
    S' = d(c) · S + sum_j d(c, j) · k_j u_jᵀ

of which the first line is a unit-lower-triangular system in the u of the chunk. All that does not depend on S is
computed for all chunks at once; then S goes from chunk to chunk.

Axes of this module beside the glossary's: n chunks, c tokens in a chunk.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from gdn_jax.axes import Array, Bool, Float32, Int32
from gdn_jax.products import einsum

__all__ = ["CHUNK", "CleanForm", "clean_chunks", "delta_chunk", "delta_step", "first_tokens", "valid_tokens"]

CHUNK = 64
"""Tokens per chunk, unless told otherwise."""

_WRITES = 8
"""Tokens whose writes to S are summed by one matrix product."""

type CleanForm = Callable[..., tuple[Array, Array]]
"""The chunked form of clean operands: called as `clean_chunks` is, without `chunk`."""


def delta_step(
    s: Float32[Array, "B H K V"],
    q: Float32[Array, "B G K"],
    k: Float32[Array, "B G K"],
    v: Float32[Array, "B H V"],
    beta: Float32[Array, "B H"],
    g: Float32[Array, "B H"],
) -> tuple[Float32[Array, "B H V"], Float32[Array, "B H K V"]]:
    """One token of the gated delta rule, per value head: decay, correct, write, read.

    S ← S · exp(g);  u = beta · (v - Sᵀk);  S ← S + k uᵀ;  o = Sᵀq, with the updated S.

    q and k come normalised, q also scaled. Value head h uses key head h // R (grouped, R = H / G). Returns o and S.
    """
    q, k = (_per_value_head(x, v.shape[1]) for x in (q, k))
    s = s * jnp.exp(g)[..., None, None]
    u = beta[..., None] * (v - jnp.sum(s * k[..., None], axis=-2))
    s = s + k[..., None] * u[..., None, :]
    return jnp.sum(s * q[..., None], axis=-2), s


def delta_chunk(
    s: Float32[Array, "B H K V"],
    q: Float32[Array, "T B G K"],
    k: Float32[Array, "T B G K"],
    v: Float32[Array, "T B H V"],
    beta: Float32[Array, "T B H"],
    g: Float32[Array, "T B H"],
    *,
    lengths: Int32[Array, "B"] | None = None,
    segment_ids: Int32[Array, "T B"] | None = None,
    precision: str = "exact",
    form: CleanForm | None = None,
) -> tuple[Float32[Array, "T B H V"], Float32[Array, "B H K V"]]:
    """T tokens of `delta_step`, a chunk of them at a time: o of every token, and S after the last.

    In row b the tokens from `lengths[b]` on are padding: o is 0 there, S is that of the last token before, and a row
    without tokens keeps S bit for bit. Where `segment_ids` changes from one token to the next, a document begins: S
    is zeroed. The first document continues the given S. g may be -inf, which is a full reset; it must not be positive.
    Keys have a length of at most 1 and beta lies in 0 … 1, as a layer makes them: S is then bounded. (Beyond, it may
    overflow inside a chunk, which other documents in the same chunk would meet.)

    NaN and infinities stay where the serial form keeps them: in their row, and from their token to the end of their
    document; within these in one value column, if they come in v or S. What they reach is NaN, and carries no gradient.
    So `form`, which carries out the chunks (`clean_chunks` unless given), sees none of them.

    `precision`: "exact", or "bf16" for products of operands rounded to bfloat16; decays, the triangular system and S
    are float32 in both.
    """
    tokens, batch, heads, _ = v.shape
    if tokens == 0:
        return jnp.zeros_like(v), s
    index = jnp.arange(tokens, dtype=jnp.int32)[:, None]
    valid = valid_tokens(lengths, tokens, batch)
    first = first_tokens(segment_ids, valid)

    spoilt, spoilt_end = _reach_of_non_finite(s, k, v, beta, g, first, valid)
    mute = ~jnp.all(jnp.isfinite(q), axis=-1)
    calm_s, q, k, v, beta = (jnp.where(jnp.isfinite(x), x, 0.0) for x in (s, q, k, v, beta))
    q, k, v, beta, g = (jnp.where(_trailing(valid, x), x, 0.0) for x in (q, k, v, beta, jnp.where(g < jnp.inf, g, 0.0)))
    g = jnp.where(_trailing(first == index, g), -jnp.inf, g)

    o, end = (form or clean_chunks)(calm_s, q, k, v, beta, g, precision=precision)
    o = jnp.where(spoilt | jnp.repeat(mute, heads // mute.shape[2], axis=2)[..., None], jnp.nan, o)
    end = jnp.where(spoilt_end[:, :, None], jnp.nan, end)
    return jnp.where(_trailing(valid, o), o, 0.0), jnp.where(_trailing(valid[0], s), end, s)


def clean_chunks(
    s: Float32[Array, "B H K V"],
    q: Float32[Array, "T B G K"],
    k: Float32[Array, "T B G K"],
    v: Float32[Array, "T B H V"],
    beta: Float32[Array, "T B H"],
    g: Float32[Array, "T B H"],
    *,
    precision: str = "exact",
    chunk: int = CHUNK,
) -> tuple[Float32[Array, "T B H V"], Float32[Array, "B H K V"]]:
    """`delta_chunk` of T ≥ 1 tokens that are all finite, but that g may be -inf; padding is k = v = beta = g = 0.

    Raises:
        ValueError: `chunk` is below 1.
    """
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
    tokens, batch, heads, columns = v.shape
    chunks = _chunks(q, k, v, beta, g, min(chunk, tokens), precision)
    o, end = _over_chunks(_grouped(s, 1, q.shape[2]), chunks, precision)
    return jnp.moveaxis(o, -2, 1).reshape(-1, batch, heads, columns)[:tokens], end.reshape(s.shape)


def valid_tokens(lengths: Int32[Array, "B"] | None, tokens: int, batch: int) -> Bool[Array, "T B"]:
    """Which tokens are not padding."""
    if lengths is None:
        return jnp.ones((tokens, batch), jnp.bool_)
    return jnp.arange(tokens, dtype=jnp.int32)[:, None] < lengths[None]


def first_tokens(segment_ids: Int32[Array, "T B"] | None, valid: Bool[Array, "T B"]) -> Int32[Array, "T B"]:
    """For every token the index of its document's first token; -1 in the first document, which began before.

    Padding belongs to the last document.
    """
    before = jnp.full((1, valid.shape[1]), -1, jnp.int32)
    if segment_ids is None:
        return jnp.broadcast_to(before, valid.shape)
    index = jnp.arange(1, valid.shape[0], dtype=jnp.int32)[:, None]
    starts = jnp.where(valid[1:] & (segment_ids[1:] != segment_ids[:-1]), index, -1)
    return lax.cummax(jnp.concatenate([before, starts]), axis=0)


class _Chunks(NamedTuple):
    """All that the chunks need beside S."""

    keys_and_queries: Float32[Array, "n B G 2c K"]
    v: Float32[Array, "n B G R c V"]
    beta: Float32[Array, "n B G R c"]
    solve: Float32[Array, "n B G R c c"]
    """The inverse of the triangular system."""
    scores: Float32[Array, "n B G R c c"]
    """d(i, j) · (q_i · k_j) for j ≤ i."""
    decay_in: Float32[Array, "n B G R c"]
    """d(i), from the chunk's beginning."""
    decay_out: Float32[Array, "n B G R c"]
    """d(c, j), to the chunk's end."""


def _chunks(q: Array, k: Array, v: Array, beta: Array, g: Array, chunk: int, precision: str) -> _Chunks:
    key_heads = q.shape[2]
    q, k = (jnp.moveaxis(_split(x, chunk), 1, -2) for x in (q, k))
    v = jnp.moveaxis(_grouped(_split(v, chunk), 3, key_heads), 1, -2)
    beta, g = (jnp.moveaxis(_grouped(_split(x, chunk), 3, key_heads), 1, -1) for x in (beta, g))
    keys_and_queries = jnp.concatenate([k, q], axis=-2)
    products = einsum("nbgik,nbgjk->nbgij", keys_and_queries, k, precision=precision)[:, :, :, None]
    overlaps, scores = jnp.split(products, 2, axis=-2)
    seen = jnp.tri(chunk, dtype=jnp.bool_)
    decay = jnp.where(_leading(seen, g[..., None]), jnp.exp(_segment_sums(g)), 0.0)
    earlier = _leading(jnp.tri(chunk, k=-1, dtype=jnp.bool_), g[..., None])
    system = jnp.where(earlier, beta[..., None] * decay * overlaps, 0.0)
    return _Chunks(
        keys_and_queries=keys_and_queries,
        v=v,
        beta=beta,
        solve=_unit_lower_inverse(system),
        scores=decay * scores,
        decay_in=jnp.exp(jnp.cumsum(g, axis=-1)),
        decay_out=decay[..., -1, :],
    )


def _over_chunks(
    s: Float32[Array, "B G R K V"], chunks: _Chunks, precision: str
) -> tuple[Float32[Array, "n B G R c V"], Float32[Array, "B G R K V"]]:
    weighted = functools.partial(einsum, "bgrij,bgrjv->bgriv", precision=precision)

    def body(s, now):
        c = now.v.shape[-2]
        read = einsum("bgck,bgrkv->bgrcv", now.keys_and_queries, s, precision=precision)
        read = read * jnp.concatenate([now.decay_in] * 2, axis=-1)[..., None]
        u = weighted(now.solve, now.beta[..., None] * (now.v - read[..., :c, :]))
        o = read[..., c:, :] + weighted(now.scores, u)
        written = _sum_of_writes(now.keys_and_queries[..., :c, :], now.decay_out[..., None] * u, precision)
        return now.decay_in[..., -1, None, None] * s + written, o

    s, o = lax.scan(body, s, chunks)
    return o, s


def _sum_of_writes(
    k: Float32[Array, "B G c K"], u: Float32[Array, "B G R c V"], precision: str
) -> Float32[Array, "B G R K V"]:
    """sum_j k_j u_jᵀ, in partial sums of `_WRITES` consecutive tokens.

    Where keys are alike, each write takes back most of the one before. Sums in the order of the tokens, as in the
    serial form, then stay small; a matrix product adds in an order of its own, in which they grow and are rounded more.
    """
    k, u = (_split(jnp.moveaxis(x, -2, 0), _WRITES) for x in (k, u))
    return jnp.sum(einsum("mcbgk,mcbgrv->mbgrkv", k, u, precision=precision), axis=0)


def _segment_sums(g: Float32[Array, "... c"]) -> Float32[Array, "... c c"]:
    """L[i, j] = g_{j+1} + … + g_i, and 0 for j ≥ i.

    Each sum is taken over its own terms. As the difference of two prefix sums it would lose what a strong decay before
    token j leaves below its last digit, and be NaN after a full reset.
    """
    later = _leading(jnp.tri(g.shape[-1], k=-1, dtype=jnp.bool_), g[..., None])
    return jnp.cumsum(jnp.where(later, g[..., None], 0.0), axis=-2)


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


def _reach_of_non_finite(
    s: Array, k: Array, v: Array, beta: Array, g: Array, first: Array, valid: Array
) -> tuple[Bool[Array, "T B H V"], Bool[Array, "B H V"]]:
    """Where S has taken in anything that is not finite: at each token, and after the last.

    A product with a masked NaN is NaN, so matrix products over a chunk would carry it to earlier tokens and to other
    documents. They are given zeros instead, and what the serial form would have spoilt is spoilt afterwards.
    """
    tokens, _, heads, _ = v.shape
    bad_key = jnp.repeat(~jnp.all(jnp.isfinite(k), axis=-1), heads // k.shape[2], axis=2)
    bad_token = bad_key | ~jnp.isfinite(beta) | ~(g < jnp.inf)
    bad = valid[:, :, None, None] & (bad_token[..., None] | ~jnp.isfinite(v))
    bad_before = ~jnp.all(jnp.isfinite(s), axis=-2)
    index = jnp.arange(tokens, dtype=jnp.int32)[:, None, None, None]
    # The last index that was bad: -1 for S itself, as the first document's first token; -2 for none.
    latest = lax.cummax(jnp.where(bad, index, jnp.where(bad_before, -1, -2)[None]), axis=0)
    spoilt = latest >= _trailing(first, latest)
    return spoilt, spoilt[-1]


def _split(x: Float32[Array, "T ..."], chunk: int) -> Float32[Array, "n c ..."]:
    """The tokens in chunks, with zeros after the last: they write nothing and decay nothing."""
    padding = [(0, -x.shape[0] % chunk)] + [(0, 0)] * (x.ndim - 1)
    return jnp.pad(x, padding).reshape(-1, chunk, *x.shape[1:])


def _grouped(x: Array, axis: int, key_heads: int) -> Array:
    """Value heads at `axis` as [G, R]."""
    return x.reshape(*x.shape[:axis], key_heads, -1, *x.shape[axis + 1 :])


def _trailing(mask: Array, x: Array) -> Array:
    """The mask with axes of size 1 behind it, up to the rank of x."""
    return mask.reshape(*mask.shape, *(1,) * (x.ndim - mask.ndim))


def _leading(mask: Bool[Array, "c c"], x: Array) -> Bool[Array, "..."]:
    """The mask with axes of size 1 before it, up to the rank of x."""
    return mask.reshape(*(1,) * (x.ndim - mask.ndim), *mask.shape)


def _per_value_head(x, value_heads):
    """[B, G, K] -> [B, H, K], each key head repeated R times in a row."""
    return jnp.repeat(x, value_heads // x.shape[1], axis=1)
