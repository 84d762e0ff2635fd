"""The whole decoder: token ids in, logits and the next state out; one token at a time, or a prompt at once."""

import typing
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gdn_jax.axes import Array, Bool, Float32, Int32
from gdn_jax.border import check_active
from gdn_jax.decoder.attention import Cache
from gdn_jax.decoder.block import Flow, Mixer, Settings, block_step, blocks
from gdn_jax.decoder.border import check_decode, check_lengths
from gdn_jax.decoder.config import DecoderConfig
from gdn_jax.decoder.piece import Piece, piece_block
from gdn_jax.decoder.state import DecoderState
from gdn_jax.decoder.weights import DecoderWeights
from gdn_jax.fence import fence
from gdn_jax.layer import unchecked_step
from gdn_jax.norms import rms_norm
from gdn_jax.ops import PROMPT_PRECISIONS, project
from gdn_jax.q4 import Q4Tensor, dequantize

__all__ = [
    "Read",
    "acceptable",
    "acceptable_lengths",
    "decode_step",
    "embed",
    "hidden_piece",
    "hidden_step",
    "logits_of",
    "marked_logits",
    "prefill_tokens",
    "read_piece",
    "through_layers",
]


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
    """Carry prompts forward, all tokens at once: tokens int32 [B, T] -> logits [B, vocab] after each row's last token.

    Row b has the first `lengths[b]` of its tokens (int32 [B]; None: all T); what stands after them is not looked at,
    but must be a token id. A row of length 0 gets logits 0 and keeps its state. What steps of `decode_step` compute,
    but for rounding: GDN layers go by chunks of 64 tokens, attention layers by blocks of queries, and everything else
    has all tokens as the rows of a product. A prompt may be fed in parts, each continuing where the one before ended.

    A row is refused from the token on that cannot be taken (the state is full, or a traced token lies outside the
    vocabulary): its logits are NaN, and its state is that before this token. A traced length above T means T, below 0
    means 0.

    `precision` may also be "bf16": products of operands rounded to bfloat16 and summed in float32, but for 4-bit
    weights, which stay exact, and the head, which has one row a sequence. S, norms, gates and softmax are float32.

    Everything else, and the jit line, as for `decode_step`.
    """
    tokens = check_decode(weights, state, tokens, "B T", cfg, precision, implementation, precisions=PROMPT_PRECISIONS)
    lengths = check_lengths(lengths, state.batch, tokens.shape[1])
    read = read_piece(weights, state, tokens, lengths, Settings(cfg, precision, implementation))
    return read.logits, read.state


def _decode_step(
    weights: Any, state: Any, tokens: Int32[Array, "B"], active: Bool[Array, "B"] | None, settings: Settings
) -> tuple[Float32[Array, "B vocab"], Any]:
    wanted = jnp.ones_like(tokens, bool) if active is None else active
    writes = wanted & acceptable(tokens, state.position, state, settings.cfg)
    hidden, state = hidden_step(weights, state, tokens, writes, settings)
    return marked_logits(logits_of(weights, hidden, settings), wanted, writes), state


class Read(NamedTuple):
    """What came of reading a piece."""

    logits: Float32[Array, "B vocab"]
    """After each row's last token."""
    state: Any
    hidden: Float32[Array, "B T D"]
    """Of every token, after the final norm; beyond a row's length it means nothing."""


def read_piece(
    weights: Any, state: Any, tokens: Int32[Array, "B T"], lengths: Int32[Array, "B"], settings: Settings
) -> Read:
    """`prefill_tokens` without its checks, and with what the model made of every token."""
    batch, count = tokens.shape
    if count == 0:
        logits, hidden = ((batch, settings.cfg.vocab), (batch, 0, settings.cfg.hidden))
        return Read(jnp.zeros(logits, jnp.float32), state, jnp.zeros(hidden, jnp.float32))
    lengths = jnp.clip(lengths, 0, count)
    taken = acceptable_lengths(tokens, lengths, state, settings.cfg)
    hidden, state = hidden_piece(weights, state, tokens, taken, settings)
    last = jnp.maximum(taken - 1, 0)
    logits = logits_of(weights, jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0], settings)
    wanted = lengths > 0
    return Read(marked_logits(logits, wanted, wanted & (taken == lengths)), state, hidden)


def acceptable_lengths(
    tokens: Int32[Array, "B T"], lengths: Int32[Array, "B"], state: DecoderState, cfg: DecoderConfig
) -> Int32[Array, "B"]:
    """How many of the first `lengths` (0 … T, T ≥ 1) tokens can be taken: those before the first that cannot."""
    index = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    refused = (index < lengths[:, None]) & ~acceptable(tokens, state.position[:, None] + index, state, cfg)
    return jnp.where(jnp.any(refused, axis=1), jnp.argmax(refused, axis=1).astype(jnp.int32), lengths)


def hidden_step(
    weights: Any, state: Any, tokens: Int32[Array, "B"], writes: Bool[Array, "B"], settings: Settings
) -> tuple[Float32[Array, "B D"], Any]:
    """One token through the model up to its final norm, for the rows where `writes` is true.

    The other rows keep their state, and their result means nothing.
    """

    def gdn_step(memory, h, cfg, layer):
        return unchecked_step(weights.gdn, memory, h, cfg, layer, writes, settings.precision, settings.implementation)

    x = fence(embed(weights.embed, tokens))
    cache = Cache(state.keys, state.values)
    hidden, memory, cache = through_layers(weights, x, state.gdn, cache, state.position, writes, settings, gdn_step)
    return hidden, DecoderState(memory, cache.keys, cache.values, state.position + writes.astype(jnp.int32))


def through_layers(
    weights: Any,
    x: Float32[Array, "M D"],
    memory: Any,
    cache: Cache,
    position: Int32[Array, "M"],
    writes: Bool[Array, "M"],
    settings: Settings,
    gdn_step: Mixer,
) -> tuple[Float32[Array, "M D"], Any, Cache]:
    """Embedded tokens through all layers, as `block_step` has them, and through the final norm."""

    def block(flow, plan, place):
        return block_step(weights, flow, position, writes, plan, place, settings, gdn_step)

    x, y, memory, cache = blocks(Flow(x, jnp.zeros_like(x), memory, cache), settings.cfg, block)
    return fence(rms_norm(fence(x + y), weights.norm, settings.cfg.norm_eps)), memory, cache


def hidden_piece(
    weights: Any, state: Any, tokens: Int32[Array, "B T"], lengths: Int32[Array, "B"], settings: Settings
) -> tuple[Float32[Array, "B T D"], Any]:
    """The first `lengths` tokens of every row through the model and its final norm, all at once.

    They are acceptable, and lengths lie in 0 … T, T ≥ 1. The results of other tokens mean nothing.
    """
    batch = tokens.shape[0]
    x = fence(embed(weights.embed, tokens.T.reshape(-1)))
    flow = Flow(x, jnp.zeros_like(x), state.gdn, Cache(state.keys, state.values))
    piece = Piece(state.position, lengths)

    def block(flow, plan, place):
        return piece_block(weights, flow, piece, plan, place, settings)

    x, y, memory, cache = blocks(flow, settings.cfg, block, loop_alike=True)
    hidden = fence(rms_norm(fence(x + y), weights.norm, settings.cfg.norm_eps))
    hidden = jnp.swapaxes(hidden.reshape(-1, batch, settings.cfg.hidden), 0, 1)
    return hidden, DecoderState(memory, cache.keys, cache.values, state.position + lengths)


def embed(matrix: Any, tokens: Int32[Array, "M"]) -> Float32[Array, "M D"]:
    """The rows of the embedding that the tokens name; tokens outside the vocabulary get some row."""
    rows = jax.tree.map(lambda leaf: jnp.take(leaf, tokens, axis=0, mode="clip"), matrix)
    return dequantize(rows) if isinstance(rows, Q4Tensor) else rows.astype(jnp.float32)


def logits_of(weights: Any, hidden: Float32[Array, "B D"], settings: Settings) -> Float32[Array, "B vocab"]:
    """The output head, which is the embedding where the two are tied. It has no bf16: it is exact instead."""
    matrix = weights.embed if weights.head is None else weights.head
    precision = "exact" if settings.precision == "bf16" else settings.precision
    with jax.named_scope("head"):
        return project(matrix, hidden, precision=precision, implementation=settings.implementation)


def acceptable(tokens: Array, places: Array, state: DecoderState, cfg: DecoderConfig) -> Array:
    """Which tokens are of the vocabulary, and have room in the state at the place where each is to stand."""
    return (tokens >= 0) & (tokens < cfg.vocab) & (places < state.capacity)


def marked_logits(logits: Array, wanted: Array, written: Array) -> Array:
    """Logits [..., vocab], but 0 where a token was not wanted, and NaN where it was and could not be written."""
    otherwise = jnp.where(wanted, jnp.float32(jnp.nan), jnp.float32(0))
    return jnp.where(written[..., None], logits, otherwise[..., None])
