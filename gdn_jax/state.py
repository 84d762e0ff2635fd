"""The state of GDN layers as a value: created, reset, copied, forked, selected and merged; never hidden."""

import typing
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from gdn_jax.axes import Leaf
from gdn_jax.config import GdnConfig
from gdn_jax.errors import StateMismatchError
from gdn_jax.require import require_array, require_config, require_kind

__all__ = [
    "GdnState",
    "Snapshot",
    "branch",
    "check_state",
    "init_state",
    "merge",
    "reset",
    "restore",
    "select",
    "snapshot",
    "state_nbytes",
    "state_shapes",
]


_AXES = {"S": "L B H K V", "conv_hist": "L B W-1 C"}


@flax.struct.dataclass
class GdnState:
    """The state of L stacked GDN layers for B sequences.

    `S` [L, B, H, K, V] float32: the delta rule's memory. `conv_hist` [L, B, W-1, C] float32: the last W - 1 inputs of
    the convolution, oldest first. Both start at zero. A pytree; it may be donated, since no function keeps a reference.
    """

    S: Leaf
    conv_hist: Leaf

    @property
    def layers(self) -> int:
        """L, the number of layers."""
        return self.S.shape[0]

    @property
    def batch(self) -> int:
        """B, the number of sequences."""
        return self.S.shape[1]


# As for `Leaf`: transformations rebuild the tree with other nodes, which a run-time check would refuse.
if TYPE_CHECKING:
    Saved = GdnState
else:
    Saved = Any


@flax.struct.dataclass
class Snapshot:
    """A copy of a state with buffers of its own: it survives steps that donate the original.

    A type of its own, so that a snapshot is not passed to a donating step by mistake.
    """

    state: Saved


@typing.no_type_check
def state_shapes(cfg: GdnConfig, *, layers: int, batch: int) -> GdnState:
    """The state as `jax.ShapeDtypeStruct` leaves: S [L, B, H, K, V] and conv_hist [L, B, W-1, C], float32."""
    require_config(cfg)
    s = (layers, batch, cfg.value_heads, cfg.key_dim, cfg.value_dim)
    history = (layers, batch, cfg.conv_width - 1, cfg.conv_channels)
    leaves: list[Any] = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (s, history)]
    return GdnState(*leaves)


@typing.no_type_check
def state_nbytes(cfg: GdnConfig, *, layers: int, batch: int) -> dict[str, int]:
    """Bytes of each part of the state, by field name."""
    shapes = state_shapes(cfg, layers=layers, batch=batch)
    return {name: leaf.size * leaf.dtype.itemsize for name, leaf in vars(shapes).items()}


@typing.no_type_check
def init_state(cfg: GdnConfig, *, layers: int, batch: int = 1) -> GdnState:
    """A state of zeros: what every sequence starts from.

    Raises:
        ValueError: `layers` or `batch` is below 1.
    """
    for name, value in (("layers", layers), ("batch", batch)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), state_shapes(cfg, layers=layers, batch=batch))


@typing.no_type_check
def reset(state: GdnState, rows=None) -> GdnState:
    """Set all rows, or the batch rows `rows` (int32 [n]), to zero, whatever they held: NaN and inf too.

    Rows given as a traced array that lie out of range are ignored; their values cannot be seen while tracing.

    Raises:
        ValueError: concrete rows that repeat or lie outside 0 … B-1.
    """
    _check_kind(state)
    if rows is None:
        return jax.tree.map(jnp.zeros_like, state)
    rows = _row_indices(rows, state.batch, repeats=False)
    return jax.tree.map(lambda leaf: leaf.at[:, rows].set(0.0, mode="drop"), state)


@typing.no_type_check
def snapshot(state: GdnState) -> Snapshot:
    """Copy a state on the device. Costs one read and one write of the state, 157 MB for the 27B geometry."""
    _check_kind(state)
    return Snapshot(_copy(state))


@typing.no_type_check
def restore(snap: Snapshot) -> GdnState:
    """The state that was saved, in new buffers: a snapshot can be restored any number of times."""
    require_kind("snap", snap, Snapshot)
    return _copy(snap.state)


@typing.no_type_check
def branch(state: GdnState, n: int) -> GdnState:
    """Fork every sequence n times: B rows become B·n, b-major (row b·n + i is the i-th fork of row b).

    Raises:
        ValueError: n is not an integer of at least 1.
    """
    _check_kind(state)
    if isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 1:
        raise ValueError(f"n must be an integer of at least 1, got {n!r}")
    return jax.tree.map(lambda leaf: jnp.repeat(leaf, n, axis=1), state)


@typing.no_type_check
def select(state: GdnState, rows) -> GdnState:
    """The chosen batch rows, in the order given: rows int32 [B'] -> a state of B' rows. A row may be chosen twice.

    Rows given as a traced array that lie out of range become NaN, never another sequence.

    Raises:
        ValueError: concrete rows outside 0 … B-1, or none.
    """
    _check_kind(state)
    rows = _row_indices(rows, state.batch, repeats=True)
    if rows.size == 0:
        raise ValueError("rows must name at least one row: a state without sequences is no state")
    return jax.tree.map(lambda leaf: jnp.take(leaf, rows, axis=1, mode="fill", fill_value=jnp.nan), state)


@typing.no_type_check
def merge(states: Sequence[GdnState]) -> GdnState:
    """Concatenate states along the batch axis, in the order given.

    Raises:
        ValueError: no states.
        StateMismatchError: the states differ in layers or geometry.
    """
    states = list(states)
    if not states:
        raise ValueError("merge needs at least one state, got none")
    for i, state in enumerate(states):
        _check_kind(state)
        for name in _AXES:
            got, want = getattr(state, name).shape, getattr(states[0], name).shape
            if (got[0], *got[2:]) != (want[0], *want[2:]):
                raise StateMismatchError(f"states to merge differ: {name} is {want} in state 0 and {got} in state {i}")
    if len(states) == 1:  # concatenating one array returns it, and the result must have buffers of its own
        return _copy(states[0])
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=1), *states)


def check_state(state: Any, cfg: GdnConfig) -> None:
    """Refuse a state of another geometry, with the shapes that `cfg` implies.

    Raises:
        TypeError: not a GdnState, or a leaf that is not float32.
        StateMismatchError: a leaf of another shape.
    """
    _check_kind(state)
    expected = state_shapes(cfg, layers=state.layers, batch=state.batch)
    for name, axes in _AXES.items():
        got, want = getattr(state, name).shape, getattr(expected, name).shape
        if got != want:
            raise StateMismatchError(
                f"state.{name} [{axes}] must be {want} for this configuration, got {got}; "
                "make a state with init_state(cfg, layers=…, batch=…)"
            )


def _copy(state: GdnState) -> GdnState:
    return jax.tree.map(jnp.copy, state)


def _check_kind(state: Any) -> None:
    """Refuse what is not a float32 state with the right number of axes, whatever its geometry."""
    require_kind("state", state, GdnState)
    for name, axes in _AXES.items():
        leaf = getattr(state, name)
        require_array(f"state.{name}", leaf, "float32")
        if leaf.ndim != len(axes.split()):
            raise StateMismatchError(f"state.{name} must have the axes [{axes}], got shape {leaf.shape}")


def _row_indices(rows, batch: int, *, repeats: bool):
    """Batch rows as int32 [n], checked where their values are known; traced ones out of range become B."""
    if isinstance(rows, Tracer):
        if rows.ndim != 1 or not jnp.issubdtype(rows.dtype, jnp.integer):
            raise ValueError(f"rows must be integers [n], got {rows.dtype} {rows.shape}")
        rows = rows.astype(jnp.int32)
        return jnp.where((rows >= 0) & (rows < batch), rows, batch)
    values = np.asarray(rows)
    if values.size == 0 and values.ndim == 1:
        values = values.astype(np.int32)  # numpy makes an empty list a float array
    if values.ndim != 1 or not np.issubdtype(values.dtype, np.integer):
        raise ValueError(f"rows must be integers [n], got {rows!r}")
    outside = values[(values < 0) | (values >= batch)]
    if outside.size:
        raise ValueError(f"rows must lie in 0 … {batch - 1} (batch {batch}), got {outside.tolist()}")
    if not repeats and len(np.unique(values)) != len(values):
        raise ValueError(f"rows must not repeat, got {values.tolist()}")
    return jnp.asarray(values, jnp.int32)
