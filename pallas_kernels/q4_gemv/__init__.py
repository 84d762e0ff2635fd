"""y = W x for 4-bit weights and activations in signed bytes, batch 1 to 8: see README.md beside this file."""

from pallas_kernels.q4_gemv.host import GROUP, MAX_BATCH, MAX_MATRICES, choose_backend, q4_gemv, supported
from pallas_kernels.q4_gemv.tuning import MosaicTile, Tile, TileChoice, choose_mosaic_tile, choose_tile

__all__ = [
    "GROUP",
    "MAX_BATCH",
    "MAX_MATRICES",
    "MosaicTile",
    "Tile",
    "TileChoice",
    "choose_backend",
    "choose_mosaic_tile",
    "choose_tile",
    "q4_gemv",
    "supported",
]
