"""The state of a decoder as a value: what its GDN layers remember, what its attention layers keep, how far it is."""

import dataclasses
import typing
from typing import TYPE_CHECKING, Any, override

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from gdn_jax.axes import Leaf
from gdn_jax.decoder.config import DecoderConfig
from gdn_jax.errors import StateMismatchError
from gdn_jax.require import require_array, require_kind
from gdn_jax.state import BoundedState, GdnState, RowAxis, check_state, state_shapes

__all__ = ["KV_DTYPES", "DecoderState", "check_decoder_state", "decoder_state_shapes", "init_decoder_state"]

KV_DTYPES = ("float32", "bfloat16")

# As for `Leaf`: transformations rebuild the tree with other nodes, which a run-time check would refuse.
if TYPE_CHECKING:
    Memory = GdnState | None
else:
    Memory = Any


@flax.struct.dataclass
class DecoderState(BoundedState):
    """The state of a decoder for B sequences, each at a position of its own.

    `gdn`: the state of its GDN layers (None where it has none). `keys` and `values` [A, B, S, N, Hd], float32 or
    bfloat16: what its A attention layers keep of the tokens so far, S being the capacity, N the key-value heads.
    `position` int32 [B]: tokens so far, and the slot of the next one. Slots from `position` on are never read.

    A pytree; it may be donated, since no function keeps a reference.
    """

    gdn: Memory
    keys: Leaf
    values: Leaf
    position: Leaf

    @property
    @override
    def batch(self) -> int:
        return self.position.shape[0]

    @property
    @override
    def capacity(self) -> int:
        return self.keys.shape[2]

    @property
    @override
    def used(self) -> Leaf:
        return self.position

    @override
    def row_axes(self) -> Any:
        # A row that does not exist is full, since no integer is NaN: it takes no token.
        axes: dict[str, Any] = {name: RowAxis(1, np.nan) for name in ("keys", "values")}
        axes["position"] = RowAxis(0, self.capacity)
        return DecoderState(gdn=None if self.gdn is None else self.gdn.row_axes(), **axes)

    @override
    def check(self) -> None:
        require_array("state.position", self.position, "int32")
        kv_dtype = _cache_dtype(self.keys)
        if jnp.ndim(self.position) != 1 or jnp.ndim(self.keys) != 5:
            raise StateMismatchError(
                f"state.position must be [B] and state.keys [A, B, S, N, Hd], got {self.position.shape} and "
                f"{self.keys.shape}"
            )
        require_array("state.values", self.values, kv_dtype)
        if self.values.shape != self.keys.shape:
            raise StateMismatchError(
                f"state.keys [A, B, S, N, Hd] must be {self.values.shape} as state.values is, got {self.keys.shape}"
            )
        self._check_batch("keys", self.keys)
        if self.gdn is not None:
            require_kind("state.gdn", self.gdn, GdnState)
            self.gdn.check()
            self._check_batch("gdn.S", self.gdn.S)

    @override
    def resized(self, capacity: int) -> "DecoderState":
        def room(leaf: Any) -> Any:
            more = max(0, capacity - self.capacity)
            return jnp.pad(leaf[:, :, :capacity], [(0, more if axis == 2 else 0) for axis in range(5)])

        if capacity == self.capacity:
            return self

        return dataclasses.replace(self, keys=room(self.keys), values=room(self.values))

    def _check_batch(self, name: str, leaf: Any) -> None:
        if leaf.shape[1] != self.batch:
            raise StateMismatchError(f"state.position has B={self.batch} rows, but state.{name} {leaf.shape}")


@typing.no_type_check
def decoder_state_shapes(cfg: DecoderConfig, *, batch: int, capacity: int, kv_dtype: str = "float32") -> DecoderState:
    """The state as `jax.ShapeDtypeStruct` leaves; arguments and errors as for `init_decoder_state`."""
    require_kind("cfg", cfg, DecoderConfig)
    for name, value in (("batch", batch), ("capacity", capacity)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
    if kv_dtype not in KV_DTYPES:
        raise ValueError(f"kv_dtype must be one of {', '.join(KV_DTYPES)}, got {kv_dtype!r}")
    memory = None
    if cfg.gdn is not None:
        memory = state_shapes(cfg.gdn, layers=cfg.count("linear_attention"), batch=batch)
    cache = (cfg.count("full_attention"), batch, capacity, cfg.kv_heads, cfg.head_dim)
    return DecoderState(
        gdn=memory,
        keys=jax.ShapeDtypeStruct(cache, jnp.dtype(kv_dtype)),
        values=jax.ShapeDtypeStruct(cache, jnp.dtype(kv_dtype)),
        position=jax.ShapeDtypeStruct((batch,), jnp.int32),
    )


@typing.no_type_check
def init_decoder_state(cfg: DecoderConfig, *, batch: int = 1, capacity: int, kv_dtype: str = "float32") -> DecoderState:
    """The state that every sequence starts from: zeros, at position 0, with room for `capacity` tokens.

    `kv_dtype` is the type in which keys and values are kept; computed is in float32 either way.

    Raises:
        TypeError: `cfg` is no DecoderConfig. ValueError: `batch` or `capacity` is below 1, or an unknown `kv_dtype`.
    """
    shapes = decoder_state_shapes(cfg, batch=batch, capacity=capacity, kv_dtype=kv_dtype)
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def check_decoder_state(state: Any, cfg: DecoderConfig) -> None:
    """Refuse a state of another geometry, with the shapes that `cfg` implies.

    Raises:
        TypeError: not a DecoderState, or a leaf of another dtype. StateMismatchError: a leaf of another shape.
    """
    require_kind("state", state, DecoderState)
    state.check()
    kv_dtype = str(state.keys.dtype)
    want = decoder_state_shapes(cfg, batch=state.batch, capacity=state.capacity, kv_dtype=kv_dtype)
    if state.keys.shape != want.keys.shape:
        raise StateMismatchError(
            f"state.keys [A, B, S, N, Hd] must be {want.keys.shape} for this configuration, got {state.keys.shape}; "
            "make a state with init_decoder_state(cfg, batch=…, capacity=…)"
        )
    _check_memory(state.gdn, want.gdn, cfg)


def _cache_dtype(keys: Any) -> str:
    dtype = str(getattr(keys, "dtype", type(keys).__name__))
    if dtype not in KV_DTYPES:
        raise TypeError(f"state.keys must be an array of {' or '.join(KV_DTYPES)}, got {dtype}")
    return dtype


def _check_memory(memory: Any, want: Any, cfg: DecoderConfig) -> None:
    if cfg.gdn is None:
        if memory is not None:
            raise StateMismatchError("state.gdn must be None for a configuration without GDN layers")
        return
    check_state(memory, cfg.gdn)
    if memory.S.shape != want.S.shape:
        raise StateMismatchError(f"state.gdn.S must be {want.S.shape} for this configuration, got {memory.S.shape}")
