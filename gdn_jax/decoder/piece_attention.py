"""Full attention over a piece of a prompt: all its queries at once, over the keys and values kept so far and its own.

    o_t = sum_s softmax_s(q_t · k_s / sqrt(Hd)) v_s over the slots s <= position + t

Queries go in blocks, and for each of them the slots in blocks too, so that no more scores exist at once than one block
has with another, whatever the piece and the capacity. The softmax is taken as it goes: of the blocks so far, with m the
largest score, l = sum_s exp(s - m) and a = sum_s exp(s - m) v_s are carried, and rescaled where m grows; o = a / l.

A slot may hold anything where no token has been written, and NaN or infinities that a token led to: as in a step, they
reach that token and those behind it. A product over many slots would carry them to the tokens before, since 0 · NaN is
NaN: so it is given zeros instead, and what they reach is made NaN afterwards.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from gdn_jax.axes import Array, Float32, Int32
from gdn_jax.decoder.attention import Cache, gated, keep, ready
from gdn_jax.decoder.config import DecoderConfig
from gdn_jax.decoder.weights import AttentionWeights
from gdn_jax.fence import fence
from gdn_jax.ops import project_rows
from gdn_jax.products import einsum
from gdn_jax.rules import with_rules

__all__ = ["SLOTS", "attend_piece", "attention_piece", "queries_of_block"]

QUERIES, SLOTS = 512, 2048
"""Queries of all rows together, and slots, of a block: the scores of 24 heads then take 100 MB."""
_LEAST_QUERIES = 16
_NEVER = jnp.iinfo(jnp.int32).max


def attention_piece(
    w: AttentionWeights,
    cache: Cache,
    x: Float32[Array, "T B D"],
    position: Int32[Array, "B"],
    lengths: Int32[Array, "B"],
    *,
    cfg: DecoderConfig,
    layer: Int32[Array, ""],
    precision: str,
    implementation: str | None,
) -> tuple[Float32[Array, "T B D"], Cache]:
    """Carry attention layer `layer` of the stack over T tokens: x [T, B, D] -> y [T, B, D].

    In row b the tokens from `lengths[b]` on are padding: the cache does not get them, and their y means nothing. The
    others must fit it.
    """
    tokens, batch, hidden = x.shape
    project = functools.partial(project_rows, precision=precision, implementation=implementation, layer=layer)
    index = jnp.arange(tokens, dtype=jnp.int32)[:, None]
    places = position[None] + index
    with jax.named_scope("project_in"):
        q, k, v = fence(project((w.q, w.k, w.v), x.reshape(-1, hidden)))
        q, gate = jnp.split(q.reshape(-1, cfg.heads, 2 * cfg.head_dim), 2, axis=-1)
        k, v = (array.reshape(-1, cfg.kv_heads, cfg.head_dim) for array in (k, v))
    q, k = ready(q, k, (w.q_norm, w.k_norm), places.reshape(-1), layer, cfg)
    with jax.named_scope("cache"):
        # Padding is dropped beyond the end, every token in a slot of its own there.
        slots = jnp.where(index < lengths[None], places, cache.keys.shape[2] + index)
        k, v = (array.reshape(tokens, batch, *array.shape[1:]) for array in (k, v))
        cache = keep(cache, k, v, slots, layer)
    with jax.named_scope("attend"):
        q = q.reshape(tokens, batch, cfg.heads, cfg.head_dim)
        o = fence(attend_piece(q, cache, layer, position, lengths, precision=precision))
    with jax.named_scope("project_out"):
        [y] = project((w.o,), fence(gated(o.reshape(-1, cfg.queries), gate.reshape(-1, cfg.queries))))
    return fence(y).reshape(x.shape), cache


def attend_piece(
    q: Float32[Array, "T B Nq Hd"],
    cache: Cache,
    layer: Int32[Array, ""],
    position: Int32[Array, "B"],
    lengths: Int32[Array, "B"],
    *,
    precision: str = "exact",
) -> Float32[Array, "T B Nq Hd"]:
    """The attention of q, scaled, over layer `layer` of a cache [A, B, S, N, Hd] in which the piece is kept already.

    The loop over slots ends where the tokens do. A derivative needs it to end at a known slot, so it then goes over all
    of them, and so it does under `vmap`.
    """
    program = functools.partial(_in_blocks, precision=precision)
    whole = functools.partial(program, upto=lambda furthest, blocks: blocks)
    return with_rules(functools.partial(program, upto=jnp.minimum), whole, None)(q, cache, layer, position, lengths)


def queries_of_block(tokens: int, batch: int) -> int:
    """Queries of one row that are looked at at once."""
    return min(tokens, max(QUERIES // batch, _LEAST_QUERIES))


def _in_blocks(q, cache, layer, position, lengths, *, precision, upto):
    tokens, batch, heads, head_dim = q.shape
    size = queries_of_block(tokens, batch)
    queries = jnp.pad(q, ((0, -tokens % size), (0, 0), (0, 0), (0, 0)))
    # [blocks, B, N, R, queries, Hd] with R query heads to a key-value head, whose keys are never repeated.
    queries = queries.reshape(-1, size, batch, cache.keys.shape[3], heads // cache.keys.shape[3], head_dim)
    queries = jnp.moveaxis(queries, 1, -2)

    def attend(block_and_first):
        block, first = block_and_first
        return _attend(block, first, cache, layer, position, lengths, precision, upto)

    firsts = size * jnp.arange(queries.shape[0], dtype=jnp.int32)
    o = lax.map(attend, (queries, firsts))
    return jnp.moveaxis(o, -2, 1).reshape(-1, batch, heads, head_dim)[:tokens]


class _Sums(NamedTuple):
    """What a block of queries carries from one block of slots to the next."""

    most: Float32[Array, "B N R Q"]
    total: Float32[Array, "B N R Q"]
    weighted: Float32[Array, "B N R Q Hd"]
    spoilt: Int32[Array, "B N Hd"]
    """The first slot with a value that is not finite."""


def _attend(q, first, cache, layer, position, lengths, precision, upto):
    """A block of queries q [B, N, R, Q, Hd], the first of which is token `first` of the piece."""
    *_, queries, head_dim = q.shape
    capacity = cache.keys.shape[2]
    size = min(capacity, SLOTS)
    index = first + jnp.arange(queries, dtype=jnp.int32)
    places, valid = position[:, None] + index[None], index[None] < lengths[:, None]
    end = position + lengths

    def body(number, sums):
        begin = number * size
        start = jnp.minimum(begin, capacity - size)  # the last block overlaps the one before it
        slot = start + jnp.arange(size, dtype=jnp.int32)
        written = (slot >= begin)[None] & (slot[None] < end[:, None])
        seen = written[:, None] & (slot[None, None] <= places[:, :, None])
        # Behind a fence, or else XLA turns the whole cache around before the loop, for the sake of the products.
        kept = fence(tuple(_slots(stack, layer, start, size) for stack in cache))
        k, v = (jnp.where(written[:, :, None, None], array, 0.0) for array in kept)
        good = jnp.isfinite(v)
        bad = jnp.where(good, _NEVER, jnp.broadcast_to(slot[None, :, None, None], v.shape))
        scores = einsum("bnrqh,bsnh->bnrqs", q, k, precision=precision)
        scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
        most = lax.stop_gradient(jnp.maximum(sums.most, jnp.max(scores, axis=-1)))
        shares, before = jnp.exp(scores - most[..., None]), jnp.exp(sums.most - most)
        found = einsum("bnrqs,bsnh->bnrqh", shares, jnp.where(good, v, 0.0), precision=precision)
        return _Sums(
            most=most,
            total=sums.total * before + jnp.sum(shares, axis=-1),
            weighted=sums.weighted * before[..., None] + found,
            spoilt=jnp.minimum(sums.spoilt, jnp.min(bad, axis=1)),
        )

    # Not -inf, of which the difference is NaN where a query sees nothing, as in padding.
    nothing = jnp.full(q.shape[:-1], jnp.finfo(jnp.float32).min)
    start = _Sums(nothing, jnp.zeros_like(nothing), jnp.zeros_like(q), jnp.full((*q.shape[:2], head_dim), _NEVER))
    furthest = jnp.max(jnp.where(lengths > first, jnp.minimum(end, position + first + queries), 0))
    sums = lax.fori_loop(0, upto(-(-furthest // size), -(-capacity // size)), body, start)
    valid = valid[:, None, None, :, None]
    o = jnp.where(valid, sums.weighted / jnp.where(valid, sums.total[..., None], 1.0), 0.0)
    return jnp.where(places[:, None, None, :, None] >= sums.spoilt[:, :, None, None], jnp.nan, o)


def _slots(stack, layer, start, size):
    """Slots [B, size, N, Hd] of one layer, in float32."""
    _, batch, _, *head = stack.shape
    zero = jnp.int32(0)
    taken = lax.dynamic_slice(stack, (layer, zero, start, zero, zero), (1, batch, size, *head))
    return taken[0].astype(jnp.float32)
