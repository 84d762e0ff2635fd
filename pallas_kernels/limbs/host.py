"""The host function and the kernel body: an elementwise producer, and its result as signed bytes with group scales."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

__all__ = ["GROUP", "Split", "split_rows"]

GROUP = 32
"""Columns that share one scale."""

type Split = Callable[[jax.Array], tuple[list[jax.Array], jax.Array]]
"""Values float32 [groups, 32] -> limbs, each int8 [groups, 32], and scales float32 [groups]."""

_GROUPS = 8
"""Groups per program: 256 columns in one warp, eight to a lane; a row of 5120 columns then has 20 programs."""


def split_rows(
    inputs: tuple[jax.Array, ...],
    produce: Callable[..., jax.Array],
    split: Split,
    *,
    limbs: int,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """x = produce(*inputs), element by element, as limbs int8 [limbs, B, I] and scales float32 [B, I/32].

    Args:
        inputs: float32 [B, I] each, I a multiple of 32.
        produce: traced into the kernel, on blocks of the inputs.
        split: how x is written, traced into the kernel: float32 [groups, 32] -> limbs int8 and scales.
        limbs: how many `split` gives.
        interpret: run the same body as plain XLA on any device.

    Raises:
        NotImplementedError: I is not a multiple of 32.
    """
    batch, columns = inputs[0].shape
    if columns % GROUP:
        raise NotImplementedError(f"limbs need I to be a multiple of {GROUP}, got I = {columns}")
    groups = columns // GROUP
    # A power of two that divides the groups needs no masks.
    block = math.gcd(groups, _GROUPS)

    def body(*refs):
        *input_refs, digits_ref, scales_ref = refs
        digits, scales = split(produce(*(ref[...] for ref in input_refs)))
        for limb, part in enumerate(digits):
            digits_ref[limb] = part
        scales_ref[...] = scales

    digits, scales = pl.pallas_call(
        body,
        grid=(groups // block, batch),
        in_specs=[pl.BlockSpec((None, block, GROUP), lambda i, b: (b, i, 0))] * len(inputs),
        out_specs=(
            pl.BlockSpec((limbs, None, block, GROUP), lambda i, b: (0, b, i, 0)),
            pl.BlockSpec((None, block), lambda i, b: (b, i)),
        ),
        out_shape=(
            jax.ShapeDtypeStruct((limbs, batch, groups, GROUP), jnp.int8),
            jax.ShapeDtypeStruct((batch, groups), jnp.float32),
        ),
        compiler_params=plt.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="split_rows",
    )(*(x.reshape(batch, groups, GROUP) for x in inputs))
    return digits.reshape(limbs, batch, columns), scales
