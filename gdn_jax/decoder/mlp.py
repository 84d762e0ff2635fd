"""The gated MLP, y = W_down (silu(W_gate x) · W_up x)."""

import functools

import jax

from gdn_jax.axes import Array, Float32, Int32
from gdn_jax.decoder.weights import MlpWeights
from gdn_jax.fence import fence
from gdn_jax.ops import Activations, elementwise, project, project_many, project_rows

__all__ = ["mlp_rows", "mlp_step"]


def mlp_step(
    w: MlpWeights,
    x: Float32[Array, "B D"] | Activations,
    *,
    layer: Int32[Array, ""],
    precision: str,
    implementation: str | None,
) -> Float32[Array, "B D"]:
    """MLP `layer` of the stack: x [B, D] -> y [B, D]."""
    gate, up = fence(project_many((w.gate, w.up), x, precision=precision, implementation=implementation, layer=layer))
    inner = elementwise(_gated, gate, up, consumers=(w.down,), precision=precision, implementation=implementation)
    return fence(project(w.down, inner, precision=precision, implementation=implementation, layer=layer))


def mlp_rows(
    w: MlpWeights, x: Float32[Array, "M D"], *, layer: Int32[Array, ""], precision: str, implementation: str | None
) -> Float32[Array, "M D"]:
    """`mlp_step` of many rows."""
    project = functools.partial(project_rows, precision=precision, implementation=implementation, layer=layer)
    [y] = project((w.down,), fence(_gated(*fence(project((w.gate, w.up), x)))))
    return fence(y)


def _gated(gate: Array, up: Array) -> Array:
    return jax.nn.silu(gate) * up
