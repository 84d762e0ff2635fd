"""How much of S one program takes on its way through the chunks."""

from typing import NamedTuple

__all__ = ["TritonTile"]


class TritonTile(NamedTuple):
    """How the Triton form's `scan` runs. Unless given: two programs on a multiprocessor, on cards of any generation."""

    block_v: int = 32
    """Columns of S per program, a power of two of at least 16."""
    warps: int = 4
    """Warps per program, a power of two."""
    stages: int = 1
    """1: matrices are read when they are needed; 2 or more: so many are in shared memory or on their way there."""
