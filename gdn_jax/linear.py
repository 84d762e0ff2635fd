"""Projections y = W x in float32, summed on two levels; and of many rows, of which one form rounds to bfloat16."""

import functools
import operator

import jax.numpy as jnp

from gdn_jax.axes import Array, BFloat16, Float32
from gdn_jax.fence import fence
from gdn_jax.products import einsum

__all__ = ["BLOCK", "GROUP", "project", "project_rounded", "project_rows"]

GROUP = 32
"""Columns per partial sum; also the columns that share one scale in 4-bit weights."""


BLOCK = 64
"""Columns per matrix product of many rows. With 256 the CPU's error is a third larger, with 32 a tenth smaller."""


def project(w: Float32[Array, "O I"] | BFloat16[Array, "O I"], x: Float32[Array, "B I"]) -> Float32[Array, "B O"]:
    """y[b, o] = sum_g (sum_{j < 32} W[o, 32g + j] · x[b, 32g + j]): two levels of sums, both in float32.

    Two levels keep the rounding error near that of pairwise summation whatever order the backend gives each of them: at
    I = 5120, 1e-7 relative to the largest output, where a dot of the CPU backend reaches 6e-7. Multiply-and-add, with
    no dot, is true float32 on every backend: no TF32, and no library whose order depends on the batch. Columns beyond
    the last whole group of 32 form a shorter group of their own. W may be bfloat16: its values are float32 values.
    """
    w = w.astype(jnp.float32)  # from bfloat16 on the fly: fused with what follows
    columns = x.shape[-1]
    whole = columns - columns % GROUP
    parts = []
    if whole:
        groups = (whole // GROUP, GROUP)
        w_groups, x_groups = w[:, :whole].reshape(1, -1, *groups), x[:, :whole].reshape(-1, 1, *groups)
        # The fence keeps XLA from merging the two sums into one long one.
        partial = fence(jnp.sum(w_groups * x_groups, axis=-1))
        parts.append(jnp.sum(partial, axis=-1))
    if whole < columns:
        parts.append(jnp.sum(w[None, :, whole:] * x[:, None, whole:], axis=-1))
    return functools.reduce(operator.add, parts)


def project_rows(w: Float32[Array, "O I"] | BFloat16[Array, "O I"], x: Float32[Array, "M I"]) -> Float32[Array, "M O"]:
    """`project` for many rows: matrix products over 64 columns each, whose results are added up.

    Multiply-and-add would read all of W for every row. The products are float32 on every device, and two levels of sums
    keep the error near that of `project`. Holds M · O · I / 64 partial sums.
    """
    w = w.astype(jnp.float32)
    columns = x.shape[-1]
    whole = columns - columns % BLOCK
    parts = []
    if whole:
        w_blocks, x_blocks = (array[:, :whole].reshape(-1, whole // BLOCK, BLOCK) for array in (w, x))
        parts.append(jnp.sum(fence(einsum("mgi,ogi->gmo", x_blocks, w_blocks)), axis=0))
    if whole < columns:
        parts.append(einsum("mi,oi->mo", x[:, whole:], w[:, whole:]))
    return functools.reduce(operator.add, parts)


def project_rounded(
    w: Float32[Array, "O I"] | BFloat16[Array, "O I"], x: Float32[Array, "M I"]
) -> Float32[Array, "M O"]:
    """y = W x of operands rounded to bfloat16, summed in float32: one matrix product for all rows."""
    return einsum("mi,oi->mo", x, w, precision="bf16")
