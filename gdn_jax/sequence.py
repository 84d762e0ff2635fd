"""A GDN layer over whole sequences: all tokens at once, but for S, which goes from chunk to chunk."""

import functools
import operator
import typing
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from gdn_jax import ops
from gdn_jax.axes import Array, Float32, Int32
from gdn_jax.border import Weights, check_request
from gdn_jax.config import GdnConfig
from gdn_jax.delta import delta_chunk, first_tokens, valid_tokens
from gdn_jax.fence import fence
from gdn_jax.gates import log_decay, write_strength
from gdn_jax.norms import gated_rms_norm, l2_normalise
from gdn_jax.slot import run_on_slot
from gdn_jax.state import GdnState
from gdn_jax.weights import GdnStack, GdnWeights

__all__ = ["prefill", "unchecked_prefill"]


@typing.no_type_check
def prefill(
    w: Weights,
    state: GdnState,
    xs: Array,
    *,
    cfg: GdnConfig,
    layer=0,
    lengths=None,
    segment_ids=None,
    precision: str = "exact",
    implementation: str | None = None,
) -> tuple[Array, GdnState]:
    """Carry one layer over a sequence by chunks of 64 tokens: xs [T, B, D] -> ys [T, B, D] and the next state.

    What `scan` computes, but for rounding, in about T / 64 steps instead of T: between chunks S is carried, and within
    them the delta rule is a triangular system. Sequences may be cut anywhere: prefilling the parts one after the other,
    and then calling `step`, goes on from the same state. Derivatives are in reverse mode alone (`jax.grad`, `jax.vjp`);
    forward mode needs `scan`.

    Rounding in the delta rule is relative to the largest value of a chunk, in `scan` to a token's own. That differs
    where a large v or S is overwritten under the same key within a chunk: after one v a thousand times as large as the
    rest, 3.5e-4 of a later token's output of the rule instead of 5e-7, with equal keys, beta = 0.98 and no decay.

    `lengths` int [B]: row b has tokens 0 … lengths[b] - 1, and the rest of xs is padding that is never used, NaN
    included. ys is 0 there and the state is that after the last token; a row of length 0 keeps its state bit for bit.
    `segment_ids` int [T, B]: packed documents. Where the id changes from one token to the next, S and the convolution's
    history start at zero, and nothing of one document reaches another. The first document continues the given state.
    (Padding on the left is a first document, with an id of its own.) T = 0 and B = 0 return the state.

    NaN and infinities in xs reach what they reach in `scan`: their row, from their token to the end of its document.
    Finite values near the largest float32 may reach all of their row, other documents too, as NaN: entries of S or of
    the rule's v above 2^124, or 2^108 where the kernel computes the chunks at "exact", K up to 128.

    Plain function: it is not jitted and donates nothing. Use

        jax.jit(gdn.prefill, static_argnames=("cfg", "precision", "implementation"), donate_argnames=("state",))

    `implementation` chooses the products with 4-bit weights and the chunks, as for `step`; a name that `step` refuses
    is refused. Products with float32 weights are plain XLA under every name. Weights and `layer` as for `step`,
    `precision` too; and it may be "bf16": products of operands rounded to bfloat16 and summed in float32, but for 4-bit
    weights, which stay exact, and b and a. S, the history, gates and norms are float32 in every precision.

    Raises:
        ValueError: as `step`; `lengths` or `segment_ids` of a wrong shape; lengths outside 0 … T (traced, they count as
        the nearer end, whatever their type). TypeError: as `step`; `lengths` or `segment_ids` that are not integers.
        StateMismatchError, UnsupportedError: as `step`.
    """
    check_request(w, state, xs, "T B D", cfg, layer, precision, implementation, precisions=ops.PROMPT_PRECISIONS)
    tokens, batch = xs.shape[:2]
    lengths = _check_lengths(lengths, tokens, batch)
    segment_ids = _check_segment_ids(segment_ids, tokens, batch)
    return unchecked_prefill(w, state, xs, cfg, layer, lengths, segment_ids, precision, implementation)


def unchecked_prefill(
    w: Any,
    state: GdnState,
    xs: Float32[Array, "T B D"],
    cfg: GdnConfig,
    layer: Any,
    lengths: Int32[Array, "B"] | None,
    segment_ids: Int32[Array, "T B"] | None,
    precision: str,
    implementation: str | None,
) -> tuple[Float32[Array, "T B D"], GdnState]:
    """`prefill` without its checks, for callers within the library that have made them."""
    if ops.choose_delta_layer(state.S, implementation).implementation == "xla":
        implementation = "xla"
    how = {"precision": precision, "implementation": implementation}

    def all_tokens(slot, xs, lengths, segment_ids):
        # Of a stack the products read their layer where it lies.
        stacked = isinstance(w, GdnStack)
        large = w.layers.large if stacked else slot.weights.large
        project = functools.partial(_project, layer=slot.at if stacked else None, **how)
        rule = functools.partial(
            delta_chunk,
            lengths=lengths,
            segment_ids=segment_ids,
            precision=precision,
            form=functools.partial(ops.delta_chunks, implementation=implementation),
        )
        ys, carry = _advance(slot.weights, large, slot.carry, xs, lengths, segment_ids, cfg, project, rule)
        return slot.finish(carry, ys)

    # The slot is XLA's whatever carries out the products, since the chunks are.
    return run_on_slot(all_tokens, w, state, (xs, lengths, segment_ids), cfg, layer, precision, "xla")


def _advance(
    w: GdnWeights,
    large: Any,
    carry: tuple[Float32[Array, "B H K V"], Float32[Array, "B P C"]],
    xs: Float32[Array, "T B D"],
    lengths: Int32[Array, "B"] | None,
    segment_ids: Int32[Array, "T B"] | None,
    cfg: GdnConfig,
    project: Callable[..., list[Array]],
    rule: Callable[..., tuple[Array, Array]],
) -> tuple[Float32[Array, "T B D"], tuple[Float32[Array, "B H K V"], Float32[Array, "B P C"]]]:
    """The seven steps for all tokens, stage by stage behind fences, as in `stages.advance`.

    `project(matrices, xs)` multiplies with the `large` matrices, which may be stacked; w is one layer's. `rule` is
    `delta_chunk` of this sequence.
    """
    tokens, batch, _ = xs.shape
    if xs.size == 0:  # no tokens, or no rows
        return xs, carry
    # Zeroed at both ends: what padding holds, NaN included, reaches no gradient either.
    s, history, xs = fence((*carry, _without_padding(xs, lengths)))
    with jax.named_scope("project_in"):
        xc, z = project((large.qkv, large.z), xs)
        b, a = _project((w.b, w.a), xs, precision="exact", implementation="xla")
        xc, z, b, a = fence((xc, z.reshape(tokens, batch, cfg.value_heads, cfg.value_dim), b, a))
    with jax.named_scope("gates"):
        beta, g = fence((write_strength(b), log_decay(a, w.dt_bias, w.A_log)))
    with jax.named_scope("conv"):
        xcv, history = fence(_convolve(history, xc, w.conv, lengths, segment_ids))
    with jax.named_scope("qk_norm"):
        q, k, v = jnp.split(xcv, (cfg.key_channels, 2 * cfg.key_channels), axis=-1)
        q, k = (l2_normalise(heads.reshape(tokens, batch, cfg.key_heads, cfg.key_dim)) for heads in (q, k))
        q, k = fence((q * jnp.float32(cfg.key_dim**-0.5), k))
    with jax.named_scope("delta_rule"):
        on, s = fence(rule(s, q, k, v.reshape(z.shape), beta, g))
    with jax.named_scope("gated_norm"):
        onn = fence(gated_rms_norm(on, w.norm, z, cfg.norm_eps))
    with jax.named_scope("project_out"):
        [ys] = project((large.out,), onn.reshape(tokens, batch, cfg.value_channels))
    return _without_padding(ys, lengths), (s, history)


def _without_padding(xs: Float32[Array, "T B D"], lengths: Int32[Array, "B"] | None) -> Float32[Array, "T B D"]:
    """`xs` with zeros from each row's length on."""
    if lengths is None:
        return xs
    return jnp.where(valid_tokens(lengths, *xs.shape[:2])[:, :, None], xs, 0.0)


def _project(matrices: tuple[Any, ...], xs: Float32[Array, "T B I"], **how: Any) -> list[Float32[Array, "T B O"]]:
    """Products with every token of every row."""
    found = ops.project_rows(matrices, xs.reshape(-1, xs.shape[-1]), **how)
    return [y.reshape(*xs.shape[:2], -1) for y in found]


def _convolve(
    history: Float32[Array, "B P C"],
    xc: Float32[Array, "T B C"],
    weight: Float32[Array, "C W"],
    lengths: Int32[Array, "B"] | None,
    segment_ids: Int32[Array, "T B"] | None,
) -> tuple[Float32[Array, "T B C"], Float32[Array, "B P C"]]:
    """`conv_step` for all tokens: frames of an earlier document count as zero, also in the history that is left."""
    tokens, batch, _ = xc.shape
    past = history.shape[1]
    frames = jnp.concatenate([jnp.swapaxes(history, 0, 1), xc])
    first = first_tokens(segment_ids, valid_tokens(lengths, tokens, batch))

    def seen(first, index):
        """Whether the frame of token `index` (negative: of the history) belongs to a document that began at `first`."""
        return ((first < 0) | (index >= first))[..., None]

    index = jnp.arange(tokens, dtype=jnp.int32)[:, None]
    taps = [
        jnp.where(seen(first, index + (j - past)), frames[j : j + tokens], 0.0) * weight[None, None, :, j]
        for j in range(past + 1)
    ]
    xcv = jax.nn.silu(functools.reduce(operator.add, taps))

    lengths = jnp.full((batch,), tokens, jnp.int32) if lengths is None else jnp.clip(lengths, 0, tokens)
    kept = jnp.arange(past, dtype=jnp.int32)[:, None] + lengths[None]
    newest = jnp.take_along_axis(frames, kept[..., None], axis=0)
    return xcv, jnp.swapaxes(jnp.where(seen(first[-1:], kept - past), newest, 0.0), 0, 1)


def _check_lengths(lengths: Any, tokens: int, batch: int) -> Any:
    """`lengths` as int32 [B]; refused outside 0 … T where their values are known, and taken as the nearer end else."""
    lengths = _check_integers("lengths", lengths, "B", (batch,))
    if lengths is None:
        return None
    if not isinstance(lengths, Tracer):
        values = np.asarray(lengths)
        if np.any((values < 0) | (values > tokens)):
            raise ValueError(f"lengths must lie in 0 … {tokens} (the tokens of xs), got {values.tolist()}")
    elif not _is_narrow(lengths):
        lengths = jnp.clip(lengths, 0, tokens)
    return jnp.asarray(lengths, jnp.int32)


def _check_segment_ids(segment_ids: Any, tokens: int, batch: int) -> Any:
    """`segment_ids` as int32 [T, B]: as they are, or numbers that change where ids change that int32 may not hold."""
    segment_ids = _check_integers("segment_ids", segment_ids, "T B", (tokens, batch))
    if segment_ids is None:
        return None
    if not _is_narrow(segment_ids):
        numpy = jnp if isinstance(segment_ids, jax.Array) else np
        segment_ids = (segment_ids != numpy.roll(segment_ids, 1, axis=0)).cumsum(axis=0)
    return jnp.asarray(segment_ids, jnp.int32)


def _check_integers(name: str, value: Any, axes: str, shape: tuple[int, ...]) -> Any:
    """`value` as an array of integers of `shape`, or None."""
    if value is None:
        return None
    if not isinstance(value, jax.Array):
        value = _as_numpy(name, value, axes)
    if not np.issubdtype(value.dtype, np.integer):
        raise TypeError(f"{name} must be integers [{axes}], got {value.dtype}; convert them to int32")
    if value.shape != shape:
        raise ValueError(f"{name} must be [{axes}] = {list(shape)}, got shape {list(value.shape)}")
    return value


def _as_numpy(name: str, value: Any, axes: str) -> np.ndarray:
    try:
        array = np.asarray(value)
    except ValueError:
        raise ValueError(f"{name} must be integers [{axes}], got rows of different lengths: {value!r}") from None
    # numpy takes a list of nothing for floats.
    return array if array.size or hasattr(value, "dtype") else array.astype(np.int32)


def _is_narrow(integers: Any) -> bool:
    """Whether int32 holds every value of their type."""
    return np.can_cast(integers.dtype, np.int32)
