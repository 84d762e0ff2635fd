"""How a prompt's product is cut into blocks: measured choices by device and shape, and the rule for everything else."""

from typing import Any, NamedTuple

from pallas_kernels.operands import next_power_of_two

__all__ = ["TABLE", "Tile", "TileChoice", "TileKey", "choose_tile"]

_FEW_ROWS = 8192
"""Rows of W up to which blocks of 128 of them are too few for a large card."""


class Tile(NamedTuple):
    """The work of one block."""

    rows: int
    """Rows of W, 64 to each compute warpgroup."""
    tokens: int
    """Rows of x."""
    warpgroups: int
    """Compute warpgroups."""
    stages: int
    """Steps that are in shared memory or on their way there."""
    in_flight: int
    """Sums per warpgroup that the matrix units may be busy with: 1 or 2."""
    cluster: int = 1
    """Blocks with the same rows of x, of which each fetches its share for all: 1, 2 or 4."""


class TileChoice(NamedTuple):
    """A tile, and the measurement or the rule that it comes from."""

    tile: Any
    source: str


class TileKey(NamedTuple):
    """What a measurement holds for: rows of W and of x up to a power of two."""

    device_kind: str
    rows: int
    tokens: int
    pieces: int


_H200 = "NVIDIA H200"
_RECORD = "experiments/results/q4_gemm-h200.jsonl:{}"
_ONE_PIECE = Tile(rows=128, tokens=128, warpgroups=2, stages=4, in_flight=1, cluster=2)
_THREE_PIECES = Tile(rows=128, tokens=128, warpgroups=2, stages=2, in_flight=1, cluster=2)

TABLE: dict[TileKey, TileChoice] = {
    TileKey(_H200, 65536, 512, 1): TileChoice(_ONE_PIECE, _RECORD.format(101)),
    TileKey(_H200, 65536, 2048, 1): TileChoice(_ONE_PIECE, _RECORD.format(105)),
    TileKey(_H200, 65536, 512, 3): TileChoice(_THREE_PIECES, _RECORD.format(102)),
    TileKey(_H200, 65536, 2048, 3): TileChoice(_THREE_PIECES, _RECORD.format(106)),
}
"""Measured choices; `source` of each names the record, file and line, that holds the measurement."""


def choose_tile(device_kind: str, rows: int, tokens: int, pieces: int) -> TileChoice:
    """The cut for a matrix of so many rows and so many rows of x: the measured one, or the default."""
    key = TileKey(device_kind, next_power_of_two(rows), next_power_of_two(tokens), pieces)
    return TABLE.get(key) or TileChoice(_default_tile(rows, tokens, pieces), "default rule, not measured")


def _default_tile(rows: int, tokens: int, pieces: int) -> Tile:
    """Many rows of x to a block, for which W is read again by every block of them, where there are many.

    Their sums then leave no registers for a second set in flight. With three pieces, of which one multiplication takes
    three times as long, smaller blocks do as well until there are enough to fill the card.
    """
    if rows >= 256 and tokens > (64 if pieces == 1 else 256):
        return _ONE_PIECE if pieces == 1 else _THREE_PIECES
    warpgroups = 1 if rows < 128 or (rows <= _FEW_ROWS and tokens <= 64) else 2
    width = max(16, min(64, next_power_of_two(tokens)))
    return Tile(64 * warpgroups, width, warpgroups, stages=4 if pieces == 1 else 3, in_flight=2)
