"""A GDN layer and the whole decoder as Flax NNX modules: the pure functions, with weights and state in variables.

    model = HybridDecoder(cfg, weights, batch=1, capacity=4096)
    step = nnx.jit(lambda model, tokens: model(tokens), donate_argnums=0)
    logits = step(model, tokens)                 # int32 [B] -> float32 [B, vocab]; the state moves on by itself

Without donation each call copies the state. Donated with the model are its weights too: other references to them end.

Weights are `nnx.Param` where they are floating point, so that gradients and optimisers find them, and `Frozen` where
they are 4-bit codes. The state is `nnx.Cache`. What the functions promise, they promise here: see `gdn_jax.step` and
`gdn_jax.decoder.model`.
"""

import typing
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from gdn_jax.axes import Array
from gdn_jax.config import GdnConfig
from gdn_jax.decoder.config import DecoderConfig
from gdn_jax.decoder.model import decode_step, prefill_tokens
from gdn_jax.decoder.state import DecoderState, init_decoder_state
from gdn_jax.decoder.weights import DecoderWeights
from gdn_jax.layer import scan, step
from gdn_jax.state import GdnState, init_state
from gdn_jax.weights import GdnWeights

__all__ = ["Frozen", "GatedDeltaNet", "HybridDecoder"]


class Frozen(nnx.Variable):
    """Weights that have no gradient: 4-bit codes and all that stands with them."""


def _variable(weights: Any) -> nnx.Variable:
    trainable = all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(weights))
    return nnx.Param(weights) if trainable else Frozen(weights)


class _Recurrent(nnx.Module):
    """Weights and state in variables, and one way to call a function that takes both and returns the next state."""

    def __init__(self, weights: Any, state: Any, **settings: Any):
        self.weights = _variable(weights)
        self.state = nnx.Cache(state)
        self._settings = settings

    def _advance(self, function: Any, x: Any, **arguments: Any) -> Array:
        made, state = function(self.weights.get_value(), self.state.get_value(), x, **arguments, **self._settings)
        self.state.set_value(state)
        return made

    def reset(self) -> None:
        """Set the state to zero: every sequence starts anew."""
        self.state.set_value(jax.tree.map(jnp.zeros_like, self.state.get_value()))


class GatedDeltaNet(_Recurrent):
    """One GDN layer for B sequences, which remembers them: `weights` as of `gdn_jax.load_layer`."""

    @typing.no_type_check
    def __init__(
        self,
        cfg: GdnConfig,
        weights: GdnWeights,
        *,
        batch: int = 1,
        precision: str = "exact",
        implementation: str | None = None,
    ):
        state: GdnState = init_state(cfg, layers=1, batch=batch)
        super().__init__(weights, state, cfg=cfg, precision=precision, implementation=implementation)

    @typing.no_type_check
    def __call__(self, x: Array, *, active=None) -> Array:
        """One token: x [B, D] -> y [B, D]; see `gdn_jax.step`."""
        return self._advance(step, x, active=active)

    @typing.no_type_check
    def scan(self, xs: Array, *, active=None) -> Array:
        """A sequence: xs [T, B, D] -> ys [T, B, D]; see `gdn_jax.scan`."""
        return self._advance(scan, xs, active=active)


class HybridDecoder(_Recurrent):
    """A whole decoder for B sequences of up to `capacity` tokens: `cfg` and `weights` as of `load_decoder`."""

    @typing.no_type_check
    def __init__(
        self,
        cfg: DecoderConfig,
        weights: DecoderWeights,
        *,
        batch: int = 1,
        capacity: int,
        kv_dtype: str = "float32",
        precision: str = "exact",
        implementation: str | None = None,
    ):
        state: DecoderState = init_decoder_state(cfg, batch=batch, capacity=capacity, kv_dtype=kv_dtype)
        super().__init__(weights, state, cfg=cfg, precision=precision, implementation=implementation)

    @typing.no_type_check
    def __call__(self, tokens: Array, *, active=None) -> Array:
        """One token: int32 [B] -> logits [B, vocab]; see `decode_step`."""
        return self._advance(decode_step, tokens, active=active)

    @typing.no_type_check
    def prefill(self, tokens: Array, *, lengths=None) -> Array:
        """Prompts: int32 [B, T] -> logits [B, vocab] after each row's last token; see `prefill_tokens`."""
        return self._advance(prefill_tokens, tokens, lengths=lengths)
