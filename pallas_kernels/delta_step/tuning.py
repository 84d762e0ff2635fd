"""How much of S one program takes, and with how many warps: measured where there is a row, else by rule."""

from typing import NamedTuple

from pallas_kernels.operands import next_power_of_two

__all__ = ["MEASURED", "Measured", "Tiles", "best_measured", "choose_tiles"]


class Tiles(NamedTuple):
    """Columns of S that a program holds at a time, and its warps; both powers of two."""

    block_v: int
    warps: int


class Measured(NamedTuple):
    """The best tiles found for a kernel and head size on a device, from `heads` = B · H programs' worth of work on."""

    kernel: str
    device_kind: str
    key_dim: int
    value_dim: int
    heads: int
    tiles: Tiles
    measurement: str
    """Where the figures lie, relative to the repository."""


_RECORD = "experiments/results/delta_step-h200.jsonl:{}"

MEASURED: tuple[Measured, ...] = (
    Measured("delta_step", "NVIDIA H200", 128, 128, 48, Tiles(16, 4), _RECORD.format(3)),
    Measured("delta_step", "NVIDIA H200", 128, 128, 384, Tiles(64, 4), _RECORD.format(49)),
    Measured("delta_layer_step", "NVIDIA H200", 128, 128, 48, Tiles(128, 8), _RECORD.format(19)),
    Measured("delta_layer_step", "NVIDIA H200", 128, 128, 384, Tiles(64, 2), _RECORD.format(55)),
)

_FLOATS_PER_LANE = 64
"""S in the registers of one lane, a quarter of what it has.

Compiled for sm_90 with K = V = 128 the kernels then need 135 to 170 of 255 registers, nothing spills, and a
multiprocessor has 64 KB (`delta_layer_step`) to 112 KB (`delta_step`) in flight.
"""
_MAX_WARPS = 8
_COLUMNS = 32
"""Float32 columns in a memory line of 128 bytes."""


def best_measured(
    table: tuple[Measured, ...], kernel: str, device_kind: str, key_dim: int, value_dim: int, heads: int
) -> Measured | None:
    """The row for most heads, of those for no more than `heads`; None where there is none."""
    asked = (kernel, device_kind, key_dim, value_dim)
    rows = [row for row in table if row[:4] == asked and row.heads <= heads]
    return max(rows, key=lambda row: row.heads, default=None)


def choose_tiles(kernel: str, device_kind: str, key_dim: int, value_dim: int, heads: int) -> Tiles:
    """The tiles for `heads` = B · H heads: of the measured row with the most heads up to that, or by rule.

    The rule: a head's columns in lines of 128 bytes for `delta_step`, where more programs are better than larger ones;
    as many columns as fit for `delta_layer_step`, whose program waits for memory once per block of columns.
    """
    if measured := best_measured(MEASURED, kernel, device_kind, key_dim, value_dim, heads):
        return measured.tiles
    keys, columns = next_power_of_two(key_dim), next_power_of_two(value_dim)
    most = _COLUMNS if kernel == "delta_step" else _MAX_WARPS * 32 * _FLOATS_PER_LANE // keys
    block_v = min(columns, most)
    warps = keys * block_v // (32 * _FLOATS_PER_LANE)
    return Tiles(block_v, min(max(warps, 1), _MAX_WARPS))
