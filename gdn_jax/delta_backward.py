"""The backward pass of the chunked gated delta rule, in the notation of `chunks`.

Let x̄ be the gradient of a scalar with respect to x. A chunk is given ō, and S̄' by the chunk after it, and hands S̄ to
the one before. Reading the chunk's four lines backwards,

    ū = Aᵀ ō + d(c, i) · k S̄'
    w̄ = Tᵀ ū                        of w = beta · r
    S̄ = d(c) · S̄' + qᵀ (d(i) · ō) - kᵀ (d(i) · beta · w̄)
    v̄ = beta · w̄

and since u = T w gives du = T (dw - dN u), nothing has to be differentiated through the inverse:

    N̄ = -w̄ uᵀ,    Ā = ō uᵀ
    beta̅_i = w̄_i · r_i + sum_{j < i} N̄_ij · d(i, j) · (k_i · k_j)

With N° = N̄ · beta_i · d(i, j) below the diagonal and A° = Ā · d(i, j) up to it, the gradients of the products k_i · k_j
and q_i · k_j,

    q̄ = d(i) · ō Sᵀ + A° k
    k̄ = -d(i) · beta · w̄ Sᵀ + d(c, i) · u S̄'ᵀ + (N° + N°ᵀ) k + A°ᵀ q

Every decay is the exponential of a sum of g, so it passes on its gradient times itself to each g of its sum:

    ḡ_l = sum_{j < l ≤ i} E_ij + sum_{i ≥ l} E_i
    E_ij = N°_ij · (k_i · k_j) + A°_ij · (q_i · k_j),    and for i = c also d(c, j) · k_jᵀ S̄' u_j
    E_i = d(i) · (q_iᵀ S ō_i - beta_i · k_iᵀ S w̄_i),    and for i = c also d(c) · <S, S̄'>

No exponent occurs but within a decay. So where g is -inf every term that has it is 0, ḡ is 0 there, and nothing flows
across. The sums over j < l ≤ i are taken as they stand: as differences of row and column sums they would cancel.

Nothing but the operands is kept from the forward pass, which therefore may be any form, a kernel's too. S is computed
again, first at the beginning of every span of chunks, then span after span, the last one first, within it. All that
does not depend on S̄' is computed for the chunks of a span at once.

So between the passes a token takes 4 (2 G K + H V + 2 H) bytes and a sequence one S, and in the backward pass also one
S a span and the work of one span. With 16 key and 48 value heads of 128 x 128 that is 41 kB a token; autodiff of the
same form keeps all chunks' intermediates and those of the inverse. Temporaries of both passes over 4096 tokens, on a
CPU: 1.07 GB, against 2.83 GB (experiments/results/chunk_gradients-cpu.jsonl).
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from gdn_jax.axes import Array, Float32
from gdn_jax.chunks import CHUNK, Chunks, Pairs, by_chunks, earlier, grouped, in_chunks, split, sum_of_writes, writes
from gdn_jax.products import einsum

__all__ = ["with_backward"]

_SPAN = 16
"""Chunks of a span, those of all rows together: the more, the fewer launches, and the more memory."""

type _Operands = tuple[Array, ...]
"""s, q, k, v, beta, g, or their gradients."""


def with_backward(
    form: Callable[..., tuple[Array, Array]], *, precision: str = "exact", chunk: int = CHUNK
) -> Callable[..., tuple[Array, Array]]:
    """`form(s, q, k, v, beta, g)`, which computes what `delta.clean_chunks` does, with the gradients of this module.

    Products are rounded as `precision` has them rounded in the forward pass, and all else is float32. Reverse mode
    only: `jax.jvp` raises TypeError. Second derivatives are left to autodiff of both passes, with what that keeps.
    """

    @jax.custom_vjp
    def rule(*operands):
        return form(*operands)

    def forward(*operands):
        return form(*operands), operands

    def backward(operands, cotangents):
        return _gradients(operands, cotangents, precision, chunk)

    rule.defvjp(forward, backward)
    return rule


def _gradients(operands: _Operands, cotangents: tuple[Array, Array], precision: str, chunk: int) -> _Operands:
    """Of all operands, from those of o [T, B, H, V] and of S [B, H, K, V] after the last token."""
    s, *tokens = operands
    do, ds = cotangents
    length, batch = do.shape[:2]
    chunk = min(chunk, length)
    count = -(-length // chunk)
    spans = -(-count // max(1, _SPAN // batch))
    *tokens, do = (split(x, -(-count // spans) * chunk) for x in (*tokens, do))

    def forth(s, now):
        return by_chunks(s, *now, precision=precision, chunk=chunk)[1], s

    def back(ds, now):
        s, tokens, do = now
        ds, *found = _of_span((s, *tokens), do, ds, precision, chunk)
        return ds, found

    _, starts = lax.scan(forth, s, tokens)
    ds, found = lax.scan(back, ds, (starts, tokens, do), reverse=True)
    return ds, *(x.reshape(-1, *x.shape[2:])[:length] for x in found)


def _of_span(
    operands: _Operands, do: Float32[Array, "T B H V"], ds: Float32[Array, "B H K V"], precision: str, chunk: int
) -> _Operands:
    """`_gradients` of tokens that are whole chunks."""
    s, q, *others = operands
    group = functools.partial(grouped, key_heads=q.shape[2])
    product = functools.partial(einsum, precision=precision)
    chunks, pairs = in_chunks(q, *others, chunk=chunk, precision=precision)
    do = jnp.moveaxis(group(split(do, chunk), 3), 1, -2)
    found, r, u = _states(group(s, 1), chunks, precision)
    ds, after, dw, dread = _walk(group(ds, 1), do, chunks, precision)

    dn, da = (product("...iv,...jv->...ij", x, u) for x in (-dw, do))
    dn, da = earlier(dn) * pairs.decay, da * pairs.decay
    dbeta = jnp.sum(dw * r, axis=-1) + jnp.sum(dn * pairs.keys, axis=-1)
    dn = chunks.beta[..., None] * dn
    of_reads = product("...cv,...kv->...ck", dread, found)
    of_writes = product("...cv,...kv->...ck", chunks.decay_out[..., None] * u, after)
    held = chunks.decay_in[..., -1] * jnp.sum(found * after, axis=(-2, -1))
    dg = _of_decays(of_reads, of_writes, held, dn, da, chunks, pairs)
    dq, dk = _of_queries_and_keys(of_reads, of_writes, dn, da, chunks, precision)

    rows = zip((dq, dk, chunks.beta[..., None] * dw), operands[1:4], strict=True)
    factors = zip((dbeta, dg), operands[4:], strict=True)
    return (
        ds.reshape(s.shape),
        *(jnp.moveaxis(x, -2, 1).reshape(like.shape) for x, like in rows),
        *(jnp.moveaxis(x, -1, 1).reshape(like.shape) for x, like in factors),
    )


def _states(
    s: Float32[Array, "B G R K V"], chunks: Chunks, precision: str
) -> tuple[Float32[Array, "n B G R K V"], Float32[Array, "n B G R c V"], Float32[Array, "n B G R c V"]]:
    """S as every chunk finds it, r and u."""

    def body(s, now):
        read = now.decay_in[..., None] * einsum("bgck,bgrkv->bgrcv", _keys(now), s, precision=precision)
        r, u, after = writes(s, read, now, precision)
        return after, (s, r, u)

    return lax.scan(body, s, chunks)[1]


def _walk(
    ds: Float32[Array, "B G R K V"], do: Float32[Array, "n B G R c V"], chunks: Chunks, precision: str
) -> tuple[
    Float32[Array, "B G R K V"],
    Float32[Array, "n B G R K V"],
    Float32[Array, "n B G R c V"],
    Float32[Array, "n B G R both V"],
]:
    """S̄ of the first chunk; S̄' and w̄ of every chunk, and the gradient of what it reads, k S and q S."""
    product = functools.partial(einsum, precision=precision)

    def body(after, here):
        do, now = here
        of_writes = now.decay_out[..., None] * product("bgck,bgrkv->bgrcv", _keys(now), after)
        du = product("bgrij,bgriv->bgrjv", now.scores, do) + of_writes
        dw = product("bgrij,bgriv->bgrjv", now.solve, du)
        dread = jnp.concatenate([-now.beta[..., None] * dw, do], axis=-2)
        dread = jnp.concatenate([now.decay_in] * 2, axis=-1)[..., None] * dread
        ds = now.decay_in[..., -1, None, None] * after + sum_of_writes(now.keys_and_queries, dread, precision)
        return ds, (after, dw, dread)

    ds, found = lax.scan(body, ds, (do, chunks), reverse=True)
    return ds, *found


def _of_decays(
    of_reads: Float32[Array, "n B G R both K"],
    of_writes: Float32[Array, "n B G R c K"],
    held: Float32[Array, "n B G R"],
    dn: Float32[Array, "n B G R c c"],
    da: Float32[Array, "n B G R c c"],
    chunks: Chunks,
    pairs: Pairs,
) -> Float32[Array, "n B G R c"]:
    """ḡ, from the parts of k̄ and q̄ that go through S and from N° and A°; `held` is d(c) · <S, S̄'>."""
    at_reads = jnp.sum(of_reads * chunks.keys_and_queries[:, :, :, None], axis=-1)
    at_writes = jnp.sum(of_writes * _keys(chunks)[:, :, :, None], axis=-1)
    from_start = jnp.sum(jnp.stack(jnp.split(at_reads, 2, axis=-1)), axis=0)
    between = earlier(dn * pairs.keys + da * pairs.queries)
    # From token l on, then over all tokens before it: those of i = c belong to every l.
    between = lax.cumsum(between, axis=between.ndim - 2, reverse=True) + at_writes[..., None, :]
    from_start = lax.cumsum(from_start, axis=from_start.ndim - 1, reverse=True) + held[..., None]
    return jnp.sum(earlier(between), axis=-1) + from_start


def _of_queries_and_keys(
    of_reads: Float32[Array, "n B G R both K"],
    of_writes: Float32[Array, "n B G R c K"],
    dn: Float32[Array, "n B G R c c"],
    da: Float32[Array, "n B G R c c"],
    chunks: Chunks,
    precision: str,
) -> tuple[Float32[Array, "n B G c K"], Float32[Array, "n B G c K"]]:
    """q̄ and k̄: sums over the value heads of a key head."""
    product = functools.partial(einsum, precision=precision)
    of_pairs = jnp.sum(jnp.concatenate([dn, da], axis=-2), axis=3)
    as_i = jnp.sum(of_reads, axis=3) + product("...ij,...jk->...ik", of_pairs, _keys(chunks))
    as_j = jnp.sum(of_writes, axis=3) + product("...ij,...ik->...jk", of_pairs, chunks.keys_and_queries)
    dk, dq = jnp.split(as_i, 2, axis=-2)
    return dq, dk + as_j


def _keys(chunks: Chunks) -> Float32[Array, "... c K"]:
    return chunks.keys_and_queries[..., : chunks.v.shape[-2], :]
