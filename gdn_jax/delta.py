"""The gated delta rule in plain XLA: its serial form, and its chunked form for whole sequences of any content.

The chunks themselves are in `chunks`, their derivatives in `delta_backward`.
"""

import functools
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax

from gdn_jax.axes import Array, Bool, Float32, Int32
from gdn_jax.chunks import CHUNK, by_chunks
from gdn_jax.delta_backward import with_backward
from gdn_jax.errors import UnsupportedError
from gdn_jax.integers import positive_int

__all__ = ["CHUNK", "CleanForm", "clean_chunks", "delta_chunk", "delta_step", "first_tokens", "valid_tokens"]

_PRECISIONS = ("exact", "bf16")

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
    Keys have a length of at most 1 and beta lies in 0 … 1, as a layer makes them: no token then adds more to a column
    of S than its v. Beyond, S may overflow inside a chunk, and so it may where it is near the largest float32 already:
    with an entry of v or S above 2^124 (2^108 where the kernel computes "exact"), K up to 128, o and S may become NaN
    in the whole row, in its other documents too, while the serial form spoils one document at most.

    Rounding: an error is relative to the largest value that the chunk has held, one that was overwritten under the same
    key included; in the serial form it fades with that value. With one key for all tokens, beta = 0.98 and no decay, a
    v[3] a thousand times as large as the others leaves an error of 3.5e-4 of a later token's o, serially 5e-7.

    NaN and infinities stay where the serial form keeps them: in their row, and from their token to the end of their
    document; within these in one value column, if they come in v or S. What they reach is NaN, and carries no gradient.
    So `form`, which carries out the chunks (`clean_chunks` unless given), sees none of them.

    `precision`: "exact", or "bf16" for products of operands rounded to bfloat16; decays, the triangular system and S
    are float32 in both. Derivatives are in reverse mode alone: `jax.jvp` raises TypeError, and needs `delta_step` in a
    `lax.scan`.

    Raises:
        UnsupportedError: as `form`; `clean_chunks` refuses an unknown precision.
    """
    tokens, batch, heads, _ = v.shape
    if v.size == 0:
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

    Derivatives are those of `delta_backward`, in reverse mode alone; where g is -inf its gradient is 0.

    Raises:
        ValueError: `chunk` is below 1. TypeError: it is not an integer. UnsupportedError: an unknown precision.
    """
    if precision not in _PRECISIONS:
        raise UnsupportedError(f"precision must be one of {', '.join(_PRECISIONS)}, got {precision!r}")
    how = {"precision": precision, "chunk": min(positive_int("chunk", chunk), v.shape[0])}
    return with_backward(functools.partial(by_chunks, **how), **how)(s, q, k, v, beta, g)


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


def _trailing(mask: Array, x: Array) -> Array:
    """The mask with axes of size 1 behind it, up to the rank of x."""
    return mask.reshape(*mask.shape, *(1,) * (x.ndim - mask.ndim))


def _per_value_head(x, value_heads):
    """[B, G, K] -> [B, H, K], each key head repeated R times in a row."""
    return jnp.repeat(x, value_heads // x.shape[1], axis=1)
