"""What a request must look like: every public function over weights and state validates here, once, before any work."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from gdn_jax import ops
from gdn_jax.config import GdnConfig
from gdn_jax.errors import StateMismatchError
from gdn_jax.require import require_array, require_config
from gdn_jax.state import check_state
from gdn_jax.weights import TABLE, GdnStack, GdnWeights, abstract

__all__ = ["Weights", "check_active", "check_request"]

Weights = GdnWeights | GdnStack | tuple[GdnWeights, ...]


def check_request(
    w: Any, state: Any, x: Any, axes: str, cfg: Any, layer: Any, precision: str, implementation: str | None
) -> None:
    """Refuse a malformed request before any work; `axes` names the axes of x. Raises as documented in `step`."""
    require_config(cfg)
    ops.check_precision(precision)
    for operation in ops.OPERATIONS:
        ops.choose(operation, implementation)
    check_state(state, cfg)
    _check_layer(layer, state.layers)
    _check_weights(w, cfg, state.layers, layer)
    _check_input(x, axes, state.batch, cfg.hidden)


def _check_input(x: Any, axes: str, batch: int, hidden: int) -> None:
    require_array("x", x, "float32")
    if x.ndim != len(axes.split()) or x.shape[-2:] != (batch, hidden):
        raise ValueError(f"x must be [{axes}] with B={batch} (the state's batch) and D={hidden}, got shape {x.shape}")


def _check_layer(layer: Any, layers: int) -> None:
    scalar = isinstance(layer, int) or (isinstance(layer, jax.Array | np.ndarray | np.generic) and layer.shape == ())
    if not scalar or isinstance(layer, bool) or not np.issubdtype(np.result_type(layer), np.integer):
        raise TypeError(f"layer must be an int or an int32 scalar, got {layer!r}")
    if not isinstance(layer, Tracer) and not 0 <= int(layer) < layers:
        raise ValueError(f"layer must lie in 0 … {layers - 1} (the state has {layers} layers), got {int(layer)}")


def _check_weights(w: Any, cfg: GdnConfig, layers: int, layer: Any) -> None:
    if isinstance(w, tuple) and not isinstance(w, GdnWeights):
        if isinstance(layer, Tracer):
            raise TypeError(
                "a tuple of weights needs a Python int as layer: its members may differ in tier, so a traced index "
                "cannot choose among them; make layer a static argument, or stack the weights in a GdnStack"
            )
        if len(w) != layers:
            raise StateMismatchError(f"the tuple holds {len(w)} layers of weights, the state {layers}")
        for member in w:
            _check_layer_weights(member, abstract(cfg))
    elif isinstance(w, GdnStack):
        _check_layer_weights(w.layers, abstract(cfg, layers=layers))
    else:
        _check_layer_weights(w, abstract(cfg))


def _check_layer_weights(w: Any, expected: GdnWeights) -> None:
    if not isinstance(w, GdnWeights):
        raise TypeError(f"weights must be GdnWeights, a GdnStack or a tuple of GdnWeights, got {type(w).__name__}")
    for row in TABLE:
        leaf, want = row.of(w), row.of(expected)
        require_array(f"weight {row.field}", leaf, "float32")
        if leaf.shape != want.shape:
            raise ValueError(f"weight {row.field} must have shape {want.shape} for this cfg, got {leaf.shape}")


def check_active(active: Any, shape: tuple[int, ...]) -> Any:
    """`active` as a bool array of `shape`, or None where every row is active.

    Raises:
        ValueError: another shape or dtype.
    """
    if active is None:
        return None
    active = jnp.asarray(active)
    if active.dtype != jnp.bool_ or active.shape != shape:
        raise ValueError(f"active must be bool {shape}, got {active.dtype} {active.shape}")
    return active
