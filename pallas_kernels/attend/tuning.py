"""How the slots of a row are divided among programs: measured where there is a row, else by rule."""

from typing import NamedTuple

from pallas_kernels.operands import next_power_of_two

__all__ = ["MEASURED", "MOST_SPLITS", "Cut", "Measured", "choose_cut"]


class Cut(NamedTuple):
    """How the slots of a row are divided among programs."""

    slots: int
    """Slots in a tile, which a program holds at a time; a power of two."""
    splits: int
    """Programs per key-value head and row, at most; tile t goes to number t mod `splits`."""
    warps: int
    """Warps of a program; a power of two."""


class Measured(NamedTuple):
    """The best cut found for a head size on a device, for caches of up to so many slots."""

    device_kind: str
    head_dim: int
    capacity: int
    cut: Cut
    measurement: str
    """Where the figures lie, relative to the repository."""


MEASURED: tuple[Measured, ...] = (
    Measured("NVIDIA H200", 256, 1024, Cut(4, 128, 1), "experiments/results/attend-h200.jsonl:3"),
)
MOST_SPLITS = 128
"""Of any cut that is chosen."""
_SPLITS = 64
"""With four key-value heads two programs for each multiprocessor of a large card, once there are 2048 slots to see."""


def choose_cut(device_kind: str, head_dim: int, capacity: int) -> Cut:
    """The cut for a cache of so many slots: of the measured row for the fewest that has room for them, or by rule.

    The rule: tiles of 32 slots, of which a lane holds 32 floats of keys and as many of values.
    """
    rows = [row for row in MEASURED if row[:2] == (device_kind, head_dim) and row.capacity >= capacity]
    if rows:
        return min(rows, key=lambda row: row.capacity).cut
    return Cut(slots=32, splits=_SPLITS, warps=max(1, next_power_of_two(head_dim) // 32))
