"""Activations written as limbs by their producer, in one launch."""

from pallas_kernels.limbs.host import split_rows

__all__ = ["split_rows"]
