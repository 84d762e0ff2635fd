"""What a request to a decoder must look like: checked here once, before any work."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from gdn_jax import ops
from gdn_jax.axes import Array
from gdn_jax.decoder.config import DecoderConfig
from gdn_jax.decoder.state import check_decoder_state
from gdn_jax.decoder.weights import check_decoder_weights
from gdn_jax.require import require_array, require_kind

__all__ = ["check_decode", "check_lengths"]


def check_decode(
    weights: Any,
    state: Any,
    tokens: Any,
    axes: str,
    cfg: Any,
    precision: str,
    implementation: str | None,
    *,
    precisions: Mapping[str, tuple[str, ...]] = ops.PRECISIONS,
) -> Array:
    """The tokens as an int32 array, in a request that is well formed.

    `axes` names their axes, `precisions` are those of every tier.

    Raises:
        As documented in `decode_step`.
    """
    require_kind("cfg", cfg, DecoderConfig)
    ops.check_implementation(implementation)
    check_decoder_weights(weights, cfg)
    ops.check_precision(precision, "q4" if weights.tier == "q4" else "f32", precisions)
    check_decoder_state(state, cfg)
    require_array("tokens (ids; images and embeddings are not taken)", tokens, "int32")
    if tokens.ndim != len(axes.split()) or tokens.shape[0] != state.batch:
        raise ValueError(f"tokens must be [{axes}] with B={state.batch} (the state's batch), got shape {tokens.shape}")
    if not isinstance(tokens, Tracer):
        ids = np.asarray(tokens)
        if (outside := ids[(ids < 0) | (ids >= cfg.vocab)]).size:
            raise ValueError(f"tokens must lie in 0 … {cfg.vocab - 1} (the vocabulary), got {outside[:4].tolist()}")
    return jnp.asarray(tokens)


def check_lengths(lengths: Any, batch: int, tokens: int) -> Array:
    """`lengths` as int32 [B]; None means that every row has all tokens.

    Raises:
        TypeError: not an int32 array. ValueError: another shape, or a concrete length outside 0 … T.
    """
    if lengths is None:
        return jnp.full((batch,), tokens, jnp.int32)
    require_array("lengths", lengths, "int32")
    if lengths.shape != (batch,):
        raise ValueError(f"lengths must be [B] with B={batch}, got shape {lengths.shape}")
    if not isinstance(lengths, Tracer):
        values = np.asarray(lengths)
        if ((values < 0) | (values > tokens)).any():
            raise ValueError(f"lengths must lie in 0 … {tokens} (the tokens given), got {values.tolist()}")
    return jnp.asarray(lengths)
