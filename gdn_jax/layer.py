"""A GDN layer over explicit state, as users call it: `step` for one token, `scan` for a sequence."""

import typing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gdn_jax.axes import Active, Array, Float32
from gdn_jax.border import Weights, check_active, check_request
from gdn_jax.config import GdnConfig
from gdn_jax.ops import Activations
from gdn_jax.slot import run_on_slot
from gdn_jax.state import GdnState

__all__ = ["scan", "step", "unchecked_step"]


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

    `implementation` None takes the GPU's kernels where they take this layer and device, and plain XLA elsewhere, also
    under `grad` and `vmap`, for which the kernels have no rules. "triton" insists on the kernels, "interpret" runs
    their bodies on any device (slow, for tests), "xla" keeps to XLA. Float32 products are XLA's under every name.

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
    return unchecked_step(w, state, x, cfg, layer, active, precision, implementation)


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
    return _scan(w, state, xs, cfg, layer, active, precision, implementation)


def unchecked_step(
    w: Any,
    state: GdnState,
    x: Float32[Array, "B D"] | Activations,
    cfg: GdnConfig,
    layer: Any,
    active: Active | None,
    precision: str,
    implementation: str | None,
) -> tuple[Float32[Array, "B D"], GdnState]:
    """`step` without its checks, for callers within the library that have made them; x may come with its limbs."""

    def one(slot, x, active):
        carry, stages = slot.advance(slot.carry, x, active)
        return slot.finish(carry, stages.out)

    return run_on_slot(one, w, state, (x, active), cfg, layer, precision, implementation)


def _scan(
    w: Any,
    state: GdnState,
    xs: Float32[Array, "T B D"],
    cfg: GdnConfig,
    layer: Any,
    active: Any,
    precision: str,
    implementation: str | None,
) -> tuple[Float32[Array, "T B D"], GdnState]:
    def all_tokens(slot, xs, active):
        def body(carry, token):
            carry, stages = slot.advance(carry, *token)
            return carry, stages.out

        return slot.finish(*jax.lax.scan(body, slot.carry, (xs, active)))

    return run_on_slot(all_tokens, w, state, (xs, active), cfg, layer, precision, implementation)
