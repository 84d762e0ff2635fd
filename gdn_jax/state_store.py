"""Sequences on disk: saved, and taken up again at exactly the token where they were, by any process.

A state is saved as a directory of Orbax arrays under a manifest (see `checkpoints.array_store`), bound to the geometry
and to the weights that made it. What is stored is the logical state: S and the history of every GDN layer, the used
slots of the key-value cache (as many as the row with the most tokens has; those that a row does not use are zero), the
positions, and for the rows of a generation the pending token and which tokens were consumed. It is bit for bit what a
later `load_state` gives back.
"""

import dataclasses
import json
import os
import typing
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from checkpoints.array_store import load_arrays, save_arrays
from checkpoints.base import TensorInfo
from checkpoints.names import listed
from gdn_jax.axes import Array
from gdn_jax.config import GdnConfig
from gdn_jax.decoder.config import DecoderConfig
from gdn_jax.decoder.generate import Rows, bucket, check_rows
from gdn_jax.decoder.state import KV_DTYPES, DecoderState, check_decoder_state, decoder_state_shapes
from gdn_jax.errors import CheckpointError, StateMismatchError
from gdn_jax.integers import positive_int
from gdn_jax.require import require_kind
from gdn_jax.state import GdnState, SequenceState, check_state, state_shapes
from gdn_jax.state_value import resize

__all__ = ["load_state", "save_state"]

_KINDS: dict[str, type[SequenceState]] = {"gdn": GdnState, "decoder": DecoderState, "rows": Rows}

# Slots are cut and padded on the device in powers of two from here on, so that few programs serve all positions.
_LEAST_SLOTS = 256

# Positions are int32.
_MOST = 2**31 - 1


@typing.no_type_check
def save_state(path: str | os.PathLike[str], state: SequenceState, *, cfg: Any, weights_id: str) -> None:
    """Save a state as the directory `path`, in place of what was saved there before.

    `state` is a `GdnState` (with its `GdnConfig`), a `DecoderState`, or the rows that `Decoder.generate` returns (with
    their `DecoderConfig`). `weights_id` names the weights it belongs to: what `fingerprint(weights)` says, or any
    text that is the same if and only if they are. What was there before is replaced when all is on disk; if the save
    fails or is interrupted, even by the loss of power, it stays whole. The path is only ever written to if it is free
    or holds a saved state.

    Costs a copy of what is stored on the host, and its hashing, 0.9 s per GB on one core, beside writing it: 157 MB for
    one sequence of the 27B model, and 131 kB for each of its tokens with keys and values in float32.

    Raises:
        CheckpointError: something else is at `path`, or it cannot be written. StateMismatchError: the state is not of
        this configuration, or a position lies beyond its capacity. TypeError: `state` or `cfg` is of another kind, or
        traced. ValueError: an empty `weights_id`.
    """
    kind = _kind_of(state, cfg)
    _check_weights_id(weights_id)
    if any(isinstance(leaf, Tracer | jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state)):
        raise TypeError("state must have values to save: inside jit, or as shapes alone, it has none")
    arrays, header = _ARRAYS[kind](state)
    save_arrays(path, {"kind": kind, "config": _as_json(cfg), "weights_id": weights_id, **header}, arrays)


@typing.no_type_check
def load_state(path: str | os.PathLike[str], *, cfg: Any, weights_id: str, capacity: int | None = None) -> Any:
    """The state that was saved at `path`, of the kind that it was, in new buffers on the default device.

    `cfg` and `weights_id` must be those it was saved with. `capacity` gives room for another number of tokens than it
    had then, more or fewer, as long as all that it holds has room.

    Everything is read, and compared with its hashes, before a state is made.

    Raises:
        CheckpointError: nothing was saved there, or it is incomplete, damaged, or of another version.
        StateMismatchError: it belongs to another geometry or other weights, is of a kind that goes with another
        configuration, or has more tokens than `capacity`. TypeError: `cfg` is no configuration, or `capacity` no
        integer. ValueError: an empty `weights_id`, or a `capacity` for a GDN state, which takes the same room always.
    """
    if not isinstance(cfg, GdnConfig | DecoderConfig):
        raise TypeError(f"cfg must be a GdnConfig or a DecoderConfig, got {type(cfg).__name__}")
    _check_weights_id(weights_id)
    if capacity is not None and isinstance(cfg, GdnConfig):
        raise ValueError(
            "capacity belongs to a decoder's state: a GdnState takes the same room for any number of tokens"
        )
    capacity = None if capacity is None else positive_int("capacity", capacity)

    def check(header: Mapping[str, Any], infos: Mapping[str, TensorInfo]) -> None:
        _check_belongs(header, cfg, weights_id, str(path))
        _check_infos(infos, _expected(header, cfg, str(path)), str(path))
        if capacity is not None and capacity < header["slots"]:
            raise StateMismatchError(
                f"{path}: holds up to {header['slots']} tokens of a sequence, and the capacity is to be {capacity}; "
                "give it that many at least"
            )

    header, arrays = load_arrays(path, check)
    if header["kind"] == "gdn":
        return _gdn_of(arrays)
    state = _decoder_of(arrays, header, str(path))
    if header["kind"] == "rows":
        seen = np.unpackbits(arrays["seen"], axis=1, count=cfg.vocab).astype(bool)
        state = Rows(state=state, tokens=_on_device(arrays["tokens"]), seen=_on_device(seen))
    return resize(state, capacity=header["capacity"] if capacity is None else capacity)


# What is stored of each kind


def _arrays_of_gdn(state: GdnState) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    return {"S": np.asarray(state.S), "conv_hist": np.asarray(state.conv_hist)}, {
        "batch": state.batch,
        "layers": state.layers,
    }


def _arrays_of_decoder(state: DecoderState) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    position = np.asarray(state.position)
    if ((position < 0) | (position > state.capacity)).any():
        raise StateMismatchError(
            f"state.position must lie in 0 … {state.capacity} (the capacity), got {position.tolist()!s:.200}"
        )
    slots = int(position.max())
    arrays = {"position": position, "keys": _used(state.keys, position), "values": _used(state.values, position)}
    if state.gdn is not None:
        arrays |= _arrays_of_gdn(state.gdn)[0]
    header = {"batch": state.batch, "slots": slots, "capacity": state.capacity, "kv_dtype": str(state.keys.dtype)}
    return arrays, header


def _arrays_of_rows(rows: Rows) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    arrays, header = _arrays_of_decoder(rows.state)
    packed = np.packbits(np.asarray(rows.seen), axis=1)
    return arrays | {"tokens": np.asarray(rows.tokens), "seen": packed}, header


_ARRAYS = {"gdn": _arrays_of_gdn, "decoder": _arrays_of_decoder, "rows": _arrays_of_rows}


def _used(cache: Array, position: np.ndarray) -> np.ndarray:
    """Keys or values [A, B, S, N, Hd] up to the largest position; behind a row's own one may stand anything."""
    slots = int(position.max())
    on_host = np.asarray(cache[:, :, : min(bucket(slots, least=_LEAST_SLOTS), cache.shape[2])])[:, :, :slots]
    is_used = np.arange(slots)[None] < position[:, None]
    return np.where(is_used[None, :, :, None, None], on_host, np.zeros((), on_host.dtype))


def _gdn_of(arrays: Mapping[str, np.ndarray]) -> GdnState:
    return GdnState(_on_device(arrays["S"]), _on_device(arrays["conv_hist"]))


def _decoder_of(arrays: Mapping[str, np.ndarray], header: Mapping[str, Any], where: str) -> DecoderState:
    """The state with room for little more than the slots that are used."""
    position = arrays["position"]
    if (position < 0).any() or position.max() != header["slots"]:
        raise CheckpointError(f"{where}: positions {position.tolist()!s:.200} do not go with {header['slots']} slots")
    room = min(bucket(header["slots"], least=_LEAST_SLOTS), header["capacity"])

    def cache(name: str) -> Array:
        more = [(0, room - header["slots"] if axis == 2 else 0) for axis in range(5)]
        return _on_device(np.pad(arrays[name], more))

    memory = _gdn_of(arrays) if "S" in arrays else None
    return DecoderState(gdn=memory, keys=cache("keys"), values=cache("values"), position=_on_device(position))


def _on_device(array: np.ndarray) -> Array:
    # A copy: memory that belongs to numpy could not be donated.
    return jnp.array(array, copy=True)


# What must agree


def _kind_of(state: Any, cfg: Any) -> str:
    for kind, of_kind in _KINDS.items():
        if isinstance(state, of_kind):
            require_kind(f"cfg of a {of_kind.__name__}", cfg, GdnConfig if kind == "gdn" else DecoderConfig)
            {"gdn": check_state, "decoder": check_decoder_state, "rows": check_rows}[kind](state, cfg)
            return kind
    raise TypeError(f"state must be a GdnState, a DecoderState or Rows, got {type(state).__name__}")


def _check_weights_id(weights_id: Any) -> None:
    if not isinstance(weights_id, str):
        raise TypeError(f"weights_id must be text, such as fingerprint(weights), got {type(weights_id).__name__}")
    if not weights_id:
        raise ValueError("weights_id must not be empty: it says which weights the state belongs to")


def _as_json(cfg: Any) -> dict[str, Any]:
    """The configuration as it comes back from JSON."""
    return json.loads(json.dumps(dataclasses.asdict(cfg)))


def _check_belongs(header: Mapping[str, Any], cfg: Any, weights_id: str, where: str) -> None:
    """Refuse what was saved with another configuration or other weights."""
    kind = header.get("kind")
    if kind not in _KINDS or not isinstance(header.get("config"), dict):
        raise CheckpointError(f"{where}: kind must be one of {', '.join(_KINDS)}, got {kind!r:.40}")
    if (kind == "gdn") != isinstance(cfg, GdnConfig):
        raise StateMismatchError(
            f"{where}: holds a {_KINDS[kind].__name__}, which does not go with a {type(cfg).__name__}; give the "
            "configuration it was saved with"
        )
    saved, given = _flat(header["config"]), _flat(_as_json(cfg))
    if odd := sorted(key for key in saved.keys() | given.keys() if saved.get(key) != given.get(key)):
        raise StateMismatchError(
            f"{where}: belongs to another geometry, which differs in {listed(odd)} ({odd[0]} is "
            f"{saved.get(odd[0])!r:.80} there and {given.get(odd[0])!r:.80} here)"
        )
    if header.get("weights_id") != weights_id:
        raise StateMismatchError(
            f"{where}: belongs to other weights ({header.get('weights_id')!r:.80} there and {weights_id!r:.80} here); "
            "load the model it was saved with, in the same tier"
        )


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The fields by their dotted names."""
    fields = {}
    for name, value in config.items():
        fields |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return fields


def _expected(header: Mapping[str, Any], cfg: Any, where: str) -> dict[str, TensorInfo]:
    """The arrays that there must be, by what the header says."""
    kind = header["kind"]
    least = {"batch": 1, "layers": 1} if kind == "gdn" else {"batch": 1, "slots": 0, "capacity": 1}
    for key, bound in least.items():
        if type(header.get(key)) is not int or not bound <= header[key] <= _MOST:
            raise CheckpointError(
                f"{where}: {key} must be an integer in {bound} … {_MOST}, got {header.get(key)!r:.40}"
            )
    batch = header["batch"]
    if kind == "gdn":
        return _infos(vars(state_shapes(cfg, layers=header["layers"], batch=batch)))
    if header.get("kv_dtype") not in KV_DTYPES or header["slots"] > header["capacity"]:
        raise CheckpointError(
            f"{where}: a cache of {header.get('kv_dtype')!r:.40} with {header['slots']} used slots of "
            f"{header['capacity']} cannot be"
        )
    shapes = decoder_state_shapes(cfg, batch=batch, capacity=header["capacity"], kv_dtype=header["kv_dtype"])
    infos = _infos({name: getattr(shapes, name) for name in ("position", "keys", "values")})
    for name in ("keys", "values"):
        layers, rows, _, *rest = infos[name].shape
        infos[name] = infos[name]._replace(shape=(layers, rows, header["slots"], *rest))
    if shapes.gdn is not None:
        infos |= _infos(vars(shapes.gdn))
    if kind == "rows":
        infos["tokens"] = TensorInfo((batch,), "int32")
        infos["seen"] = TensorInfo((batch, -(-cfg.vocab // 8)), "uint8")
    return infos


def _infos(shapes: Mapping[str, Any]) -> dict[str, TensorInfo]:
    return {name: TensorInfo(leaf.shape, leaf.dtype.name) for name, leaf in shapes.items()}


def _check_infos(found: Mapping[str, TensorInfo], expected: Mapping[str, TensorInfo], where: str) -> None:
    for name in sorted(found.keys() | expected.keys()):
        got, want = found.get(name), expected.get(name)
        if got != want:
            texts = ["nothing" if info is None else f"{info.dtype} {list(info.shape)}" for info in (want, got)]
            raise CheckpointError(f"{where}: array {name!r:.100} must be {texts[0]}, got {texts[1]}")
