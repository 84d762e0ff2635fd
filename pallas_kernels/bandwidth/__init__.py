"""How fast the memory can be read, and read and written: the ceilings that other kernels are measured against."""

from pallas_kernels.bandwidth.host import copy, read

__all__ = ["copy", "read"]
