"""The seven steps of a GDN layer in order, over explicit state: `step` for one token, `scan` for a sequence.

Composition only: the mathematics lives in `linear`, `gates`, `conv`, `norms` and `delta`.
"""

import typing
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from gdn_jax.axes import Active, Array, Float32, Int32
from gdn_jax.border import Weights, check_active, check_request
from gdn_jax.config import GdnConfig
from gdn_jax.conv import conv_step
from gdn_jax.delta import delta_step
from gdn_jax.fence import fence
from gdn_jax.gates import log_decay, write_strength
from gdn_jax.norms import gated_rms_norm, l2_normalise
from gdn_jax.ops import project
from gdn_jax.state import GdnState
from gdn_jax.weights import GdnStack, GdnWeights

__all__ = ["Slot", "Stages", "advance", "advance_active", "scan", "step"]


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
    with jax.named_scope("project_in"):
        xc, z, b, a = fence(tuple(project(m, x, precision) for m in (w.large.qkv, w.large.z, w.b, w.a)))
        z = z.reshape(batch, cfg.value_heads, cfg.value_dim)
    with jax.named_scope("gates"):
        beta, g = fence((write_strength(b), log_decay(a, w.dt_bias, w.A_log)))
    with jax.named_scope("conv"):
        xcv, next_history = fence(conv_step(history, xc, w.conv))
    with jax.named_scope("qk_norm"):
        q, k, v = jnp.split(xcv, (cfg.key_channels, 2 * cfg.key_channels), axis=1)
        q, k = (l2_normalise(heads.reshape(batch, cfg.key_heads, cfg.key_dim)) for heads in (q, k))
        q, k = fence((q * jnp.float32(cfg.key_dim**-0.5), k))
    with jax.named_scope("delta_rule"):
        on, next_s = fence(delta_step(s, q, k, v.reshape(z.shape), beta, g))
    with jax.named_scope("gated_norm"):
        onn = fence(gated_rms_norm(on, w.norm, z, cfg.norm_eps))
    with jax.named_scope("project_out"):
        out = fence(project(w.large.out, onn.reshape(batch, cfg.value_channels), precision))
    chex.assert_shape(out, x.shape)
    chex.assert_equal_shape([s, next_s])
    chex.assert_equal_shape([history, next_history])
    chex.assert_type([out, next_s, next_history], jnp.float32)
    return Stages(xc, z, a, b, beta, g, xcv, q, k, on, onn, out, next_s, next_history)


def advance_active(
    w: GdnWeights, s: Array, history: Array, x: Array, active: Any, cfg: GdnConfig, precision: str
) -> Stages:
    """`advance` for the rows where `active` [B] is true; elsewhere the output is 0 and the state stays as it is.

    Inactive rows are computed on zeros, so that what they hold, NaN included, reaches no gradient either.
    """
    if active is None:
        return advance(w, s, history, x, cfg, precision)

    def pick(new, old):
        return jnp.where(active.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

    calm_s, calm_history, calm_x = (pick(array, jnp.zeros_like(array)) for array in (s, history, x))
    stages = advance(w, calm_s, calm_history, calm_x, cfg, precision)
    return stages._replace(
        out=pick(stages.out, jnp.zeros_like(stages.out)),
        s=pick(stages.s, s),
        history=pick(stages.history, history),
    )


@typing.no_type_check
def step(
    w: Weights,
    state: GdnState,
    x: Array,
    *,
    cfg: GdnConfig,
    layer=0,
    active=None,
    precision: str = "exact",
    implementation: str | None = None,
) -> tuple[Array, GdnState]:
    """Carry one layer one token forward: x [B, D] -> y [B, D] and the next state.

    The seven steps: projections; beta and g; causal convolution with SiLU; q, k, v; q/k norm; delta rule; gated
    RMSNorm; output projection (Yang et al., "Gated Delta Networks", 2024, in the form of Qwen3-Next and Qwen3.5).

    `w` is a `GdnWeights` (any slot of the state), a `GdnStack` or a tuple of `GdnWeights` (one per slot). `layer` is
    the slot, an int or an int32 scalar; traced, it is compiled once for all layers (pass `jnp.int32(i)`: a Python int
    that a jit traces has a weak type and is traced apart). `active` bool [B]: a False row gets output 0 and its state
    stays untouched, bit for bit. `precision` is "exact" (float32; with 4-bit weights, products that are exact in the
    weights and float32 in the activations) or, for 4-bit weights, "q8": activations of 8 bits, as CPU engines use.

    Plain function: it is not jitted and donates nothing. Without donation each call copies the whole stacked state
    (157 MB in the 27B geometry), so use

        jax.jit(gdn.step, static_argnames=("cfg", "precision", "implementation"), donate_argnames=("state",))

    and add "layer" to the static names when `w` is a tuple. A traced `layer` out of range cannot be refused: y is then
    NaN and the state unchanged.

    Jitted `step`, `scan` and `trace` give the same bits at one batch shape. On a GPU this needs
    XLA_FLAGS=--xla_gpu_deterministic_ops=true: XLA's autotuner may otherwise choose other code for the same stage of
    another program.

    Raises:
        ValueError: a wrong shape, a layer out of range, an unknown implementation. TypeError: a wrong dtype, or a
        traced layer with a tuple of weights. StateMismatchError: a state of another geometry, or a stack whose length
        is not the state's. UnsupportedError: a precision or a named implementation that cannot be had.
    """
    check_request(w, state, x, "B D", cfg, layer, precision, implementation)
    active = check_active(active, (state.batch,))
    return _step(w, state, x, cfg, layer, active, precision)


@typing.no_type_check
def scan(
    w: Weights,
    state: GdnState,
    xs: Array,
    *,
    cfg: GdnConfig,
    layer=0,
    active=None,
    precision: str = "exact",
    implementation: str | None = None,
) -> tuple[Array, GdnState]:
    """Carry one layer over a sequence on the device, token by token: xs [T, B, D] -> ys [T, B, D] and the next state.

    The same arithmetic as T calls of `step`, in one `lax.scan`: no host round trip. `active` is bool [B] for the whole
    sequence or [T, B] per token (ragged lengths: `jnp.arange(T)[:, None] < lengths[None]`). T = 0 returns the state.

    Everything else, and the jit line, as for `step`.
    """
    check_request(w, state, xs, "T B D", cfg, layer, precision, implementation)
    tokens = xs.shape[0]
    if active is not None and np.ndim(active) == 1:
        active = jnp.broadcast_to(check_active(active, (state.batch,))[None], (tokens, state.batch))
    active = check_active(active, (tokens, state.batch))
    return _scan(w, state, xs, cfg, layer, active, precision)


def _step(
    w: Any, state: GdnState, x: Float32[Array, "B D"], cfg: GdnConfig, layer: Any, active: Active | None, precision: str
) -> tuple[Float32[Array, "B D"], GdnState]:
    slot = Slot.read(w, state, layer)
    stages = advance_active(slot.weights, slot.s, slot.history, x, active, cfg, precision)
    return slot.poison(stages.out), slot.write(state, stages.s, stages.history)


def _scan(
    w: Any, state: GdnState, xs: Float32[Array, "T B D"], cfg: GdnConfig, layer: Any, active: Any, precision: str
) -> tuple[Float32[Array, "T B D"], GdnState]:
    slot = Slot.read(w, state, layer)

    def body(carry, token):
        x, token_active = token
        s, history = carry
        stages = advance_active(slot.weights, s, history, x, token_active, cfg, precision)
        return (stages.s, stages.history), stages.out

    # One layer's state is carried, not the stack: the stack is read and written once for the whole sequence.
    (s, history), ys = jax.lax.scan(body, (slot.s, slot.history), (xs, active))
    return slot.poison(ys), slot.write(state, s, history)


class Slot(NamedTuple):
    """One layer's weights and state, taken out of their stacks, and whether its (possibly traced) index is in range."""

    weights: GdnWeights
    s: Array
    history: Array
    at: Int32[Array, ""]
    in_range: Array | None

    @classmethod
    def read(cls, w: Any, state: GdnState, layer: Any) -> "Slot":
        """Take slot `layer` out of weights and state."""
        index = jnp.asarray(layer, jnp.int32)
        in_range = None
        if isinstance(layer, Tracer):
            in_range = (index >= 0) & (index < state.layers)
            index = jnp.clip(index, 0, state.layers - 1)
        if isinstance(w, GdnStack):
            w = w.layer(index)
        elif isinstance(w, tuple):
            w = w[int(layer)]
        s, history = (
            jax.lax.dynamic_index_in_dim(leaf, index, 0, keepdims=False) for leaf in (state.S, state.conv_hist)
        )
        return cls(w, s, history, index, in_range)

    def write(self, state: GdnState, s: Array, history: Array) -> GdnState:
        """Put the layer's next state back, in place where the stack is donated."""
        if self.in_range is not None:
            s, history = jnp.where(self.in_range, s, self.s), jnp.where(self.in_range, history, self.history)
        put = jax.lax.dynamic_update_index_in_dim
        return GdnState(S=put(state.S, s, self.at, 0), conv_hist=put(state.conv_hist, history, self.at, 0))

    def poison(self, y: Array) -> Array:
        """NaN for an index out of range, which cannot be refused while tracing."""
        return y if self.in_range is None else jnp.where(self.in_range, y, jnp.float32(jnp.nan))
