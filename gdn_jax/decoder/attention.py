"""Full attention with an output gate, one token at a time, over keys and values kept in the state.

    [q, gate] = W_q x (per head), k = W_k x, v = W_v x
    q, k      = RoPE(norm(q)), RoPE(norm(k))
    o         = sum_s softmax_s(q · k_s / sqrt(Hd)) v_s over the tokens s so far, this one included
    y         = W_o (o · sigmoid(gate))

Query head h uses key-value head h // (N_q / N). Scores and sums are multiply-and-add in float32: a dot would be rounded
to TF32 on some GPUs, and its library would read a copy of the cache. Slots that hold no token yet have no part in the
softmax, so what lies there is never seen. On a GPU all that lies between the projections is three kernels, which read
the slots up to the position; here it is written for XLA, which reads all of them.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint

from gdn_jax.axes import Array, Bool, Float32, Int32
from gdn_jax.decoder.config import DecoderConfig
from gdn_jax.decoder.weights import AttentionWeights, of_layer
from gdn_jax.fence import fence
from gdn_jax.norms import rms_norm
from gdn_jax.ops import (
    Activations,
    attend_from_cache,
    attend_limbs,
    choose_attend,
    elementwise,
    project,
    project_many,
)
from gdn_jax.rules import with_rules

__all__ = ["Cache", "attend", "attention_step", "gated", "keep", "ready", "rotate"]

_CHUNK = 64
"""Slots per partial sum, in capacities that divide by it."""


class Cache(NamedTuple):
    """Keys and values [A, B, S, N, Hd] of all attention layers."""

    keys: Array
    values: Array


def attention_step(
    w: AttentionWeights,
    cache: Cache,
    x: Float32[Array, "B D"] | Activations,
    position: Int32[Array, "B"],
    writes: Bool[Array, "B"],
    *,
    cfg: DecoderConfig,
    layer: Int32[Array, ""],
    precision: str,
    implementation: str | None,
) -> tuple[Float32[Array, "B D"], Cache]:
    """Carry attention layer `layer` of the stack one token forward: x [B, D] -> y [B, D].

    Rows where `writes` is false leave the cache as it is; their y means nothing. x may have T·B rows, row t·B + b being
    token t of sequence b, each at a `position` of its own: those that follow each other see each other, as T steps do.
    """
    rows = position.shape[0]
    with jax.named_scope("project_in"):
        q, k, v = fence(
            project_many((w.q, w.k, w.v), x, precision=precision, implementation=implementation, layer=layer)
        )
        k, v = (array.reshape(rows, cfg.kv_heads, cfg.head_dim) for array in (k, v))
        heads = _Heads(q.reshape(rows, cfg.heads, 2 * cfg.head_dim), k, v)
    operands = (w.q_norm, w.k_norm), cache, heads, position, writes, layer
    choice = choose_attend(cache.keys, cfg.heads, implementation)
    if choice.implementation == "xla":
        o, gate, cache = _by_xla(*operands, cfg=cfg)
        how = {"consumers": (w.o,), "precision": precision, "implementation": implementation}
        with jax.named_scope("project_out"):
            made = elementwise(gated, o, gate, **how)
    else:
        limbs = attend_limbs(w.o, cache.keys, cfg.heads, rows, precision, implementation)
        program = functools.partial(_by_kernels, cfg=cfg, limbs=limbs, interpret=choice.implementation == "interpret")
        # Limbs go to a kernel that has no such rules either.
        made, cache = (program if limbs else with_rules(program, _gated_by_xla(cfg), implementation))(*operands)
    with jax.named_scope("project_out"):
        return fence(project(w.o, made, precision=precision, implementation=implementation, layer=layer)), cache


class _Heads(NamedTuple):
    """What is projected from the input of a layer, by head."""

    q: Array
    """float32 [B, Nq, 2·Hd], the query and then its gate."""
    k: Array
    """float32 [B, N, Hd]."""
    v: Array
    """float32 [B, N, Hd]."""


def _by_kernels(norms, cache, heads, position, writes, layer, *, cfg, limbs, interpret):
    """The gated output [B, Nq·Hd], in limbs if there are to be any, and the cache."""
    frequencies = jnp.asarray(_frequencies(cfg.rotary_dim, cfg.rope_theta))
    with jax.named_scope("attend"):
        made, keys, values = attend_from_cache(
            *(*heads, *norms, *cache, layer, position, writes, frequencies),
            norm_eps=cfg.norm_eps,
            limbs=limbs,
            interpret=interpret,
        )
    return made, Cache(keys, values)


def _by_xla(norms, cache, heads, position, writes, layer, *, cfg):
    """The output and its gate, [B, Nq·Hd] both, and the cache."""
    q, gate = jnp.split(heads.q, 2, axis=-1)
    q, k = ready(q, heads.k, norms, position, layer, cfg)
    batch, capacity = cache.keys.shape[1:3]
    tokens = position.shape[0] // batch
    with jax.named_scope("cache"):
        # Beyond the end they are dropped, every token in a slot of its own there.
        beyond = capacity + jnp.arange(position.shape[0], dtype=jnp.int32) // batch
        slots = jnp.where(writes, position, beyond)
        k, v, slots = (_by_token(x, tokens) for x in (k, heads.v, slots))
        cache = keep(cache, k, v, slots, layer)
    with jax.named_scope("attend"):
        kept = (of_layer(cache.keys, layer), of_layer(cache.values, layer))
        if tokens == 1:
            o = fence(attend(q, *kept, position))
        else:
            by_token = tuple(_by_token(x, tokens) for x in (q, position))
            o = fence(jax.lax.map(lambda token: attend(token[0], *kept, token[1]), by_token))
    return *(x.reshape(-1, cfg.queries) for x in (o, gate)), cache


def _by_token(x: Array, tokens: int) -> Array:
    """Rows [T·B, …] as [T, B, …], or as they are where there is one token of each sequence."""
    return x if tokens == 1 else x.reshape(tokens, -1, *x.shape[1:])


def _gated_by_xla(cfg):
    def program(*operands):
        o, gate, cache = _by_xla(*operands, cfg=cfg)
        return gated(o, gate), cache

    return program


def gated(o: Array, gate: Array) -> Array:
    """The output of attention behind its gate."""
    return o * jax.nn.sigmoid(gate)


def ready(
    q: Float32[Array, "M Nq Hd"],
    k: Float32[Array, "M N Hd"],
    norms: tuple[Array, Array],
    position: Int32[Array, "M"],
    layer: Int32[Array, ""],
    cfg: DecoderConfig,
) -> tuple[Array, Array]:
    """Queries, scaled, and keys of M tokens, as they meet: normed by `q_norm` and `k_norm` [A, Hd], and turned."""
    with jax.named_scope("qk_norm_rope"):
        q, k = (
            rotate(rms_norm(x, of_layer(norm, layer), cfg.norm_eps), position, cfg.rotary_dim, cfg.rope_theta)
            for x, norm in zip((q, k), norms, strict=True)
        )
        return fence((q * jnp.float32(cfg.head_dim**-0.5), k))


def rotate(x: Float32[Array, "B N Hd"], position: Int32[Array, "B"], rotary_dim: int, theta: float) -> Array:
    """RoPE: components i and i + rd/2 of the first rd of a head turn by position · theta^(-2i/rd); the rest stay."""
    half = rotary_dim // 2
    frequencies = jnp.asarray(_frequencies(rotary_dim, theta))
    angles = position.astype(jnp.float32)[:, None, None] * frequencies[None, None]
    cos, sin = (jnp.broadcast_to(part, (*x.shape[:2], half)) for part in (jnp.cos(angles), jnp.sin(angles)))
    first, second, rest = jnp.split(x, (half, rotary_dim), axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def _frequencies(rotary_dim: int, theta: float) -> np.ndarray:
    """theta^(-2i/rd), float32 [rd/2]."""
    return (theta ** (-2 * np.arange(rotary_dim // 2) / rotary_dim)).astype(np.float32)


def attend(
    q: Float32[Array, "B Nq Hd"], keys: Array, values: Array, position: Int32[Array, "B"]
) -> Float32[Array, "B Nq Hd"]:
    """softmax(q · k_s) v over the slots s <= position; keys and values [B, S, N, Hd] of float32 or bfloat16."""
    batch, heads, head_dim = q.shape
    capacity, kv_heads = keys.shape[1:3]
    # Everything in the order of the cache, B S N R Hd with R query heads to a key-value head: it is read as it lies.
    q = q.reshape(batch, 1, kv_heads, heads // kv_heads, head_dim)
    keys, values = (array.astype(jnp.float32)[:, :, :, None] for array in (keys, values))
    seen = (jnp.arange(capacity)[None] <= position[:, None])[:, :, None, None]
    scores = fence(jnp.where(seen, jnp.sum(q * keys, axis=-1), -jnp.inf))
    shares = fence(jax.nn.softmax(scores, axis=1))
    # A share of 0 does not hide an inf or NaN in its slot.
    terms = shares[..., None] * jnp.where(seen[..., None], values, jnp.float32(0))
    # In two levels, which is more exact, and keeps XLA from turning the values around for one long sum.
    chunk = _CHUNK if capacity % _CHUNK == 0 else capacity
    partial = fence(jnp.sum(terms.reshape(batch, -1, chunk, *terms.shape[2:]), axis=2))
    return jnp.sum(partial, axis=1).reshape(batch, heads, head_dim)


def keep(cache: Cache, k: Array, v: Array, slots: Array, layer: Array) -> Cache:
    """k and v [..., B, N, Hd] put into `slots` [..., B] of their rows, in place where the cache is donated or carried.

    No slot may be named twice in a row; what is to go beyond the capacity is dropped.
    """
    rows = jnp.broadcast_to(jnp.arange(slots.shape[-1]), slots.shape)

    def put(stack, new):
        written = stack.at[layer, rows, slots].set(new.astype(stack.dtype), mode="drop", unique_indices=True)
        # Or else XLA turns the whole cache around before the layers and back after them, once per token.
        return with_layout_constraint(written, Layout(tuple(range(stack.ndim))))

    return Cache(put(cache.keys, k), put(cache.values, v))
