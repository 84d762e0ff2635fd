"""Writing the GGUF container (version 3, little-endian) in one pass; the layout is described in `gguf_file`."""

import struct
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np

from checkpoints.gguf_file import DEFAULT_ALIGNMENT, GGML_TYPES, MAGIC, VALUE_DTYPES, VERSION, ValueType, aligned

__all__ = ["GgufWriter"]

_TYPE_CODES = {kind.name: code for code, kind in GGML_TYPES.items()}
_VALUE_CODES = {dtype: code for code, dtype in VALUE_DTYPES.items()} | {np.dtype(np.bool_): ValueType.BOOL}

# The widths that readers expect of integers: the first that holds the values.
_SCALAR_WIDTHS = ("<u4", "<i4", "<u8", "<i8")
_LIST_WIDTHS = ("<i4", "<i8", "<u8")


class GgufWriter:
    """Writes tensors to `file` as they come, in any order, and the header in front of them at the end.

    Names and shapes must be known at the start, because they fix the length of the header; types and offsets have a
    fixed width, and so have the numbers in `metadata`, which may change until `finish`.

    Raises:
        TypeError: a metadata value is of a kind that the format does not have.
    """

    def __init__(self, file: BinaryIO, metadata: dict[str, Any], shapes: Mapping[str, tuple[int, ...]]):
        self.metadata = metadata
        self._file = file
        self._shapes = dict(shapes)
        self._table: dict[str, bytes] = {}
        blank = sum(len(_packed_entry(name, shape, 0, 0)) for name, shape in shapes.items())
        self._start = self._end = aligned(len(self._packed_metadata()) + blank, DEFAULT_ALIGNMENT)

    def add(self, name: str, type_name: str, data: np.ndarray) -> None:
        """Append the tensor `name` (one of the announced ones), stored as `data`, the bytes of type `type_name`."""
        self._table[name] = _packed_entry(name, self._shapes[name], _TYPE_CODES[type_name], self._end - self._start)
        self._file.seek(self._end)
        self._file.write(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data)
        self._end = aligned(self._end + data.nbytes, DEFAULT_ALIGNMENT)

    def finish(self) -> None:
        """Write the header. Every announced tensor must have been added, each once."""
        self._file.truncate(self._end)
        self._file.seek(0)
        self._file.write(self._packed_metadata() + b"".join(self._table.values()))

    def _packed_metadata(self) -> bytes:
        entries = [_packed_string(key) + _packed_value(value) for key, value in self.metadata.items()]
        return struct.pack("<4sIQQ", MAGIC, VERSION, len(self._shapes), len(entries)) + b"".join(entries)


def _packed_entry(name: str, shape: tuple[int, ...], type_code: int, offset: int) -> bytes:
    extents = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
    return _packed_string(name) + extents + struct.pack("<IQ", type_code, offset)


def _packed_string(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(raw)) + raw


def _packed_value(value: Any) -> bytes:
    """Type code and payload: what the reader turns into `value` again."""
    if isinstance(value, str):
        return struct.pack("<I", ValueType.STRING) + _packed_string(value)
    if isinstance(value, list | tuple | np.ndarray):
        return struct.pack("<I", ValueType.ARRAY) + _packed_array(value)
    numbers = _typed(value, _SCALAR_WIDTHS)
    return struct.pack("<I", _VALUE_CODES[numbers.dtype]) + numbers.tobytes()


def _packed_array(values: Sequence[Any] | np.ndarray) -> bytes:
    """Element type, count, elements."""
    if len(values) and all(isinstance(value, str) for value in values):
        return struct.pack("<IQ", ValueType.STRING, len(values)) + b"".join(map(_packed_string, values))
    if len(values) and all(isinstance(value, list | tuple | np.ndarray) for value in values):
        return struct.pack("<IQ", ValueType.ARRAY, len(values)) + b"".join(map(_packed_array, values))
    numbers = _typed(values, _LIST_WIDTHS)
    return struct.pack("<IQ", _VALUE_CODES[numbers.dtype], len(values)) + numbers.tobytes()


def _typed(values: Any, widths: Sequence[str]) -> np.ndarray:
    """`values` as little-endian numbers: numpy's keep their dtype, Python's become bool, f32 or a width that fits."""
    numbers = np.asarray(values)
    if numbers.ndim > 1 or numbers.dtype.kind not in "biuf":
        raise TypeError(f"metadata values are bools, integers, floats, strings and lists of these, got {values!r:.80}")
    if isinstance(values, np.ndarray | np.generic) or numbers.dtype.kind == "b":
        typed = numbers.astype(numbers.dtype.newbyteorder("<"))
    elif numbers.dtype.kind == "f":
        typed = numbers.astype("<f4")
    else:
        typed = next(numbers.astype(width) for width in widths if np.array_equal(numbers.astype(width), numbers))
    if typed.dtype not in _VALUE_CODES:
        raise TypeError(f"metadata numbers cannot be {typed.dtype}")
    return typed
