"""The whole decoder: token ids in, logits and the next state out; one token at a time, or a prompt."""

import typing
from typing import Any

import jax
import jax.numpy as jnp

from gdn_jax.axes import Array, Bool, Float32, Int32
from gdn_jax.border import check_active
from gdn_jax.decoder.attention import Cache
from gdn_jax.decoder.block import Flow, Settings, blocks
from gdn_jax.decoder.border import check_decode, check_lengths
from gdn_jax.decoder.config import DecoderConfig
from gdn_jax.decoder.state import DecoderState
from gdn_jax.decoder.weights import DecoderWeights
from gdn_jax.fence import fence
from gdn_jax.norms import rms_norm
from gdn_jax.ops import project
from gdn_jax.q4 import Q4Tensor, dequantize

__all__ = ["decode_step", "embed", "hidden_step", "logits_of", "prefill_tokens"]


@typing.no_type_check
def decode_step(
    weights: DecoderWeights,
    state: DecoderState,
    tokens: Array,
    *,
    cfg: DecoderConfig,
    active=None,
    precision: str = "exact",
    implementation: str | None = None,
) -> tuple[Array, DecoderState]:
    """Carry every sequence one token forward: tokens int32 [B] -> logits float32 [B, vocab] and the next state.

    Rows are independent, each at a position of its own. `active` bool [B]: a False row gets logits 0, and its state
    stays untouched, bit for bit, its position included. `precision` and `implementation` as for `gdn_jax.step`; full
    attention is XLA's where its kernels do not take it, under every name.

    What can only be seen on the device cannot be raised there. A row whose state is full (its position has reached the
    capacity), or whose token lies outside the vocabulary while it is traced, is refused by itself: its logits are NaN,
    and its state stays untouched.

    Plain function: it is not jitted and donates nothing. Without donation each call copies the whole state, so use

        jax.jit(decode_step, static_argnames=("cfg", "precision", "implementation"), donate_argnames=("state",))

    Raises:
        ValueError: a wrong shape, a token outside the vocabulary, an unknown implementation, weights that do not belong
        to `cfg`. TypeError: a wrong type or dtype. StateMismatchError: a state of another geometry. UnsupportedError: a
        precision or a named implementation that cannot be had.
    """
    tokens = check_decode(weights, state, tokens, "B", cfg, precision, implementation)
    active = check_active(active, (state.batch,))
    return _decode_step(weights, state, tokens, active, Settings(cfg, precision, implementation))


@typing.no_type_check
def prefill_tokens(
    weights: DecoderWeights,
    state: DecoderState,
    tokens: Array,
    *,
    cfg: DecoderConfig,
    lengths=None,
    precision: str = "exact",
    implementation: str | None = None,
) -> tuple[Array, DecoderState]:
    """Carry prompts forward on the device: tokens int32 [B, T] -> logits [B, vocab] after each row's last token.

    Row b has the first `lengths[b]` of its tokens (int32 [B]; None: all T); what stands after them is not looked at,
    but must be a token id. A row of length 0 gets logits 0 and keeps its state. The same arithmetic as steps of
    `decode_step`, whose logits nobody asks for.

    A row is refused from the token on that cannot be taken (the state is full, or a traced token lies outside the
    vocabulary): its logits are NaN, and its state is that before this token. A traced length above T means T, below 0
    means 0.

    Everything else, and the jit line, as for `decode_step`.
    """
    tokens = check_decode(weights, state, tokens, "B T", cfg, precision, implementation)
    lengths = check_lengths(lengths, state.batch, tokens.shape[1])
    return _prefill_tokens(weights, state, tokens, lengths, Settings(cfg, precision, implementation))


def _decode_step(
    weights: Any, state: Any, tokens: Int32[Array, "B"], active: Bool[Array, "B"] | None, settings: Settings
) -> tuple[Float32[Array, "B vocab"], Any]:
    wanted = jnp.ones_like(tokens, bool) if active is None else active
    writes = wanted & _acceptable(state, tokens, settings.cfg)
    hidden, state = hidden_step(weights, state, tokens, writes, settings)
    return _marked(logits_of(weights, hidden, settings), wanted, writes), state


def _prefill_tokens(
    weights: Any, state: Any, tokens: Int32[Array, "B T"], lengths: Int32[Array, "B"], settings: Settings
) -> tuple[Float32[Array, "B vocab"], Any]:
    batch = tokens.shape[0]

    def body(carry, now):
        state, last, refused, step = carry
        wanted = step < lengths
        writes = wanted & ~refused & _acceptable(state, now, settings.cfg)
        hidden, state = hidden_step(weights, state, now, writes, settings)
        last = jnp.where(writes[:, None], hidden, last)
        return (state, last, refused | (wanted & ~writes), step + 1), None

    nothing = jnp.zeros((batch, settings.cfg.hidden), jnp.float32), jnp.zeros((batch,), bool), jnp.int32(0)
    (state, last, refused, _), _ = jax.lax.scan(body, (state, *nothing), tokens.T)
    wanted = jnp.minimum(lengths, tokens.shape[1]) > 0
    return _marked(logits_of(weights, last, settings), wanted, wanted & ~refused), state


def hidden_step(
    weights: Any, state: Any, tokens: Int32[Array, "B"], writes: Bool[Array, "B"], settings: Settings
) -> tuple[Float32[Array, "B D"], Any]:
    """One token through the model up to its final norm, for the rows where `writes` is true.

    The other rows keep their state, and their result means nothing.
    """
    x = fence(embed(weights.embed, tokens))
    flow = Flow(x, jnp.zeros_like(x), state.gdn, Cache(state.keys, state.values))
    x, y, memory, cache = blocks(weights, flow, state.position, writes, settings)
    hidden = fence(rms_norm(fence(x + y), weights.norm, settings.cfg.norm_eps))
    return hidden, DecoderState(memory, cache.keys, cache.values, state.position + writes.astype(jnp.int32))


def embed(matrix: Any, tokens: Int32[Array, "B"]) -> Float32[Array, "B D"]:
    """The rows of the embedding that the tokens name; tokens outside the vocabulary get some row."""
    rows = jax.tree.map(lambda leaf: jnp.take(leaf, tokens, axis=0, mode="clip"), matrix)
    return dequantize(rows) if isinstance(rows, Q4Tensor) else rows.astype(jnp.float32)


def logits_of(weights: Any, hidden: Float32[Array, "B D"], settings: Settings) -> Float32[Array, "B vocab"]:
    """The output head, which is the embedding where the two are tied."""
    matrix = weights.embed if weights.head is None else weights.head
    with jax.named_scope("head"):
        return project(matrix, hidden, precision=settings.precision, implementation=settings.implementation)


def _acceptable(state: DecoderState, tokens: Array, cfg: DecoderConfig) -> Array:
    """The rows whose token is one of the vocabulary, and has room in the state."""
    return (tokens >= 0) & (tokens < cfg.vocab) & (state.position < state.capacity)


def _marked(logits: Array, wanted: Array, written: Array) -> Array:
    """0 in the rows that were not wanted, NaN in those that were and could not be."""
    otherwise = jnp.where(wanted, jnp.float32(jnp.nan), jnp.float32(0))
    return jnp.where(written[:, None], logits, otherwise[:, None])
