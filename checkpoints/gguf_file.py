"""The GGUF container, versions 2 and 3, little-endian: header, metadata, tensor table, and tensor data on request.

    "GGUF" · version u32 · tensor count u64 · metadata count u64
    metadata:  key string · type u32 · value            string = length u64 · UTF-8 bytes
    tensors:   name string · rank u32 · extents u64… (innermost first) · type u32 · offset u64
    padding to the alignment, then the data; offsets count from here

Files may be damaged or hostile. Opening reads nothing but the header, checks every count and length against the bytes
that are left before it allocates for them, and lets no tensor reach outside the file or into another one. Data is read
with positioned reads, not mapped: a file that shrinks later is then an error and not a signal.
"""

import math
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from checkpoints.byte_file import ByteFile
from checkpoints.errors import CheckpointError
from checkpoints.q4_blocks import GROUP, Q4Words, unpack_q4_0, words_of_q4_0

__all__ = [
    "DEFAULT_ALIGNMENT",
    "GGML_TYPES",
    "MAGIC",
    "PLAIN_DTYPES",
    "READABLE",
    "VALUE_DTYPES",
    "VERSION",
    "BlockType",
    "GgufFile",
    "GgufTensor",
    "ValueType",
    "aligned",
]

MAGIC = b"GGUF"
VERSION = 3
DEFAULT_ALIGNMENT = 32

# The largest vocabularies in use make headers of some 12 MB. Beyond this a file is not a model but an attack on memory.
_MAX_HEADER = 64 << 20
_CHUNK = 1 << 20
_MAX_ALIGNMENT = 1 << 20
_MAX_RANK = 4
_MAX_NESTING = 4
_MAX_KEY = (1 << 16) - 1

# The fewest bytes that one entry of each table can take: what a count may promise is bounded by what is there.
_LEAST_METADATA = 8 + 4 + 1
_LEAST_TENSOR = 8 + 4 + 8 + 4 + 8

# Weights decoded at a time, so that decoding needs little more than its result.
_DECODE_WEIGHTS = 1 << 22


class BlockType(NamedTuple):
    """A tensor type of the format: `block` neighbouring weights of a row are stored in `nbytes` bytes."""

    name: str
    block: int
    nbytes: int


class ValueType:
    """Codes of the metadata value types that are not plain numbers."""

    BOOL = 7
    STRING = 8
    ARRAY = 9


VALUE_DTYPES = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}

# Every type that files in circulation use: the size of a tensor must be known to check it, also when it is not decoded.
GGML_TYPES = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    9: BlockType("Q8_1", 32, 40),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    15: BlockType("Q8_K", 256, 292),
    16: BlockType("IQ2_XXS", 256, 66),
    17: BlockType("IQ2_XS", 256, 74),
    18: BlockType("IQ3_XXS", 256, 98),
    19: BlockType("IQ1_S", 256, 50),
    20: BlockType("IQ4_NL", 32, 18),
    21: BlockType("IQ3_S", 256, 110),
    22: BlockType("IQ2_S", 256, 82),
    23: BlockType("IQ4_XS", 256, 136),
    24: BlockType("I8", 1, 1),
    25: BlockType("I16", 1, 2),
    26: BlockType("I32", 1, 4),
    27: BlockType("I64", 1, 8),
    28: BlockType("F64", 1, 8),
    29: BlockType("IQ1_M", 256, 56),
    30: BlockType("BF16", 1, 2),
    34: BlockType("TQ1_0", 256, 54),
    35: BlockType("TQ2_0", 256, 66),
    39: BlockType("MXFP4", 32, 17),
    40: BlockType("NVFP4", 64, 36),
    41: BlockType("Q1_0", 128, 18),
}


class GgufTensor(NamedTuple):
    """One entry of the tensor table: `shape` outermost axis first, `start` counted from the beginning of the file."""

    name: str
    shape: tuple[int, ...]
    type: BlockType
    start: int

    @property
    def rows(self) -> int:
        """How many rows of `shape[-1]` weights the tensor holds."""
        return math.prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        """Stored bytes per row."""
        return self.shape[-1] // self.type.block * self.type.nbytes

    @property
    def end(self) -> int:
        """The first byte after the tensor."""
        return self.start + self.rows * self.row_bytes


class GgufFile(ByteFile):
    """An open GGUF file: `metadata` (key to value), `tensors` (name to `GgufTensor`), and their data on request.

    Metadata values are Python numbers, bools, strings, numpy arrays of numbers or bools, and lists of everything else.

    Raises:
        CheckpointError: the file is missing, or is not a whole and consistent GGUF file of version 2 or 3.
    """

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    def __init__(self, path: str | os.PathLike[str]):
        super().__init__(path)
        try:
            self.metadata, self.tensors = _parse(self)
        except BaseException:
            self.close()
            raise

    def read_rows(self, tensor: GgufTensor, start: int = 0, stop: int | None = None) -> np.ndarray:
        """The stored bytes of rows `start` to `stop` (default all), uint8 [rows, row_bytes].

        Raises:
            CheckpointError: the file is closed or has become shorter.
        """
        stop = tensor.rows if stop is None else stop
        raw = np.empty((stop - start, tensor.row_bytes), np.uint8)
        self.fill(raw, tensor.start + start * tensor.row_bytes, f"tensor {tensor.name!r}")
        return raw

    def read(self, tensor: GgufTensor, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows `start` to `stop` (default all) as numbers [rows, I].

        F32, F16 and BF16 come as they are stored; Q4_0 and Q8_0 (exactly) and Q6_K (in one rounding) as float32.

        Raises:
            CheckpointError: the type is another one, a block's scale is not finite, or see `read_rows`.
        """
        stop = tensor.rows if stop is None else stop
        if tensor.type.name in PLAIN_DTYPES:
            return self.read_rows(tensor, start, stop).view(PLAIN_DTYPES[tensor.type.name])
        if tensor.type.name not in _DECODERS:
            raise CheckpointError(
                f"{self.path}: tensor {tensor.name!r} is of type {tensor.type.name}, which is not supported; "
                f"requantise the file to one of {', '.join(READABLE)}"
            )
        numbers = np.empty((stop - start, tensor.shape[-1]), np.float32)
        step = max(1, _DECODE_WEIGHTS // tensor.shape[-1])
        for row in range(start, stop, step):
            raw = self.read_rows(tensor, row, min(row + step, stop))
            numbers[row - start :][: len(raw)] = self._decoded(_DECODERS[tensor.type.name], raw, tensor, row)
        return numbers

    def read_words(self, tensor: GgufTensor, start: int = 0, stop: int | None = None) -> Q4Words:
        """Rows `start` to `stop` (default all) of a Q4_0 tensor as device words and scales, bit for bit.

        Raises:
            CheckpointError: the type is another one, a scale is not finite, or see `read_rows`.
        """
        if tensor.type.name != "Q4_0":
            raise CheckpointError(f"{self.path}: tensor {tensor.name!r} is of type {tensor.type.name}, expected Q4_0")
        return self._decoded(words_of_q4_0, self.read_rows(tensor, start, stop), tensor, start)

    def _decoded[T](self, decode: Callable[[np.ndarray], T], raw: np.ndarray, tensor: GgufTensor, row: int) -> T:
        try:
            return decode(raw)
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: tensor {tensor.name!r}, from row {row}: {error}") from None


def aligned(position: int, alignment: int) -> int:
    """`position` rounded up to a multiple of `alignment`."""
    return -(-position // alignment) * alignment


class _Header:
    """The header as a stream of numbers and strings, none of which may reach beyond the file.

    `place` says what is being read, for the error messages.
    """

    def __init__(self, file: ByteFile):
        self._file = file
        self._buffer = bytearray()
        self.source = str(file.path)
        self.size = file.size
        self.position = 0
        self.place = "the header"

    def error(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.source}: {self.place}: {problem}")

    def take(self, count: int) -> bytearray:
        """The next `count` bytes."""
        end = self.position + count
        if end > self.size:
            raise self.error(
                f"needs {count} bytes at byte {self.position}, but the file ends at {self.size}; "
                "it is truncated or damaged"
            )
        if end > _MAX_HEADER:
            raise self.error(f"reaches byte {end} of the file; headers beyond {_MAX_HEADER} bytes are refused")
        while len(self._buffer) < end:
            have = len(self._buffer)
            chunk = np.empty(min(max(_CHUNK, end - have), self.size - have), np.uint8)
            self._file.fill(chunk, have, self.place)
            self._buffer += chunk.data
        taken = self._buffer[self.position : end]
        self.position = end
        return taken

    def u32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def u64(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def count(self, least: int) -> int:
        """A u64 that counts entries of at least `least` bytes each, all of which must still fit."""
        count = self.u64()
        if count * least > self.size - self.position:
            raise self.error(
                f"promises {count} items of {least} bytes or more, but only {self.size - self.position} bytes are "
                "left; the file is truncated or damaged"
            )
        return count

    def string(self) -> str:
        """A string value; bytes that are not UTF-8 survive as surrogates, since tokenizers hold such pieces."""
        return self.take(self.count(1)).decode("utf-8", "surrogateescape")

    def name(self) -> str:
        """A key or a tensor name: not empty, at most 65535 bytes, printable, valid UTF-8."""
        length = self.count(1)
        if not 0 < length <= _MAX_KEY:
            raise self.error(f"a name must have 1 to {_MAX_KEY} bytes, got {length}")
        raw = self.take(length)
        try:
            name = raw.decode("utf-8")
        except UnicodeDecodeError:
            name = ""
        if not name.isprintable() or not name:
            raise self.error(f"a name must be printable UTF-8, got {bytes(raw[:40])!r}")
        return name


def _parse(file: ByteFile) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    header = _Header(file)
    if header.take(min(4, header.size)) != MAGIC:
        raise header.error("not a GGUF file: it does not begin with 'GGUF'")
    _check_version(header)
    tensor_count = header.count(_LEAST_TENSOR)
    metadata = _parse_metadata(header, header.count(_LEAST_METADATA))
    _refuse_split(header, metadata)
    tensors = _parse_tensors(header, tensor_count, _alignment(header, metadata))
    return metadata, {tensor.name: tensor for tensor in tensors}


def _check_version(header: _Header) -> None:
    version = header.u32()
    if version in (2, 3):
        return
    if int.from_bytes(version.to_bytes(4, "little"), "big") in (2, 3):
        raise header.error("the file is big-endian, which is not supported; convert it to little-endian")
    raise header.error(f"version {version} is not supported (2 and 3 are); convert the file again with current tools")


def _parse_metadata(header: _Header, count: int) -> dict[str, Any]:
    metadata = {}
    for index in range(count):
        header.place = f"metadata entry {index}"
        key = header.name()
        header.place = f"metadata key {key!r}"
        if key in metadata:
            raise header.error("occurs twice")
        metadata[key] = _parse_value(header, header.u32(), nesting=0)
    return metadata


def _parse_value(header: _Header, code: int, nesting: int) -> Any:
    if code == ValueType.STRING:
        return header.string()
    if code == ValueType.ARRAY:
        return _parse_array(header, nesting + 1)
    return _parse_numbers(header, code, 1)[0].item()


def _parse_array(header: _Header, nesting: int) -> Any:
    if nesting > _MAX_NESTING:
        raise header.error(f"arrays are nested more than {_MAX_NESTING} deep")
    code = header.u32()
    if code == ValueType.STRING:
        return [header.string() for _ in range(header.count(8))]
    if code == ValueType.ARRAY:
        return [_parse_array(header, nesting + 1) for _ in range(header.count(12))]
    return _parse_numbers(header, code, header.count(_number_dtype(header, code).itemsize))


def _parse_numbers(header: _Header, code: int, count: int) -> np.ndarray:
    dtype = _number_dtype(header, code)
    numbers = np.frombuffer(header.take(count * dtype.itemsize), dtype)
    if code != ValueType.BOOL:
        return numbers
    if np.any(numbers > 1):
        raise header.error(f"a bool must be 0 or 1, got {numbers.max()}")
    return numbers.view(np.bool_)


def _number_dtype(header: _Header, code: int) -> np.dtype:
    if code == ValueType.BOOL:
        return np.dtype("u1")
    if code not in VALUE_DTYPES:
        raise header.error(f"has the unknown value type {code}")
    return VALUE_DTYPES[code]


def _refuse_split(header: _Header, metadata: dict[str, Any]) -> None:
    header.place = "metadata key 'split.count'"
    count = metadata.get("split.count", 1)
    if type(count) is not int or count > 1:
        raise header.error(
            f"the file is one of {count!r:.80} parts of a split model; merge them into one file first "
            "(llama-gguf-split --merge)"
        )


def _alignment(header: _Header, metadata: dict[str, Any]) -> int:
    header.place = "metadata key 'general.alignment'"
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 0 < alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
        raise header.error(f"must be a power of two of at most {_MAX_ALIGNMENT}, got {alignment!r}")
    return alignment


def _parse_tensors(header: _Header, count: int, alignment: int) -> list[GgufTensor]:
    """The tensor table, with starts made absolute once it is known where the data begins."""
    relative: dict[str, GgufTensor] = {}
    for index in range(count):
        header.place = f"tensor {index}"
        tensor = _parse_tensor(header, alignment)
        if tensor.name in relative:
            raise header.error("the name occurs twice")
        relative[tensor.name] = tensor
    data = aligned(header.position, alignment)
    tensors = [tensor._replace(start=data + tensor.start) for tensor in relative.values()]
    _check_extents(header, tensors)
    return tensors


def _parse_tensor(header: _Header, alignment: int) -> GgufTensor:
    name = header.name()
    header.place = f"tensor {name!r}"
    rank = header.u32()
    if not 1 <= rank <= _MAX_RANK:
        raise header.error(f"must have 1 to {_MAX_RANK} axes, got {rank}")
    shape = tuple(header.u64() for _ in range(rank))[::-1]
    if 0 in shape:
        raise header.error(f"has an axis of length 0: shape {shape}")
    code = header.u32()
    if code not in GGML_TYPES:
        raise header.error(f"has the unknown type {code}; readable are {', '.join(READABLE)}")
    kind = GGML_TYPES[code]
    if shape[-1] % kind.block:
        raise header.error(f"rows of {kind.name} must be a multiple of {kind.block} long, got {shape[-1]}")
    offset = header.u64()
    if offset % alignment:
        raise header.error(f"the offset must be a multiple of the alignment {alignment}, got {offset}")
    return GgufTensor(name, shape, kind, offset)


def _check_extents(header: _Header, tensors: Sequence[GgufTensor]) -> None:
    previous = None
    for tensor in sorted(tensors, key=lambda tensor: tensor.start):
        header.place = f"tensor {tensor.name!r}"
        if tensor.end > header.size:
            raise header.error(
                f"shape {tensor.shape} of {tensor.type.name} ends at byte {tensor.end}, but the file at "
                f"{header.size}; it is truncated or damaged"
            )
        if previous is not None and tensor.start < previous.end:
            raise header.error(f"overlaps tensor {previous.name!r}")
        previous = tensor


def _decode_q4_0(raw: np.ndarray) -> np.ndarray:
    """code · scale: 4 significant bits times 11, exact in float32."""
    codes, scales = unpack_q4_0(raw)
    groups = codes.reshape(*scales.shape, GROUP) * scales.astype(np.float32)[..., None]
    return groups.reshape(codes.shape)


_Q8_0 = np.dtype([("d", "<f2"), ("q", "i1", 32)])


def _decode_q8_0(raw: np.ndarray) -> np.ndarray:
    """d · q: 11 significant bits times 8, exact in float32."""
    blocks = raw.view(_Q8_0)
    return (blocks["q"] * _finite(blocks["d"])[..., None]).reshape(len(raw), -1)


_Q6_K = np.dtype([("low", "u1", (2, 1, 64)), ("high", "u1", (2, 1, 32)), ("scale", "i1", 16), ("d", "<f2")])


def _decode_q6_k(raw: np.ndarray) -> np.ndarray:
    """(d · scale) · (q - 32), the first product exact: 16 groups of 16 six-bit codes share d, each has its own scale.

    Per half of 128 codes, 64 bytes hold the low four bits (first all low nibbles, then all high ones) and 32 bytes the
    high two (bit pairs from the lowest up).
    """
    blocks = raw.view(_Q6_K)
    low = blocks["low"] >> np.array([[0], [4]], np.uint8) & 0xF
    high = blocks["high"] >> np.array([[0], [2], [4], [6]], np.uint8) & 0x3
    groups = (*blocks.shape, 16, 16)
    codes = (low.reshape(groups) | high.reshape(groups) << 4).astype(np.float32) - 32
    scales = blocks["scale"] * _finite(blocks["d"])[..., None]
    return (codes * scales[..., None]).reshape(len(raw), -1)


def _finite(scales: np.ndarray) -> np.ndarray:
    """The float16 block scales as float32; anything but finite ones is damage."""
    if not np.isfinite(scales).all():
        raise CheckpointError(f"{np.count_nonzero(~np.isfinite(scales))} block scales are infinite or NaN")
    return scales.astype(np.float32)


PLAIN_DTYPES = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16)}

# Q6_K is here because the usual quantiser gives it to the output head of every Q4_0 file.
_DECODERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "Q4_0": _decode_q4_0,
    "Q8_0": _decode_q8_0,
    "Q6_K": _decode_q6_k,
}

READABLE = (*PLAIN_DTYPES, *_DECODERS)
