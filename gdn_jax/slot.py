"""One slot of a stacked state, carried through tokens by XLA or by the GPU's kernels, with one protocol for both.

A slot has `carry`, what a loop over tokens carries; `advance(carry, x, active) -> (carry, stages)`; and
`finish(carry, y) -> (y, state)`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer

from gdn_jax import ops
from gdn_jax.axes import Array, Int32
from gdn_jax.config import GdnConfig
from gdn_jax.launches import advance_in_place
from gdn_jax.rules import with_rules
from gdn_jax.stages import Stages, advance_active
from gdn_jax.state import GdnState
from gdn_jax.weights import GdnStack, GdnWeights

__all__ = ["run_on_slot"]


def run_on_slot(
    program: Callable[..., Any],
    w: Any,
    state: GdnState,
    operands: tuple[Any, ...],
    cfg: GdnConfig,
    layer: Any,
    precision: str,
    implementation: str | None,
    *,
    keep: bool = False,
) -> Any:
    """`program(slot, *operands)` on slot `layer` of the state, in the implementation that is chosen or named.

    With `keep` the stages that the slot advances by hold every intermediate, else only their `out` is sure to be there.
    """
    if isinstance(w, tuple):
        w = w[int(layer)]
    choice = ops.choose_delta_layer(state.S, implementation)
    if choice.implementation == "xla":
        return program(_Sliced.take(w, state, layer, cfg, precision), *operands)
    large = w.layers.large if isinstance(w, GdnStack) else w.large
    ops.check_products(large, precision, implementation)

    def by_kernels(w, state, layer, operands):
        return program(_InPlace.take(w, state, layer, cfg, precision, implementation, keep), *operands)

    def by_xla(w, state, layer, operands):
        return program(_Sliced.take(w, state, layer, cfg, precision), *operands)

    return with_rules(by_kernels, by_xla, implementation)(w, state, jnp.asarray(layer, jnp.int32), operands)


class _Sliced(NamedTuple):
    """For XLA: one layer's weights and state, taken out of their stacks, and whether its index is in range."""

    weights: GdnWeights
    carry: tuple[Array, Array]
    """S and conv_hist of the slot: the stack is read and written once for a whole sequence."""
    state: GdnState
    at: Int32[Array, ""]
    in_range: Array | None
    """None if known; else, traced."""
    advance: Callable[..., Any]

    @classmethod
    def take(cls, w: Any, state: GdnState, layer: Any, cfg: GdnConfig, precision: str) -> "_Sliced":
        """Take slot `layer` out of weights and state."""
        index = jnp.asarray(layer, jnp.int32)
        in_range = None
        if isinstance(layer, Tracer):
            in_range = (index >= 0) & (index < state.layers)
            index = jnp.clip(index, 0, state.layers - 1)
        weights = w.layer(index) if isinstance(w, GdnStack) else w
        carry = tuple(jax.lax.dynamic_index_in_dim(leaf, index, 0, keepdims=False) for leaf in _leaves(state))

        def advance(carry: tuple[Array, Array], x: Any, active: Any) -> tuple[tuple[Array, Array], Stages]:
            stages = advance_active(weights, *carry, ops.dense(x), active, cfg, precision)
            return (stages.s, stages.history), stages

        return cls(weights, carry, state, index, in_range, advance)

    def finish(self, carry: tuple[Array, Array], y: Any) -> tuple[Any, GdnState]:
        """The outputs and the state with the slot put back, in place where it is donated.

        An index out of range, which cannot be refused while tracing, makes y NaN and leaves the state alone.
        """
        if (in_range := self.in_range) is not None:
            carry = jax.tree.map(lambda new, old: jnp.where(in_range, new, old), carry, self.carry)
            y = jax.tree.map(lambda leaf: jnp.where(in_range, leaf, jnp.float32(jnp.nan)), y)
        put = jax.lax.dynamic_update_index_in_dim
        new = (put(leaf, part, self.at, 0) for leaf, part in zip(_leaves(self.state), carry, strict=True))
        return y, GdnState(*new)


class _InPlace(NamedTuple):
    """For the kernels: the whole stack, of which each launch reads and writes one layer."""

    carry: GdnState
    advance: Callable[..., Any]

    @classmethod
    def take(
        cls,
        w: Any,
        state: GdnState,
        layer: Array,
        cfg: GdnConfig,
        precision: str,
        implementation: str | None,
        keep: bool,
    ) -> "_InPlace":
        """The stack, and single weights as a stack of one."""
        if isinstance(w, GdnStack):
            stack, weight_layer = w, layer
        else:
            stack, weight_layer = GdnStack(jax.tree.map(lambda leaf: leaf[None], w)), jnp.int32(0)

        def advance(carry: GdnState, x: Any, active: Any) -> tuple[GdnState, Stages]:
            stages, carry = advance_in_place(
                stack, weight_layer, carry, layer, x, active, cfg, precision, implementation, keep=keep
            )
            return carry, stages

        return cls(state, advance)

    def finish(self, carry: GdnState, y: Any) -> tuple[Any, GdnState]:
        """Nothing is left to do: the kernels write NaN for a layer out of range."""
        return y, carry


def _leaves(state: GdnState) -> tuple[Array, Array]:
    return state.S, state.conv_hist
