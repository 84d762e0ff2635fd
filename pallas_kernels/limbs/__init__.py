"""Activations written as limbs by their producer, in one launch."""

from pallas_kernels.limbs.host import MAX_NORM_COLUMNS, Normed, norm_rows, split_rows

__all__ = ["MAX_NORM_COLUMNS", "Normed", "norm_rows", "split_rows"]
