"""One safetensors file: a header that is checked before anything trusts it, and reads of exactly the bytes asked for.

Format: 8 bytes little-endian header length n; n bytes of JSON, name -> {dtype, shape, data_offsets}, with an optional
`__metadata__` of strings; then the data, which the offsets (relative to its start) must cover without gap or overlap.
"""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from checkpoints.byte_file import ByteFile
from checkpoints.errors import CheckpointError
from checkpoints.strict_json import MAX_JSON_BYTES, json_object

__all__ = ["DTYPES", "SafetensorsFile", "StoredTensor"]

DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}

_LENGTH_BYTES = 8
_MAX_RANK = 64  # numpy's limit


class StoredTensor(NamedTuple):
    """A tensor where it lies: in `file`, under `name`, `nbytes` bytes from the absolute offset `start`.

    `dtype` is the format's own code; only the codes in `DTYPES` can be read.
    """

    file: "SafetensorsFile"
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int

    def __str__(self):
        return f"{self.file.path}: tensor {self.name!r}"


class SafetensorsFile(ByteFile):
    """An open safetensors file; opening reads and checks the header and no tensor data.

    Raises:
        CheckpointError: there is no such file, or its header is damaged, dishonest or does not fit the file.
    """

    metadata: dict[str, str]
    tensors: dict[str, StoredTensor]

    def __init__(self, path: Path):
        super().__init__(path)
        try:
            self.metadata, self.tensors = self._checked_header()
        except BaseException:
            self.close()
            raise

    def read_into(self, target: np.ndarray, spans: Iterable[range], what: str) -> None:
        """Fill `target` (uint8 [n]) with the bytes of `spans` (absolute, in this order); `what` is named in errors.

        Safe to call from several threads.

        Raises:
            CheckpointError: the file is closed, or has become shorter since it was opened.
        """
        done = 0
        for span in spans:
            self.fill(target[done : done + len(span)], span.start, what)
            done += len(span)

    def _checked_header(self) -> tuple[dict[str, str], dict[str, StoredTensor]]:
        size = self.size
        length = self._header_length(size)
        data_start = _LENGTH_BYTES + length
        header = json_object(self._header_bytes(_LENGTH_BYTES, length), f"{self.path}: header")
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise CheckpointError(f"{self.path}: __metadata__ must map strings to strings")
        tensors = {name: self._checked_tensor(name, entry, data_start) for name, entry in header.items()}
        self._check_cover(tensors.values(), data_start, size)
        return metadata, tensors

    def _header_length(self, size: int) -> int:
        if size < _LENGTH_BYTES:
            raise CheckpointError(f"{self.path}: {size} bytes are too few for a safetensors file; it looks truncated")
        length = int.from_bytes(self._header_bytes(0, _LENGTH_BYTES), "little")
        if length > MAX_JSON_BYTES:
            raise CheckpointError(
                f"{self.path}: not a safetensors file, or a damaged one: its first 8 bytes state a header of {length} "
                f"bytes, and at most {MAX_JSON_BYTES} are plausible"
            )
        if _LENGTH_BYTES + length > size:
            raise CheckpointError(f"{self.path}: truncated: the header takes {length} bytes and the file has {size}")
        return length

    def _header_bytes(self, offset: int, count: int) -> bytes:
        buffer = np.empty(count, np.uint8)
        self.fill(buffer, offset, "the header")
        return buffer.tobytes()

    def _checked_tensor(self, name: str, entry: Any, data_start: int) -> StoredTensor:
        where = f"{self.path}: tensor {name!r}"
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
            raise CheckpointError(f"{where}: expected the keys dtype, shape and data_offsets, got {_keys(entry)}")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str):
            raise CheckpointError(f"{where}: dtype must be a string, got {dtype!r}")
        if not _are_ints(shape, least=1) or len(shape) > _MAX_RANK:
            raise CheckpointError(f"{where}: shape must be at most {_MAX_RANK} positive integers, got {shape!r:.200}")
        if not _are_ints(offsets, least=0) or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise CheckpointError(f"{where}: data_offsets must be a start and an end, got {offsets!r:.200}")
        start, end = offsets
        if dtype in DTYPES and math.prod(shape) * DTYPES[dtype].itemsize != end - start:
            raise CheckpointError(
                f"{where}: {dtype} {shape} takes {math.prod(shape) * DTYPES[dtype].itemsize} bytes, "
                f"but data_offsets span {end - start}"
            )
        return StoredTensor(self, name, dtype, tuple(shape), data_start + start, end - start)

    def _check_cover(self, tensors: Iterable[StoredTensor], data_start: int, size: int) -> None:
        """The tensors fill the file from `data_start` to its end, one after the other."""
        position = data_start
        for tensor in sorted(tensors, key=lambda tensor: (tensor.start, tensor.nbytes)):
            if tensor.start != position:
                fault = "overlaps the tensor before it" if tensor.start < position else "leaves a gap before it"
                raise CheckpointError(f"{tensor}: {fault}: it starts at byte {tensor.start}, expected {position}")
            position = tensor.start + tensor.nbytes
            if position > size:
                raise CheckpointError(f"{tensor}: truncated: it ends at byte {position} and the file has {size}")
        if position != size:
            raise CheckpointError(f"{self.path}: {size - position} bytes at the end belong to no tensor")


def _are_ints(values: Any, least: int) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= least for value in values)


def _keys(entry: Any) -> str:
    return ", ".join(sorted(entry)) if isinstance(entry, dict) else type(entry).__name__
