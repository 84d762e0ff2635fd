"""How a product is cut into programs: measured choices by device and shape, and the rule for everything else."""

from typing import Any, NamedTuple

from pallas_kernels.operands import next_power_of_two

__all__ = ["MOSAIC_TABLE", "TABLE", "MosaicTile", "Tile", "TileChoice", "TileKey", "choose_mosaic_tile", "choose_tile"]

LANES = 32
"""Threads of a warp. A program is fastest with one group (16 bytes of codes, one scale) per lane and step."""

_PROGRAMS = 1024
"""Programs to aim for: eight warps on each multiprocessor of a large card, what it takes to keep its memory busy."""


class Tile(NamedTuple):
    """The work of one program: powers of two."""

    rows: int
    """Rows of W per program; the activations, once loaded, serve all of them."""
    groups: int
    """Groups of 32 columns per step; also the partial sums per output, so it decides the order of summation."""
    warps: int
    """Warps per program. They divide the groups of a step among themselves."""


class MosaicTile(NamedTuple):
    """The work of one block of 128 threads of the tensor core form."""

    rows: int
    """Rows of W per block, 16, 32 or 64: digits, once loaded, serve all of them. With 128, registers spill."""
    stages: int
    """Steps of 512 columns that are in shared memory or on their way there."""


class TileKey(NamedTuple):
    """What a measurement holds for: rows (of all matrices of a launch) and columns up to a power of two."""

    device_kind: str
    rows: int
    columns: int
    batch: int
    limbs: int


class TileChoice(NamedTuple):
    """A tile, and the measurement or the rule that it comes from."""

    tile: Any
    """A `Tile` or a `MosaicTile`."""
    source: str


_H200 = "NVIDIA H200"
_DOTS = "experiments/results/q4_gemv-h200.jsonl:{}"
_TENSOR_CORES = "experiments/results/q4_gemv_cuts-h200.jsonl:{}"
_TWO_ROWS = Tile(rows=2, groups=32, warps=1)
_LOW = MosaicTile(rows=16, stages=4)
_SHALLOW = MosaicTile(rows=32, stages=2)
_DEEP = MosaicTile(rows=32, stages=4)

TABLE: dict[TileKey, TileChoice] = {
    TileKey(_H200, 8192, 8192, 1, 3): TileChoice(_TWO_ROWS, _DOTS.format(39)),
    TileKey(_H200, 16384, 8192, 1, 3): TileChoice(_TWO_ROWS, _DOTS.format(2)),
    TileKey(_H200, 32768, 8192, 1, 3): TileChoice(_TWO_ROWS, _DOTS.format(77)),
    TileKey(_H200, 65536, 8192, 1, 3): TileChoice(_TWO_ROWS, _DOTS.format(95)),
    TileKey(_H200, 262144, 8192, 1, 3): TileChoice(_TWO_ROWS, _DOTS.format(132)),
    TileKey(_H200, 8192, 32768, 1, 3): TileChoice(_TWO_ROWS, _DOTS.format(113)),
    TileKey(_H200, 8192, 8192, 1, 1): TileChoice(_TWO_ROWS, _DOTS.format(54)),
    TileKey(_H200, 16384, 8192, 1, 1): TileChoice(_TWO_ROWS, _DOTS.format(17)),
    TileKey(_H200, 32768, 8192, 1, 1): TileChoice(_TWO_ROWS, _DOTS.format(92)),
    TileKey(_H200, 65536, 8192, 1, 1): TileChoice(_TWO_ROWS, _DOTS.format(110)),
    TileKey(_H200, 262144, 8192, 1, 1): TileChoice(_TWO_ROWS, _DOTS.format(147)),
    TileKey(_H200, 8192, 32768, 1, 1): TileChoice(_TWO_ROWS, _DOTS.format(128)),
}
"""Measured choices; `source` of each names the record, file and line, that holds the measurement."""

MOSAIC_TABLE: dict[TileKey, TileChoice] = {
    TileKey(_H200, 8192, 8192, 2, 3): TileChoice(_LOW, _TENSOR_CORES.format(46)),
    TileKey(_H200, 16384, 8192, 2, 3): TileChoice(_SHALLOW, _TENSOR_CORES.format(42)),
    TileKey(_H200, 65536, 8192, 2, 3): TileChoice(_DEEP, _TENSOR_CORES.format(54)),
    TileKey(_H200, 262144, 8192, 2, 3): TileChoice(_SHALLOW, _TENSOR_CORES.format(62)),
    TileKey(_H200, 8192, 32768, 2, 3): TileChoice(_LOW, _TENSOR_CORES.format(56)),
    TileKey(_H200, 8192, 8192, 4, 3): TileChoice(_LOW, _TENSOR_CORES.format(6)),
    TileKey(_H200, 16384, 8192, 4, 3): TileChoice(_SHALLOW, _TENSOR_CORES.format(3)),
    TileKey(_H200, 65536, 8192, 4, 3): TileChoice(_SHALLOW, _TENSOR_CORES.format(11)),
    TileKey(_H200, 262144, 8192, 4, 3): TileChoice(_SHALLOW, _TENSOR_CORES.format(19)),
    TileKey(_H200, 8192, 32768, 4, 3): TileChoice(_LOW, _TENSOR_CORES.format(14)),
    TileKey(_H200, 8192, 8192, 8, 3): TileChoice(_LOW, _TENSOR_CORES.format(26)),
    TileKey(_H200, 16384, 8192, 8, 3): TileChoice(_SHALLOW, _TENSOR_CORES.format(23)),
    TileKey(_H200, 65536, 8192, 8, 3): TileChoice(_SHALLOW, _TENSOR_CORES.format(31)),
    TileKey(_H200, 262144, 8192, 8, 3): TileChoice(_SHALLOW, _TENSOR_CORES.format(39)),
    TileKey(_H200, 8192, 32768, 8, 3): TileChoice(_LOW, _TENSOR_CORES.format(34)),
}
"""The same for the tensor core form."""
_FEW_ROWS = 8192
"""Up to so many rows of a launch, blocks of 16 keep more multiprocessors busy than blocks of 32."""


def choose_tile(device_kind: str, rows: int, columns: int, batch: int, limbs: int) -> TileChoice:
    """The tile for [rows, columns] matrices: the measured one of the same device and buckets, or the default."""
    key = TileKey(device_kind, next_power_of_two(rows), next_power_of_two(columns), batch, limbs)
    return TABLE.get(key) or TileChoice(_default_tile(rows, columns, batch), "default rule, not measured")


def choose_mosaic_tile(device_kind: str, rows: int, columns: int, batch: int, limbs: int) -> TileChoice:
    """As `choose_tile`, for the tensor core form."""
    key = TileKey(device_kind, next_power_of_two(rows), next_power_of_two(columns), batch, limbs)
    return MOSAIC_TABLE.get(key) or TileChoice(_LOW if rows <= _FEW_ROWS else _SHALLOW, "default rule, not measured")


def _default_tile(rows: int, columns: int, batch: int) -> Tile:
    """Few rows per program where the sums of the batch fill the registers or programs are scarce.

    With too few rows for one warp each, the warps of a program share the columns.
    """
    tile_rows = 8 if batch <= 2 else 4
    while tile_rows > 1 and rows < tile_rows * _PROGRAMS:
        tile_rows //= 2
    warps = 1
    while warps < 4 and rows * warps < _PROGRAMS and LANES * warps * 32 < columns:
        warps *= 2
    return Tile(rows=tile_rows, groups=LANES * warps, warps=warps)
