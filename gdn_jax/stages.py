"""The seven steps of a GDN layer in order, in plain XLA, for one layer's weights and state: the reference composition.

Composition only: the mathematics lives in `linear`, `gates`, `conv`, `norms` and `delta`.
"""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from gdn_jax.axes import Array, Float32
from gdn_jax.config import GdnConfig
from gdn_jax.conv import conv_step
from gdn_jax.delta import delta_step
from gdn_jax.fence import fence
from gdn_jax.gates import log_decay, write_strength
from gdn_jax.norms import gated_rms_norm, l2_normalise
from gdn_jax.ops import Activations, choose_layer_gates, dense, layer_gates, project_many
from gdn_jax.weights import GdnWeights

__all__ = [
    "Inner",
    "Projected",
    "Stages",
    "advance",
    "advance_active",
    "inner_inputs",
    "keep_inactive",
    "project_in",
    "recur",
]


class Stages(NamedTuple):
    """Everything that one layer computes for one token of B sequences, stage by stage (float32)."""

    xc: Array  # [B, C] conv input
    z: Array  # [B, H, V] gate of the output norm
    a: Array  # [B, H] raw decay gate
    b: Array  # [B, H] raw write gate
    beta: Array  # [B, H]
    g: Array  # [B, H] log decay
    xcv: Array  # [B, C] after convolution and SiLU
    q: Array  # [B, G, K] normalised and scaled by K^-1/2
    k: Array  # [B, G, K] normalised
    on: Array  # [B, H, V] delta rule's output
    onn: Array  # [B, H, V] after the gated norm
    out: Array  # [B, D] the layer's output
    s: Array  # [B, H, K, V] next S
    history: Array  # [B, W-1, C] next convolution history


class Projected(NamedTuple):
    """Step 1: what the four projections and the gates make of each token by itself."""

    xc: Array
    z: Array
    a: Array
    b: Array
    beta: Array
    g: Array


class Inner(NamedTuple):
    """The input half of a layer: what projections, gates and convolution leave for the delta rule."""

    xc: Array
    z: Array
    a: Array
    b: Array
    beta: Array
    g: Array
    xcv: Array
    history: Array


def project_in(
    w: GdnWeights,
    x: Float32[Array, "M D"] | Activations,
    cfg: GdnConfig,
    precision: str,
    implementation: str | None,
    *,
    stack: GdnWeights | None = None,
    layer: Array | None = None,
) -> Projected:
    """Step 1: the four projections (by `implementation`) and the gates, for rows that may be of any tokens.

    Weights may come as layer `layer` of a stack, to be read in place by kernels.
    """
    large = (w if stack is None else stack).large
    with jax.named_scope("project_in"):
        products = project_many(
            (large.qkv, large.z), x, precision=precision, implementation=implementation, layer=layer
        )
        xc, z = fence(products)
        z = z.reshape(-1, cfg.value_heads, cfg.value_dim)
    choice = choose_layer_gates(xc.shape[0], "xla" if stack is None else implementation)
    with jax.named_scope("gates"):
        if choice.implementation == "xla" or stack is None or layer is None:
            b, a = fence(project_many((w.b, w.a), x))
            beta, g = fence((write_strength(b), log_decay(a, w.dt_bias, w.A_log)))
        else:
            beta, g, b, a = fence(layer_gates(stack, layer, dense(x), interpret=choice.implementation == "interpret"))
    return Projected(xc, z, a, b, beta, g)


def inner_inputs(
    w: GdnWeights,
    history: Float32[Array, "B P C"],
    x: Float32[Array, "B D"] | Activations,
    cfg: GdnConfig,
    precision: str,
    implementation: str | None,
    *,
    stack: GdnWeights | None = None,
    layer: Array | None = None,
) -> Inner:
    """`project_in`, and step 2, the convolution."""
    made = project_in(w, x, cfg, precision, implementation, stack=stack, layer=layer)
    with jax.named_scope("conv"):
        xcv, next_history = fence(conv_step(history, made.xc, w.conv))
    return Inner(**made._asdict(), xcv=xcv, history=next_history)


def recur(
    w: GdnWeights, s: Float32[Array, "B H K V"], xcv: Float32[Array, "B C"], made: Any, cfg: GdnConfig
) -> tuple[Array, Array, Array, Array, Array]:
    """Steps 3 to 6, from the convolution's output to the gated norm: q, k, `on`, `onn` and the next S.

    `made` is `Projected` or `Inner`.
    """
    with jax.named_scope("qk_norm"):
        q, k, v = jnp.split(xcv, (cfg.key_channels, 2 * cfg.key_channels), axis=1)
        q, k = (l2_normalise(heads.reshape(-1, cfg.key_heads, cfg.key_dim)) for heads in (q, k))
        q, k = fence((q * jnp.float32(cfg.key_dim**-0.5), k))
    with jax.named_scope("delta_rule"):
        on, next_s = fence(delta_step(s, q, k, v.reshape(made.z.shape), made.beta, made.g))
    with jax.named_scope("gated_norm"):
        onn = fence(gated_rms_norm(on, w.norm, made.z, cfg.norm_eps))
    return q, k, on, onn, next_s


def advance(
    w: GdnWeights,
    s: Float32[Array, "B H K V"],
    history: Float32[Array, "B P C"],
    x: Float32[Array, "B D"],
    cfg: GdnConfig,
    precision: str,
) -> Stages:
    """Carry one layer one token forward, keeping every intermediate.

    The stages are fenced off from each other: whatever else a program asks for, each stage is compiled over the same
    materialised inputs, so programs that tap intermediates and programs that do not agree bitwise.
    """
    batch = x.shape[0]
    # The inputs too: a loop slices x out of a sequence, a single step does not.
    s, history, x = fence((s, history, x))
    inner = inner_inputs(w, history, x, cfg, precision, "xla")
    q, k, on, onn, next_s = recur(w, s, inner.xcv, inner, cfg)
    with jax.named_scope("project_out"):
        onn_flat = onn.reshape(batch, cfg.value_channels)
        [out] = fence(project_many((w.large.out,), onn_flat, precision=precision, implementation="xla"))
    chex.assert_shape(out, x.shape)
    chex.assert_equal_shape([s, next_s])
    chex.assert_equal_shape([history, inner.history])
    chex.assert_type([out, next_s, inner.history], jnp.float32)
    return Stages(q=q, k=k, on=on, onn=onn, out=out, s=next_s, **inner._asdict())


def advance_active(
    w: GdnWeights, s: Array, history: Array, x: Array, active: Any, cfg: GdnConfig, precision: str
) -> Stages:
    """`advance` for the rows where `active` [B] is true; elsewhere the output is 0 and the state stays as it is.

    Inactive rows are computed on zeros, so that what they hold, NaN included, reaches no gradient either.
    """
    if active is None:
        return advance(w, s, history, x, cfg, precision)
    calm_s, calm_history, calm_x = (keep_inactive(active, array, jnp.zeros_like(array)) for array in (s, history, x))
    stages = advance(w, calm_s, calm_history, calm_x, cfg, precision)
    return stages._replace(
        out=keep_inactive(active, stages.out, jnp.zeros_like(stages.out)),
        s=keep_inactive(active, stages.s, s),
        history=keep_inactive(active, stages.history, history),
    )


def keep_inactive(active: Any, new: Array, old: Array) -> Array:
    """`new` in the rows where `active` [B] is true (or None), `old` elsewhere."""
    return new if active is None else jnp.where(active.reshape(-1, *(1,) * (new.ndim - 1)), new, old)
