"""The gated delta rule over whole sequences, a chunk of tokens at a time: see README.md beside this file."""

from pallas_kernels.delta_chunk.host import PRECISIONS, choose_backend, delta_chunk, supported
from pallas_kernels.delta_chunk.mosaic import MosaicTile
from pallas_kernels.delta_chunk.tuning import TritonTile

__all__ = ["PRECISIONS", "MosaicTile", "TritonTile", "choose_backend", "delta_chunk", "supported"]
