"""y = W x for 4-bit weights and many rows of x, on the matrix units of sm_90: see README.md beside this file."""

from pallas_kernels.q4_gemm.host import MAX_PIECES, q4_gemm, split_pieces, supported
from pallas_kernels.q4_gemm.tuning import Tile, TileChoice, choose_tile

__all__ = ["MAX_PIECES", "Tile", "TileChoice", "choose_tile", "q4_gemm", "split_pieces", "supported"]
