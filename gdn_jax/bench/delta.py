"""One token of the delta rule on a stacked state, in place."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gdn_jax import ops
from gdn_jax.bench import gate, operands, peers
from gdn_jax.bench.naming import implementation_of
from gdn_jax.bench.operands import DeltaInputs
from gdn_jax.bench.request import Request
from gdn_jax.bench.rows import Row
from gdn_jax.bench.timing import Step, Timing, kernels_for, layers_for, measure, touch
from gdn_jax.config import GdnConfig

__all__ = ["delta_error", "delta_step_of", "moved", "run"]


def run(request: Request) -> Iterator[Row]:
    """One row for every batch, then the peers."""
    for batch in request.batches:
        yield _measured(batch, request)
        if request.peers:
            cfg = request.cfg
            case = peers.Heads(batch, cfg.key_heads, cfg.value_heads, cfg.key_dim, cfg.value_dim)
            yield from peers.rows("delta", case, request.effort)


def moved(cfg: GdnConfig, batch: int) -> int:
    """Bytes of one step: S read and written, the operands read, o written."""
    inputs = jax.eval_shape(lambda: operands.delta_inputs(0, cfg, batch))
    _, _, v, _, _ = inputs
    return 2 * operands.nbytes(_state_shape(cfg, 1, batch)) + operands.nbytes((inputs, v))


def delta_error(state: jax.Array, inputs: DeltaInputs, request: Request) -> float:
    """The worse max_rel of o and S after a step on the last layer, first and last row; infinite if it strays.

    That is, if a value is not finite, or another layer is not what it was to the last bit.
    """
    last, rows = state.shape[0] - 1, sorted({0, state.shape[1] - 1})

    def step(state, inputs):
        o, after = ops.delta_step(state, jnp.int32(last), *inputs, implementation=request.implementation)
        before, since = (lax.bitcast_convert_type(array[:last], jnp.int32) for array in (state, after))
        good = jnp.array_equal(before, since) & jnp.isfinite(o).all() & jnp.isfinite(after[last]).all()
        return o, after[last], good

    o, s, good = jax.jit(step, compiler_options=dict(request.effort.options))(state, inputs)
    if not bool(good):
        return float("inf")
    o, s, before, *taken = (np.asarray(array[jnp.array(rows)]) for array in (o, s, state[last], *inputs))
    return gate.delta_error(o, s, before, tuple(taken))


def delta_step_of(inputs: Any, request: Request) -> Step:
    """`ops.delta_step` on the carried state [L, B, H, K, V] and v [B, H, V]."""

    def advance(carry, layer, inputs):
        state, v = carry
        q, k, _, beta, g = inputs
        o, state = ops.delta_step(state, layer, q, k, v, beta, g, implementation=request.implementation)
        return state, touch(v, o)

    return Step(advance, inputs)


def _state_shape(cfg: GdnConfig, layers: int, batch: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((layers, batch, cfg.value_heads, cfg.key_dim, cfg.value_dim), jnp.float32)


def _measured(batch: int, request: Request) -> Row:
    cfg, effort = request.cfg, request.effort
    layers = layers_for(operands.nbytes(_state_shape(cfg, 1, batch)), effort)
    state = jax.random.normal(operands.key(1), _state_shape(cfg, layers, batch).shape) / 4
    inputs = operands.delta_inputs(2, cfg, batch)
    nbytes = moved(cfg, batch)

    def glue(carry, layer, inputs):
        state, v = carry
        return state, touch(v, v)

    step = delta_step_of(inputs, request)
    error, bound = delta_error(state, inputs, request), gate.BOUNDS["delta", "f32"]
    used = implementation_of(step, (state, inputs[2]))
    timing = None
    if error <= bound:
        kernels = kernels_for(nbytes, effort)
        steps = {"glue": Step(glue, inputs), "step": step}
        samples = measure(steps, (state, jnp.copy(inputs[2])), layers=layers, kernels=kernels, effort=effort)
        timing = Timing.between(samples["step"], samples["glue"], kernels)
    return Row(
        subject="delta",
        case=f"{cfg.value_heads} heads {cfg.key_dim}x{cfg.value_dim}",
        batch=batch,
        implementation=used,
        precision="f32",
        nbytes=nbytes,
        max_rel=error,
        bound=bound,
        timing=timing,
        note="" if timing else "not timed: wrong result",
        details={"layers": layers},
    )
