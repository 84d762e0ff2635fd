"""How much of S one program takes, and with how many warps."""

from pallas_kernels.delta_step import tuning as delta_step
from pallas_kernels.delta_step.tuning import Tiles
from pallas_kernels.operands import next_power_of_two

__all__ = ["choose_tiles"]

_FLOATS_PER_LANE = 64
"""S in the registers of one lane, at most: with twice as many, what is carried from token to token spills."""


def choose_tiles(device_kind: str, key_dim: int, value_dim: int, heads: int) -> Tiles:
    """The tiles for `heads` = B · H heads, of a look and of the fold that follows it.

    They are those of `delta_layer_step`, whose sums then have the same order and so the same bits; but with more warps
    where registers need it.
    """
    block_v, warps = delta_step.choose_tiles("delta_layer_step", device_kind, key_dim, value_dim, heads)
    least = next_power_of_two(key_dim) * block_v // (32 * _FLOATS_PER_LANE)
    return Tiles(block_v, max(warps, least))
