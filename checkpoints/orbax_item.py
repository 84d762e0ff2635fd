"""One item of a converted checkpoint: an Orbax directory that holds a few named tensors as plain arrays.

A dense tensor is one array under its name. A Q4_0 tensor is a dictionary of two: `codes` uint32 [..., N, I/8], the
device words of `q4_blocks`, and `scales` float16 [..., N, I/32]; together 4.5 bits per weight. An array of more than
128 MiB is a dictionary of blocks of its rows, `rows0`, `rows1` and so on, which are read one by one: reading one array
takes up to twice its memory. Nothing is compressed: weights barely shrink, and it would double the time.

Orbax is imported on first use, because importing it takes a second and brings JAX along.
"""

import contextlib
import functools
import hashlib
import logging
import math
import operator
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from checkpoints.base import TensorInfo
from checkpoints.errors import CheckpointError
from checkpoints.q4_blocks import CODES_PER_WORD, GROUP, Q4Codes, Q4Words, check_codes, pack_words
from checkpoints.safetensors_file import DTYPES
from checkpoints.strict_json import read_json

__all__ = [
    "DENSE_DTYPES",
    "PLAIN_DTYPES",
    "Q4_0",
    "Arrays",
    "OrbaxItem",
    "Value",
    "arrays_of",
    "content_hash",
    "info_of",
    "save_item",
    "value_of",
]

Q4_0 = "Q4_0"
DENSE_DTYPES = {dtype.name: dtype for dtype in DTYPES.values()}
"""Of tensors that are not in blocks."""

PLAIN_DTYPES = DENSE_DTYPES | {dtype.name: dtype for dtype in map(np.dtype, (np.int32, np.uint8))}
"""Of all arrays that an item may hold under one name."""

Value = np.ndarray | Q4Codes | Q4Words
"""A tensor to store."""

Arrays = dict[str, np.ndarray]
"""What is stored for one tensor: {"": array}, or {"codes": words, "scales": scales}."""

# Also what Orbax moves at a time. Buffers of this size go back to the system at once; the heap would keep smaller ones.
_BLOCK_BYTES = 1 << 27


class _Stored(NamedTuple):
    """Shape and dtype of one stored array."""

    shape: tuple[int, ...]
    dtype: np.dtype


def info_of(value: Value) -> TensorInfo:
    """What `Checkpoint.info` says of a tensor with this value."""
    if isinstance(value, Q4Codes):
        return TensorInfo(value.codes.shape, Q4_0)
    return TensorInfo(value.shape, Q4_0 if isinstance(value, Q4Words) else value.dtype.name)


def arrays_of(value: Value) -> Arrays:
    """What is stored for a tensor.

    Raises:
        CheckpointError: a dtype that is not stored, or codes and scales that are not the logical form of a matrix.
            Words are what `pack_words` gave, and are not looked at.
    """
    if isinstance(value, Q4Words):
        return {"codes": np.ascontiguousarray(value.words), "scales": np.ascontiguousarray(value.scales)}
    if isinstance(value, Q4Codes):
        try:
            check_codes(*value)
        except (TypeError, ValueError) as error:
            raise CheckpointError(str(error)) from error
        return {"codes": pack_words(value.codes), "scales": np.ascontiguousarray(value.scales)}
    if value.dtype.name not in DENSE_DTYPES:
        raise CheckpointError(f"dtype must be one of {', '.join(DENSE_DTYPES)}, got {value.dtype}")
    return {"": np.ascontiguousarray(value)}


def content_hash(arrays: Arrays) -> str:
    """SHA-256 of the arrays' bytes, little-endian and in C order, codes before scales."""
    digest = hashlib.sha256()
    for _, array in sorted(arrays.items()):
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def save_item(path: Path, tensors: Mapping[str, Arrays]) -> None:
    """Write `tensors` as the item `path`, which appears when it is complete and on disk.

    An interrupt is held back until then: Orbax writes in threads of its own, which would outlive it.

    Raises:
        CheckpointError: the item cannot be written.
    """
    tree = {name: _node({key: _split(array) for key, array in arrays.items()}) for name, arrays in tensors.items()}

    def save(ocp: Any, checkpointer: Any) -> None:
        checkpointer.save(path.absolute(), args=ocp.args.PyTreeSave(tree))

    with _interrupts_held_back():
        _with_orbax(path, "cannot be written", save)


class OrbaxItem:
    """An item to read from: `infos` says what it must hold, and nothing is read unless it holds just that.

    Raises:
        CheckpointError: the item is missing or damaged, or holds other names, shapes or dtypes.
    """

    def __init__(self, path: Path, infos: Mapping[str, TensorInfo]):
        self.path = path
        self._expected = {name: _stored(info) for name, info in infos.items()}
        if not path.is_dir():
            raise CheckpointError(f"{path}: no such directory; the checkpoint is incomplete")
        self._check(_with_orbax(path, "damaged or no Orbax item", self._held))

    def read(self, name: str) -> Arrays:
        """The arrays of the tensor `name`, one of those promised, each in memory of its own.

        Raises:
            CheckpointError: they cannot be read, or are not what the item said it holds.
        """
        return {key: self._read_array(name, key, stored) for key, stored in self._expected[name].items()}

    def _read_array(self, name: str, key: str, stored: "_Stored") -> np.ndarray:
        blocks = _blocks(stored)
        if len(blocks) == 1:
            return self._read_block(name, [key], stored)
        array = np.empty(stored.shape, stored.dtype)
        for block, rows in blocks.items():
            expected = stored._replace(shape=array[rows].shape)
            array[rows] = self._read_block(name, [key, block], expected)
        return array

    def _read_block(self, name: str, keys: Sequence[str], expected: "_Stored") -> np.ndarray:
        place = [name, *filter(None, keys)]

        def restore(ocp: Any, checkpointer: Any) -> np.ndarray:
            # Only the place counts in what stands for the tree; the type is given beside it.
            item, restore_args = _nested(place, 0), _nested(place, ocp.RestoreArgs(restore_type=np.ndarray))
            args = ocp.args.PyTreeRestore(item, restore_args=restore_args, partial_restore=True)
            return functools.reduce(operator.getitem, place, checkpointer.restore(self.path.absolute(), args=args))

        array = _with_orbax(self.path, f"tensor {name!r} cannot be read", restore)
        if _Stored(array.shape, array.dtype) != expected:
            raise CheckpointError(f"{self.path}: tensor {name!r} is not what the item says it holds")
        return array

    def _held(self, _: Any, checkpointer: Any) -> dict[str, Any]:
        """What the item says it holds: a tree of `_Stored`."""
        # Orbax starts work on the arrays of one type before it looks at the next type, and would leave it half done.
        for key, entry in read_json(self.path / "_METADATA")["tree_metadata"].items():
            if entry["value_metadata"]["value_type"] != "np.ndarray":
                raise ValueError(f"{key} is not a numpy array")
        return _mapped(checkpointer.metadata(self.path.absolute()).item_metadata.tree, _checked)

    def _check(self, found: Mapping[str, Any]) -> None:
        if found.keys() != self._expected.keys():
            odd = min(found.keys() ^ self._expected.keys())
            raise CheckpointError(f"{self.path}: tensor {odd!r} is {'extra' if odd in found else 'missing'}")
        for name, arrays in self._expected.items():
            expected = _node({key: _split_stored(stored) for key, stored in arrays.items()})
            if found[name] != expected:
                raise CheckpointError(
                    f"{self.path}: tensor {name!r} must be {_text(expected)}, got {_text(found[name])}"
                )


def value_of(arrays: Arrays) -> np.ndarray | Q4Words:
    """The tensor that `arrays` store: the inverse of `arrays_of`, but for codes, which stay words.

    Raises:
        CheckpointError: a scale is infinite or NaN.
    """
    if "" in arrays:
        return arrays[""]
    if not np.isfinite(arrays["scales"]).all():
        raise CheckpointError("scales must be finite; the tensor is damaged")
    return Q4Words(arrays["codes"], arrays["scales"])


def _stored(info: TensorInfo) -> dict[str, _Stored]:
    """The arrays that hold a tensor."""
    if info.dtype != Q4_0:
        return {"": _Stored(info.shape, PLAIN_DTYPES[info.dtype])}
    *rows, columns = info.shape
    return {
        "codes": _Stored((*rows, columns // CODES_PER_WORD), np.dtype(np.uint32)),
        "scales": _Stored((*rows, columns // GROUP), np.dtype(np.float16)),
    }


def _checked(node: Any) -> _Stored:
    """Shape and dtype out of an array's metadata.

    A chunk is allocated whole, so that one larger than its array could claim any amount of memory.
    """
    chunk = node.storage.chunk_shape
    if any(wanted > size for wanted, size in zip(chunk, node.shape, strict=True)):
        raise ValueError(f"{node.name} of shape {list(node.shape)} has chunks of {list(chunk)}")
    return _Stored(tuple(node.shape), np.dtype(node.dtype))


def _text(node: Any) -> str:
    """A tree of `_Stored` in words."""
    if isinstance(node, dict):
        return ", ".join(f"{key}: {_text(below)}" for key, below in node.items())
    return f"{node.dtype} {list(node.shape)}"


def _mapped(tree: Mapping[str, Any], function: Callable[[Any], Any]) -> dict[str, Any]:
    """The tree with `function` of every leaf in its place."""
    return {key: _mapped(node, function) if isinstance(node, dict) else function(node) for key, node in tree.items()}


def _nested(place: Sequence[str], leaf: Any) -> Any:
    """A tree with one leaf, at `place`."""
    return functools.reduce(lambda node, key: {key: node}, reversed(place), leaf)


def _node(arrays: dict[str, Any]) -> Any:
    """The node of an Orbax tree for the arrays of one tensor: one array stands for itself."""
    return arrays.get("", arrays)


def _blocks(stored: _Stored) -> dict[str, slice]:
    """The rows of each block of an array; one block has no name."""
    nbytes = math.prod(stored.shape) * stored.dtype.itemsize
    if nbytes <= _BLOCK_BYTES:
        return {"": slice(None)}
    step = max(1, _BLOCK_BYTES * stored.shape[0] // nbytes)
    starts = range(0, stored.shape[0], step)
    return {f"rows{number}": slice(start, start + step) for number, start in enumerate(starts)}


def _split(array: np.ndarray) -> Any:
    """The array, or a dictionary of its blocks."""
    return _node({name: array[rows] for name, rows in _blocks(_Stored(array.shape, array.dtype)).items()})


def _split_stored(stored: _Stored) -> Any:
    """What `_split` gives for an array of this shape and dtype, as a tree of `_Stored`."""
    rows = range(stored.shape[0])
    parts = {name: len(rows[part]) for name, part in _blocks(stored).items()}
    return _node({name: stored._replace(shape=(count, *stored.shape[1:])) for name, count in parts.items()})


def _with_orbax[T](path: Path, problem: str, action: Callable[[Any, Any], T]) -> T:
    """What `action` makes of Orbax and a checkpointer for dictionaries of numpy arrays.

    Raises:
        CheckpointError: `action` raised anything at all; the message has the path, the problem and the reason.
    """
    import orbax.checkpoint as ocp

    with _silent_logger():
        handler = ocp.PyTreeCheckpointHandler(type_handler_registry=_numpy_registry(), use_compression=False)
        try:
            with ocp.Checkpointer(handler) as checkpointer:
                return action(ocp, checkpointer)
        except Exception as error:  # of any kind: storage errors, damaged JSON, missing keys
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise CheckpointError(f"{path}: {problem} ({reason:.300})") from error


@functools.cache
def _numpy_registry() -> Any:
    """What Orbax may store and read: numpy arrays and nothing else, so that a damaged item cannot ask for more."""
    from orbax.checkpoint import type_handlers

    class OneByOne(type_handlers.NumpyHandler):
        """Reads arrays one by one: when one fails, no others are under way that would complain later and elsewhere."""

        async def metadata(self, infos):
            return [metadata for info in infos for metadata in await super().metadata([info])]

        async def deserialize(self, infos, args=None):
            pairs = zip(infos, args or [type_handlers.RestoreArgs()] * len(infos), strict=True)
            return [array for info, arg in pairs for array in await super().deserialize([info], [arg])]

    # The arrays do not change while they are written, so that a copy of them would only cost memory.
    return type_handlers.create_type_handler_registry((np.ndarray, OneByOne(deepcopy_host_arrays=False)))


@contextlib.contextmanager
def _silent_logger() -> Iterator[None]:
    """Keep Orbax from logging: what goes wrong becomes an exception, and the rest is of no interest here.

    A filter, unlike a level, can be set and removed by several threads at once.
    """

    def nothing(_: logging.LogRecord) -> bool:
        return False

    logger = logging.getLogger("absl")
    logger.addFilter(nothing)
    try:
        yield
    finally:
        logger.removeFilter(nothing)


@contextlib.contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Deliver an interrupt (Ctrl-C) only when the block is done. Python delivers them to its main thread alone."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    pending: list[tuple[int, Any]] = []
    signal.signal(signal.SIGINT, lambda number, frame: pending.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if pending:
            handler(*pending[-1])
