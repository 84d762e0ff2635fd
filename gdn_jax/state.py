"""The state of GDN layers, and what every kind of state says of itself; `state_value` copies, forks and merges them."""

import abc
import typing
from typing import Any, NamedTuple, override

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from gdn_jax.axes import Leaf
from gdn_jax.config import GdnConfig
from gdn_jax.errors import StateMismatchError
from gdn_jax.require import require_array, require_config, require_kind

__all__ = [
    "BoundedState",
    "GdnState",
    "RowAxis",
    "SequenceState",
    "check_state",
    "init_state",
    "state_nbytes",
    "state_shapes",
]


class RowAxis(NamedTuple):
    """Where a leaf has its batch rows, and the value that stands for a row that does not exist."""

    axis: int
    missing: float | int | bool


class SequenceState(abc.ABC):
    """The state of B sequences, of whatever kind: a pytree whose every leaf has an axis of rows.

    This is all that the functions of `state_value` know of a state.
    """

    @property
    @abc.abstractmethod
    def batch(self) -> int:
        """B, the number of sequences."""

    @abc.abstractmethod
    def row_axes(self) -> Any:
        """The tree with a `RowAxis` in place of every leaf."""

    @abc.abstractmethod
    def check(self) -> None:
        """Refuse leaves that cannot be those of one state, whatever its geometry.

        Raises:
            TypeError: a leaf of another kind or dtype. StateMismatchError: leaves whose shapes do not go together.
        """


class BoundedState(SequenceState):
    """A state with room for so many tokens of every sequence, and no more."""

    @property
    @abc.abstractmethod
    def capacity(self) -> int:
        """The most tokens that a sequence can have."""

    @property
    @abc.abstractmethod
    def used(self) -> Leaf:
        """The tokens that each sequence has, int32 [B]."""

    @abc.abstractmethod
    def resized(self, capacity: int) -> "BoundedState":
        """The state with room for `capacity` tokens, which no row exceeds. Leaves that stay as they are are shared."""


_AXES = {"S": "L B H K V", "conv_hist": "L B W-1 C"}


@flax.struct.dataclass
class GdnState(SequenceState):
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
    @override
    def batch(self) -> int:
        return self.S.shape[1]

    @override
    def row_axes(self) -> Any:
        return GdnState(*(typing.cast(Any, RowAxis(1, np.nan)) for _ in _AXES))

    @override
    def check(self) -> None:
        for name, axes in _AXES.items():
            leaf = getattr(self, name)
            require_array(f"state.{name}", leaf, "float32")
            if leaf.ndim != len(axes.split()):
                raise StateMismatchError(f"state.{name} must have the axes [{axes}], got shape {leaf.shape}")
        if self.conv_hist.shape[:2] != self.S.shape[:2]:
            raise StateMismatchError(
                f"state.conv_hist [{_AXES['conv_hist']}] must have L={self.layers} and B={self.batch} as state.S has, "
                f"got {self.conv_hist.shape}"
            )


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


def check_state(state: Any, cfg: GdnConfig) -> None:
    """Refuse a state of another geometry, with the shapes that `cfg` implies.

    Raises:
        TypeError: not a GdnState, or a leaf that is not float32.
        StateMismatchError: a leaf of another shape.
    """
    require_kind("state", state, GdnState)
    state.check()
    expected = state_shapes(cfg, layers=state.layers, batch=state.batch)
    for name, axes in _AXES.items():
        got, want = getattr(state, name).shape, getattr(expected, name).shape
        if got != want:
            raise StateMismatchError(
                f"state.{name} [{axes}] must be {want} for this configuration, got {got}; "
                "make a state with init_state(cfg, layers=…, batch=…)"
            )
