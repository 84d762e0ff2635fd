"""y = W x for 4-bit weights and activations in signed bytes, batch 1 to 8: see README.md beside this file."""

from pallas_kernels.q4_gemv.host import MAX_BATCH, MAX_MATRICES, q4_gemv, supported
from pallas_kernels.q4_gemv.tuning import Tile, TileChoice, choose_tile

__all__ = ["MAX_BATCH", "MAX_MATRICES", "Tile", "TileChoice", "choose_tile", "q4_gemv", "supported"]
