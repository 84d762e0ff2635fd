"""How much of S one program takes, and with how many warps: measured where there is a row, else by rule."""

from pallas_kernels.delta_step import tuning as delta_step
from pallas_kernels.delta_step.tuning import Measured, Tiles, best_measured
from pallas_kernels.operands import next_power_of_two

__all__ = ["MEASURED", "choose_tiles"]

_RECORD = "experiments/results/delta_window-h200.jsonl:{}"

MEASURED: tuple[Measured, ...] = (
    Measured("delta_window_look", "NVIDIA H200", 128, 128, 48, Tiles(32, 4), _RECORD.format(9)),
    Measured("delta_window_look", "NVIDIA H200", 128, 128, 96, Tiles(32, 2), _RECORD.format(13)),
    Measured("delta_window_fold", "NVIDIA H200", 128, 128, 48, Tiles(32, 2), _RECORD.format(41)),
)
"""All for windows of 4 tokens: at 48 heads the best for 1, 2, 8 and 16 are these too, or within 0.5 µs of them."""

_FLOATS_PER_LANE = 64
"""S in the registers of one lane, at most: with twice as many, what is carried from token to token spills."""


def choose_tiles(kernel: str, device_kind: str, key_dim: int, value_dim: int, heads: int) -> Tiles:
    """The tiles of a look or a fold for `heads` = B · H heads: of the measured row with most up to that, or by rule.

    The rule: the tiles of `delta_layer_step`, but with more warps where registers need it.
    """
    if measured := best_measured(MEASURED, kernel, device_kind, key_dim, value_dim, heads):
        return measured.tiles
    block_v, warps = delta_step.choose_tiles("delta_layer_step", device_kind, key_dim, value_dim, heads)
    least = next_power_of_two(key_dim) * block_v // (32 * _FLOATS_PER_LANE)
    return Tiles(block_v, max(warps, least))
