"""What kernels of the delta rule share inside a program: arithmetic in its order, masks, how outputs are written.

Every array has the next power of two of its true length; the masks that cut it off are None where there is nothing to
cut.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.limbs.host import GROUP, Split

__all__ = ["advance", "l2_normalise", "load", "mask_of", "rms_scale", "store_output", "tile_mask", "update"]


def advance(s, q, k, v, beta, decay):
    """S [K, Vb] -> o [Vb] and the next S: decay, correct, write, read, in the order of the definition."""
    s = update(s, k, v, beta, decay)
    return jnp.sum(s * q[:, None], axis=0), s


def update(s, k, v, beta, decay):
    """S [K, Vb] -> the next S: decay, correct, write."""
    s = s * decay
    u = beta * (v - jnp.sum(s * k[:, None], axis=0))
    return s + k[:, None] * u[None, :]


def l2_normalise(x, eps):
    """x · rsqrt(sum(x²) + eps)."""
    return x * jax.lax.rsqrt(jnp.sum(x * x) + jnp.float32(eps))


def rms_scale(blocks, value_dim, eps):
    """rsqrt(mean(o²) + eps) of a head's outputs in blocks of columns, of which those past the end hold 0."""
    return jax.lax.rsqrt(sum(jnp.sum(o * o) for o in blocks) / value_dim + jnp.float32(eps))


def store_output(out: Any, block, mask, values, value_dim: int, split: Split | None, at: tuple = ()):
    """The normalised and gated values of some columns, as float32, as limbs, or both: at `at` of out's refs."""
    if out.onn is not None:
        plt.store(out.onn.at[(*at, block)], values, mask=mask)
    if split is None:
        return
    count = values.shape[0] // GROUP
    digits, scales = split(values.reshape(count, GROUP))
    for limb, part in enumerate(digits):
        plt.store(out.digits.at[(jnp.int32(limb), *at, block)], part.reshape(values.shape), mask=mask)
    first = block.start // GROUP
    groups_mask = mask_of(first, count, value_dim // GROUP)
    plt.store(out.x_scales.at[(*at, pl.ds(first, count))], scales, mask=groups_mask)


def mask_of(start, length, size):
    """Which of `length` positions from `start` (a multiple of it) lie within `size`: None if all do, wherever it is."""
    return None if size % length == 0 else start + jnp.arange(length, dtype=jnp.int32) < size


def tile_mask(key_mask, column_mask):
    """The mask of a tile [K, Vb] from those of its axes."""
    masks = [] if key_mask is None else [key_mask[:, None]]
    masks += [] if column_mask is None else [column_mask[None, :]]
    return functools.reduce(jnp.logical_and, masks) if masks else None


def load(ref, mask):
    """The referred values, 0 where masked."""
    return plt.load(ref, mask=mask, other=None if mask is None else 0.0)
