"""The seven steps of a GDN layer as launches of the GPU's kernels, over the stacked state in place.

Four launches carry one token through a layer with 4-bit projections: x as limbs; the input projections with gates and
convolution; the delta rule with both norms, whose output comes as limbs; the output projection. A layer in float32 has
the delta rule in common, and XLA for the rest.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gdn_jax import ops
from gdn_jax.axes import Array, Float32, Int32
from gdn_jax.config import GdnConfig
from gdn_jax.fence import fence
from gdn_jax.limbs import LIMBS
from gdn_jax.q4 import GROUP
from gdn_jax.stages import Inner, Stages, inner_inputs, keep_inactive
from gdn_jax.state import GdnState
from gdn_jax.weights import GdnStack

__all__ = ["advance_in_place"]


def advance_in_place(
    stack: GdnStack,
    weight_layer: Int32[Array, ""],
    state: GdnState,
    layer: Int32[Array, ""],
    x: Float32[Array, "B D"] | ops.Activations,
    active: Any,
    cfg: GdnConfig,
    precision: str,
    implementation: str | None,
    *,
    keep: bool,
) -> tuple[Stages, GdnState]:
    """Carry slot `layer` of the state one token forward by layer `weight_layer` of stacked weights.

    With `keep` every field of `Stages` is there, else only `out`. A layer out of range gives NaN, the state unchanged.
    """
    x = fence(x)
    interpret = implementation == "interpret"
    slot = stack.layer(jnp.clip(weight_layer, 0, len(stack) - 1))
    inner = _input_half(stack, slot, weight_layer, state, layer, x, active, cfg, precision, implementation, keep)
    limbs = LIMBS[precision] if slot.tier == "q4" and cfg.value_dim % GROUP == 0 else 0
    with jax.named_scope("delta_rule"):
        step = ops.delta_layer(
            state.S,
            layer,
            inner.xcv,
            inner.z,
            inner.beta,
            inner.g,
            stack.layers.norm,
            weight_layer,
            key_heads=cfg.key_heads,
            norm_eps=cfg.norm_eps,
            limbs=limbs,
            active=active,
            keep=keep,
            interpret=interpret,
        )
    with jax.named_scope("project_out"):
        made = ops.Activations(None, step.digits, step.x_scales) if limbs else step.onn.reshape(-1, cfg.value_channels)
        out = fence(
            ops.project(
                stack.layers.large.out,
                made,
                precision=precision,
                implementation=implementation,
                layer=weight_layer,
            )
        )
    state = GdnState(S=step.state, conv_hist=inner.history)
    kept: dict[str, Any] = dict.fromkeys(Stages._fields) | {"out": out}
    if keep:
        s, history = (_take(leaf, layer) for leaf in (state.S, state.conv_hist))
        kept |= inner._asdict() | {"q": step.q, "k": step.k, "on": step.on, "onn": step.onn, "s": s, "history": history}
    return Stages(**kept), state


def _input_half(stack, slot, weight_layer, state, layer, x, active, cfg, precision, implementation, keep) -> Inner:
    """Steps 1 and 2 with the whole stacked history: in one launch where the kernel takes them."""
    large = stack.layers.large
    choice = ops.choose_layer_input(large.qkv, large.z, state.batch, precision, implementation)
    if choice.implementation == "xla":
        return _input_half_by_xla(stack, slot, weight_layer, state, layer, x, active, cfg, precision, implementation)
    with jax.named_scope("project_in"):
        made = ops.layer_input(
            stack.layers,
            weight_layer,
            state.conv_hist,
            layer,
            x,
            active=active,
            precision=precision,
            keep=keep,
            interpret=choice.implementation == "interpret",
        )
    z = made.z.reshape(-1, cfg.value_heads, cfg.value_dim)
    return Inner(**made._asdict() | {"z": z})


def _input_half_by_xla(stack, slot, weight_layer, state, layer, x, active, cfg, precision, implementation) -> Inner:
    index = jnp.clip(layer, 0, state.layers - 1)
    old = fence(_take(state.conv_hist, index))
    inner = inner_inputs(slot, old, x, cfg, precision, implementation, stack=stack.layers, layer=weight_layer)
    new = jnp.where(layer == index, keep_inactive(active, inner.history, old), old)
    return inner._replace(history=lax.dynamic_update_index_in_dim(state.conv_hist, new, index, 0))


def _take(leaf: Array, index: Array) -> Array:
    return lax.dynamic_index_in_dim(leaf, index, 0, keepdims=False)
