"""What host functions share: powers of two, whole arrays as operands, and the refusal of one that does not fit."""

import jax.numpy as jnp
from jax.experimental import pallas as pl

__all__ = ["ANYWHERE", "check_operand", "next_power_of_two"]

ANYWHERE = pl.BlockSpec(memory_space=pl.ANY)
"""An operand as it lies in memory, whole, to be indexed by the kernel."""


def next_power_of_two(n: int) -> int:
    """The least power of two that is at least n >= 1."""
    return 1 << (n - 1).bit_length()


def check_operand(name, array, shape, *dtypes):
    """Refuse an array of another shape, or of none of the dtypes (float32 if none is given).

    Raises:
        ValueError: its shape. NotImplementedError: its dtype.
    """
    if array.shape != shape:
        raise ValueError(f"{name} must have shape {list(shape)} to fit the other arguments, got {list(array.shape)}")
    dtypes = dtypes or (jnp.float32,)
    if array.dtype not in dtypes:
        names = " or ".join(jnp.dtype(dtype).name for dtype in dtypes)
        raise NotImplementedError(f"{name} must be {names}, got {array.dtype}; use the XLA implementation")
