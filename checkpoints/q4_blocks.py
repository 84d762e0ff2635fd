"""4-bit weights as other programs store them, and their bit-exact conversion to and from one logical form.

Logical form: `codes` int8 [..., N, I] in -8 … 7 and `scales` float16 [..., N, I/32]; 32 consecutive columns form a
group, and weight[n, 32g + j] = codes[n, 32g + j] · scales[n, g].

Every format keeps the codes of one group in 16 bytes, in the same nibble order: byte j holds column j in its low nibble
and column 16 + j in its high nibble. What differs is how a nibble spells a code, and what lies around the 16 bytes:

| format | nibble | layout |
|---|---|---|
| device words | two's complement | uint32 [..., N, I/8], 4 words a group, byte 0 in the lowest bits; scales apart |
| GGUF Q4_0 | offset binary, code + 8 | per row and group 18 bytes: float16 scale, then the 16 bytes |
| raw-q4 tiles | two's complement | per 4 rows and a group 72 bytes: 4 float16 scales, row m's 16 bytes at 8 + 16m |

A worked byte: column 3 holds -2 and column 19 holds 5. In two's complement the nibbles are 0xE and 0x5, so byte 3 is
0x5E; in offset binary they are 6 and 0xD, so byte 3 is 0xD6. The two spellings differ in the top bit of each nibble:
0x5E ^ 0x88 = 0xD6.

All numbers are little endian. A scale may be negative (GGUF writes such), zero of either sign or subnormal, and keeps
its bits; an infinite or NaN scale is refused.
"""

from typing import NamedTuple

import numpy as np

from checkpoints.errors import CheckpointError

__all__ = [
    "CODES_PER_WORD",
    "GROUP",
    "TILE_ROWS",
    "Q4Codes",
    "Q4Words",
    "check_codes",
    "pack_q4_0",
    "pack_tiles",
    "pack_words",
    "q4_0_of_words",
    "unpack_q4_0",
    "unpack_tiles",
    "unpack_words",
    "words_of_q4_0",
]

GROUP = 32
"""Columns that share one scale."""

CODES_PER_WORD = 8
"""Columns in one device word."""

TILE_ROWS = 4
"""Rows that share one raw-q4 tile."""

_Q4_0 = np.dtype([("scale", "<f2"), ("nibbles", "u1", GROUP // 2)])
_TILE = np.dtype([("scales", "<f2", TILE_ROWS), ("nibbles", "u1", (TILE_ROWS, GROUP // 2))])

# Eight codes are moved per 64-bit operation; none of these operations carries a bit from one byte into the next.
_LOW_NIBBLES = np.uint64(0x0F0F0F0F0F0F0F0F)
_SIGN_BITS = np.uint64(0x0808080808080808)
_SIGN_FILL = np.uint64(0xF0 // 0x08)
_NIBBLE = np.uint64(4)
_OFFSET_BINARY = np.uint8(0x88)

_CHUNK = 1 << 14
"""Groups unpacked at a time, so that the intermediate words stay in the cache."""


class Q4Codes(NamedTuple):
    """The logical form: weight[n, i] = codes[n, i] · scales[n, i // 32]."""

    codes: np.ndarray
    """int8 [..., N, I], each in -8 … 7."""
    scales: np.ndarray
    """float16 [..., N, I/32], finite."""


class Q4Words(NamedTuple):
    """The same matrix with two codes to a byte, as a device holds it: half the memory."""

    words: np.ndarray
    """uint32 [..., N, I/8]; see `pack_words`."""
    scales: np.ndarray
    """float16 [..., N, I/32], finite."""

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., N, I], the shape of the matrix."""
        return (*self.words.shape[:-1], self.words.shape[-1] * CODES_PER_WORD)


def check_codes(codes: np.ndarray, scales: np.ndarray) -> None:
    """Refuse what is not the logical form: codes int8 [..., I] in -8 … 7, scales float16 [..., I/32], all finite.

    Raises:
        TypeError: another dtype. ValueError: I is not a multiple of 32, the shapes disagree, a code is out of range, or
            a scale is infinite or NaN; the message gives the position.
    """
    _check_dtype("codes", codes, np.int8)
    _check_dtype("scales", scales, np.float16)
    if codes.ndim == 0:
        raise ValueError("codes must be [..., I], got a scalar")
    expected = (*codes.shape[:-1], _groups(codes.shape[-1]))
    if scales.shape != expected:
        raise ValueError(
            f"scales must be {expected} for codes {codes.shape} (one per {GROUP} columns), got {scales.shape}"
        )
    if codes.size and (codes.min() < -8 or codes.max() > 7):
        position = _first((codes < -8) | (codes > 7))
        raise ValueError(f"codes must lie in -8 … 7, got {codes[position]} at {_name(position)}")
    _check_finite(scales, ValueError)


def pack_q4_0(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Logical form [..., I] -> GGUF Q4_0 blocks, uint8 [..., I/32 · 18].

    Raises:
        TypeError, ValueError: the input is not the logical form, see `check_codes`.
    """
    check_codes(codes, scales)
    return q4_0_of_words(Q4Words(pack_words(codes), scales))


def q4_0_of_words(q4: Q4Words) -> np.ndarray:
    """Device words [..., I/8] and scales [..., I/32] -> GGUF Q4_0 blocks, uint8 [..., I/32 · 18]."""
    blocks = np.empty(q4.scales.shape, _Q4_0)
    blocks["scale"] = q4.scales
    words = np.ascontiguousarray(q4.words, "<u4")
    blocks["nibbles"] = words.view(np.uint8).reshape(*q4.scales.shape, GROUP // 2)
    blocks["nibbles"] ^= _OFFSET_BINARY
    return blocks.view(np.uint8)


def unpack_q4_0(blocks: np.ndarray) -> Q4Codes:
    """GGUF Q4_0 blocks, uint8 [..., I/32 · 18] -> logical form [..., I].

    Raises:
        As `words_of_q4_0`.
    """
    words, scales = words_of_q4_0(blocks)
    return Q4Codes(unpack_words(words), scales)


def words_of_q4_0(blocks: np.ndarray) -> Q4Words:
    """GGUF Q4_0 blocks, uint8 [..., I/32 · 18] -> device words [..., I/8] and scales [..., I/32].

    Raises:
        TypeError: not uint8. CheckpointError: the last axis does not hold whole blocks, or a scale is infinite or NaN.
    """
    _check_dtype("Q4_0 blocks", blocks, np.uint8)
    if blocks.ndim == 0 or blocks.shape[-1] % _Q4_0.itemsize or not blocks.shape[-1]:
        raise CheckpointError(
            f"Q4_0 blocks must be [..., I/{GROUP} · {_Q4_0.itemsize}] bytes, got shape {blocks.shape}; "
            "the row is cut off or of another type"
        )
    groups = np.ascontiguousarray(blocks).view(_Q4_0)
    scales = groups["scale"].astype(np.float16)
    _check_finite(scales, CheckpointError)
    words = (groups["nibbles"] ^ _OFFSET_BINARY).view("<u4").reshape(*scales.shape[:-1], -1)
    return Q4Words(words.astype(np.uint32, copy=False), scales)


def pack_tiles(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Logical form [N, I] -> raw-q4 tiles, uint8 [ceil(N/4), I/32, 72], rows of tiles outermost.

    Where N is not a multiple of 4 the last row of tiles is completed with rows of code 0 and scale 0: all bytes zero.

    Raises:
        TypeError, ValueError: the input is not the logical form of a matrix, see `check_codes`.
    """
    check_codes(codes, scales)
    if codes.ndim != 2:
        raise ValueError(f"codes must be [N, I], got shape {codes.shape}; pack one matrix at a time")
    rows = len(codes)
    padding = ((0, -rows % TILE_ROWS), (0, 0))
    nibbles = np.pad(_pack_nibbles(codes), (*padding, (0, 0)))
    tiles = np.empty((len(nibbles) // TILE_ROWS, scales.shape[1]), _TILE)
    tiles["scales"] = _tile_rows(np.pad(scales, padding))
    tiles["nibbles"] = _tile_rows(nibbles)
    return tiles.view(np.uint8).reshape(*tiles.shape, _TILE.itemsize)


def unpack_tiles(tiles: np.ndarray, shape: tuple[int, int]) -> Q4Codes:
    """Raw-q4 tiles, uint8 of any shape, rows of tiles outermost -> logical form of `shape` = (N, I).

    The padding rows that complete the last row of tiles must be zero: anything else means that N is wrong, and would be
    lost.

    Raises:
        TypeError: not uint8. ValueError: I is not a multiple of 32, or N < 1.
        CheckpointError: the number of bytes is not ceil(N/4) · I/32 · 72, a scale is infinite or NaN, or a padding row
            is not zero.
    """
    _check_dtype("raw-q4 tiles", tiles, np.uint8)
    rows, columns = shape
    if rows < 1:
        raise ValueError(f"N must be at least 1, got {rows}")
    grid = (-(-rows // TILE_ROWS), _groups(columns))
    expected = grid[0] * grid[1] * _TILE.itemsize
    if tiles.size != expected:
        raise CheckpointError(
            f"raw-q4 tiles of [{rows}, {columns}] take {expected} bytes "
            f"({grid[0]} by {grid[1]} tiles of {_TILE.itemsize}), got {tiles.size}; cut off, or N or I is wrong"
        )
    grouped = np.ascontiguousarray(tiles).reshape(-1).view(_TILE).reshape(grid)
    scales, nibbles = _untile_rows(grouped["scales"]), _untile_rows(grouped["nibbles"])
    if scales[rows:].view(np.uint16).any() or nibbles[rows:].any():
        raise CheckpointError(
            f"the {len(scales) - rows} padding rows after row {rows - 1} must be zero but hold data: N is larger"
        )
    scales = np.ascontiguousarray(scales[:rows])
    _check_finite(scales, CheckpointError)
    return Q4Codes(_unpack_nibbles(nibbles[:rows]), scales)


def pack_words(codes: np.ndarray) -> np.ndarray:
    """Codes int8 [..., I] in -8 … 7 -> device words, uint32 [..., I/8]; word 4g + b holds bytes 4b … 4b + 3 of group g.

    Raises:
        ValueError: I is not a multiple of 32.
    """
    return _pack_nibbles(codes).view("<u4").reshape(*codes.shape[:-1], -1).astype(np.uint32, copy=False)


def unpack_words(words: np.ndarray) -> np.ndarray:
    """Device words, uint32 [..., I/8] -> codes int8 [..., I]: the inverse of `pack_words`.

    Raises:
        ValueError: I is not a multiple of 32.
    """
    groups = _groups(words.shape[-1] * CODES_PER_WORD)
    nibbles = np.ascontiguousarray(words, "<u4").view(np.uint8).reshape(*words.shape[:-1], groups, GROUP // 2)
    return _unpack_nibbles(nibbles)


def _pack_nibbles(codes: np.ndarray) -> np.ndarray:
    """Codes int8 [..., I] -> two's complement nibbles, uint8 [..., I/32, 16]."""
    groups = _groups(codes.shape[-1])
    halves = np.ascontiguousarray(codes).view(np.uint64).reshape(-1, 2, 2)
    # One column of words at a time: numpy's inner loop then runs over all groups instead of over two words.
    packed = np.empty((len(halves), 2), np.uint64)
    for word in range(2):
        high = (halves[:, 1, word] & _LOW_NIBBLES) << _NIBBLE
        np.bitwise_or(halves[:, 0, word] & _LOW_NIBBLES, high, out=packed[:, word])
    return packed.view(np.uint8).reshape(*codes.shape[:-1], groups, GROUP // 2)


def _unpack_nibbles(nibbles: np.ndarray) -> np.ndarray:
    """Two's complement nibbles, uint8 [..., I/32, 16] -> codes int8 [..., I]."""
    packed = np.ascontiguousarray(nibbles).view(np.uint64).reshape(-1, 2)
    halves = np.empty((len(packed), 2, 2), np.uint64)
    for start in range(0, len(packed), _CHUNK):
        part, unpacked = packed[start : start + _CHUNK], halves[start : start + _CHUNK]
        for word in range(2):
            unpacked[:, 0, word] = _sign_extend(part[:, word] & _LOW_NIBBLES)
            unpacked[:, 1, word] = _sign_extend((part[:, word] >> _NIBBLE) & _LOW_NIBBLES)
    return halves.view(np.int8).reshape(*nibbles.shape[:-2], nibbles.shape[-2] * GROUP)


def _sign_extend(nibbles: np.ndarray) -> np.ndarray:
    """Eight nibbles 0 … 15, one a byte -> the same in two's complement bytes: the sign bit 0x08 also fills 0xF0."""
    return nibbles | (nibbles & _SIGN_BITS) * _SIGN_FILL


def _tile_rows(rows: np.ndarray) -> np.ndarray:
    """[N, I/32, ...] -> [N/4, I/32, 4, ...]."""
    return rows.reshape(-1, TILE_ROWS, *rows.shape[1:]).swapaxes(1, 2)


def _untile_rows(tiles: np.ndarray) -> np.ndarray:
    """[N/4, I/32, 4, ...] -> [N, I/32, ...]."""
    return tiles.swapaxes(1, 2).reshape(-1, tiles.shape[1], *tiles.shape[3:])


def _groups(columns: int) -> int:
    if columns < GROUP or columns % GROUP:
        raise ValueError(
            f"I (the number of columns) must be a multiple of {GROUP}, got {columns}; keep this matrix in float32"
        )
    return columns // GROUP


def _check_dtype(what: str, array: np.ndarray, dtype: type[np.generic]) -> None:
    if array.dtype != dtype:
        raise TypeError(f"{what} must be {np.dtype(dtype)}, got {array.dtype}")


def _check_finite(scales: np.ndarray, error: type[ValueError]) -> None:
    finite = np.isfinite(scales)
    if not finite.all():
        position = _first(~finite)
        raise error(
            f"scales must be finite, got {scales[position]} at {_name(position)} (row, group) "
            f"and {finite.size - np.count_nonzero(finite)} in all; the tensor is damaged"
        )


def _first(where: np.ndarray) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(int(where.argmax()), where.shape))


def _name(position: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, position))}]"
