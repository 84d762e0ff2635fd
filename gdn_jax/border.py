"""What a request must look like: every public function over weights and state validates here, once, before any work."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from gdn_jax import ops
from gdn_jax.config import GdnConfig
from gdn_jax.errors import StateMismatchError
from gdn_jax.q4 import Q4Tensor
from gdn_jax.require import require_array, require_config, require_kind
from gdn_jax.state import check_state
from gdn_jax.weights import TABLE, GdnStack, GdnWeights, abstract

__all__ = ["Weights", "check_active", "check_request"]

Weights = GdnWeights | GdnStack | tuple[GdnWeights, ...]


def check_request(
    w: Any,
    state: Any,
    x: Any,
    axes: str,
    cfg: Any,
    layer: Any,
    precision: str,
    implementation: str | None,
    *,
    precisions: Mapping[str, tuple[str, ...]] = ops.PRECISIONS,
) -> None:
    """Refuse a malformed request before any work; `axes` names the axes of x, `precisions` are those of every tier.

    Raises as documented in `step`.
    """
    require_config(cfg)
    ops.check_implementation(implementation)
    check_state(state, cfg)
    _check_layer(layer, state.layers)
    ops.check_precision(precision, _check_weights(w, cfg, state.layers, layer), precisions)
    _check_input(x, axes, state.batch, cfg.hidden)


def _check_input(x: Any, axes: str, batch: int, hidden: int) -> None:
    name = "xs" if axes.startswith("T") else "x"
    require_array(name, x, "float32")
    if x.ndim != len(axes.split()) or x.shape[-2:] != (batch, hidden):
        raise ValueError(
            f"{name} must be [{axes}] with B={batch} (the state's batch) and D={hidden}, got shape {x.shape}"
        )


def _check_layer(layer: Any, layers: int) -> None:
    if isinstance(layer, jax.Array | np.ndarray | np.generic):
        integer = layer.shape == () and np.issubdtype(layer.dtype, np.integer)
    else:
        integer = isinstance(layer, int) and not isinstance(layer, bool)
    if not integer:
        raise TypeError(f"layer must be an int or an int32 scalar, got {layer!r}")
    if not isinstance(layer, Tracer) and not 0 <= int(layer) < layers:
        raise ValueError(f"layer must lie in 0 … {layers - 1} (the state has {layers} layers), got {int(layer)}")


def _check_weights(w: Any, cfg: GdnConfig, layers: int, layer: Any) -> str:
    """The tier of the layer's weights."""
    if isinstance(w, tuple):
        if isinstance(layer, Tracer):
            raise TypeError(
                "a tuple of weights needs a Python int as layer: its members may differ in tier, so a traced index "
                "cannot choose among them; make layer a static argument, or stack the weights in a GdnStack"
            )
        if len(w) != layers:
            raise StateMismatchError(f"the tuple holds {len(w)} layers of weights, the state {layers}")
        for member in w:
            _check_layer_weights(member, cfg)
        w = w[int(layer)]
    elif isinstance(w, GdnStack):
        if len(w) != layers:
            raise StateMismatchError(f"the stack holds {len(w)} layers of weights, the state {layers}")
        w = w.layers
        _check_layer_weights(w, cfg, layers=layers)
    else:
        _check_layer_weights(w, cfg)
    return w.tier


def _check_layer_weights(w: Any, cfg: GdnConfig, layers: int | None = None) -> None:
    if not isinstance(w, GdnWeights):
        raise TypeError(f"weights must be GdnWeights, a GdnStack or a tuple of GdnWeights, got {type(w).__name__}")
    expected = abstract(cfg, layers=layers, tier=w.tier)
    for row in TABLE:
        _check_leaf(f"weight {row.field}", row.of(w), row.of(expected))


def _check_leaf(name: str, leaf: Any, want: Any) -> None:
    if isinstance(want, Q4Tensor):
        require_kind(name, leaf, Q4Tensor)
        _check_leaf(f"{name}.codes", leaf.codes, want.codes)
        _check_leaf(f"{name}.scales", leaf.scales, want.scales)
        return
    require_array(name, leaf, str(want.dtype))
    if leaf.shape != want.shape:
        raise ValueError(f"{name} must have shape {want.shape} for this cfg, got {leaf.shape}")


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
