"""float32 values as sums of 16-bit pieces, whose products tensor cores make exactly."""

import jax.numpy as jnp
from jax import lax

__all__ = ["INVERSE_SCALE", "LEAST_LOG_DECAY", "LOG_DECAY_SCALE", "pieces", "scales"]

LEAST_LOG_DECAY = -256.0
"""exp of it is 0 in float32, as of all below; sums of it over a chunk stay finite."""
LOG_DECAY_SCALE = 2.0**7
"""Brings what is at most `LEAST_LOG_DECAY` in size well within the range of float16."""
INVERSE_SCALE = 2.0**4
"""The same for an inverse, whose entries are at most 1 where keys have length 1 and beta ≤ 1."""


def pieces(x, count, dtype):
    """x as a sum of so many arrays, each what those before have left, rounded."""
    found = []
    for _ in range(count):
        found.append(x.astype(dtype))
        x = x - found[-1].astype(x.dtype)
    return tuple(found)


def scales(largest):
    """A power of two that takes values of at most this size well within the range of float16, and its reciprocal.

    What is at least 2⁻¹⁴ of the largest keeps 11 bits per piece, and a sign; of what is smaller, no more is lost than
    2⁻³⁸ of the largest.
    """
    # By exponents, with their bias: the largest comes to lie between 2¹³ and 2¹⁴.
    exponent = jnp.maximum(lax.bitcast_convert_type(largest, jnp.int32) >> 23, 14)
    return tuple(lax.bitcast_convert_type(e << 23, jnp.float32) for e in (2 * 127 + 13 - exponent, exponent - 13))
