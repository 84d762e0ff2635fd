"""Producers of activations, each with its kernel body: the result as signed bytes with group scales."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.operands import ANYWHERE, next_power_of_two

__all__ = ["GROUP", "Normed", "Split", "norm_rows", "split_rows"]

GROUP = 32
"""Columns that share one scale."""

type Split = Callable[[jax.Array], tuple[list[jax.Array], jax.Array]]
"""Values float32 [groups, 32] -> limbs, each int8 [groups, 32], and scales float32 [groups]."""

MAX_NORM_COLUMNS = 16384
"""64 floats of a row in each lane of eight warps."""

_GROUPS = 8
"""Groups per program: 256 columns in one warp, eight to a lane; a row of 5120 columns then has 20 programs."""
_NORM_GROUPS = 32
"""The same of the norm, where each program also reads the whole row: a row of 5120 columns then has five."""


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


class Normed(NamedTuple):
    """What `norm_rows` leaves."""

    total: jax.Array
    """x + y, float32 [B, D]."""
    h: jax.Array
    """Its norm, float32 [B, D] …"""
    digits: jax.Array
    """… as limbs, int8 [limbs, B, D] …"""
    x_scales: jax.Array
    """… and their scales, float32 [B, D/32]."""


def norm_rows(
    x: jax.Array,
    y: jax.Array,
    weight: jax.Array,
    weight_layer: jax.Array,
    split: Split,
    *,
    limbs: int,
    eps: float,
    interpret: bool = False,
) -> Normed:
    """total = x + y;  h = total · rsqrt(mean(total²) + eps) · (1 + weight[weight_layer]), also as limbs.

    Every program sums the squares of the whole row, for the mean, and makes some columns of the result.

    Args:
        x: float32 [B, D], D a multiple of 32.
        y: float32 [B, D].
        weight: float32 [Lw, D].
        weight_layer: int32 [1]; one below 0 or beyond Lw - 1 is taken as 0 or Lw - 1.
        split: how h is written, traced into the kernel: float32 [groups, 32] -> limbs int8 and scales.
        limbs: how many `split` gives.
        eps: added to the mean of squares.
        interpret: run the same body as plain XLA on any device.

    Raises:
        NotImplementedError: D is not a multiple of 32, or exceeds 16384, beyond which a row leaves its registers.
    """
    batch, columns = x.shape
    if columns % GROUP or columns > MAX_NORM_COLUMNS:
        raise NotImplementedError(
            f"the norm takes rows of a multiple of {GROUP} columns, at most {MAX_NORM_COLUMNS}, got D = {columns}"
        )
    groups = columns // GROUP
    padded = next_power_of_two(groups)
    block = math.gcd(groups, _NORM_GROUPS)

    def body(x_ref, y_ref, weight_ref, layer_ref, total_ref, h_ref, digits_ref, scales_ref):
        part, row = pl.program_id(0), pl.program_id(1)
        group = part * block + jnp.arange(block, dtype=jnp.int32)
        own = group[:, None] * GROUP + jnp.arange(GROUP, dtype=jnp.int32)[None]
        column = jnp.arange(padded * GROUP, dtype=jnp.int32)
        inside = column < columns
        layer = jnp.clip(layer_ref[0], 0, weight_ref.shape[0] - 1)
        # What is needed later is asked for before the wait for the sum.
        weight, own_x, own_y = weight_ref[layer, own], x_ref[row, own], y_ref[row, own]
        x, y = (plt.load(ref.at[row, column], mask=inside, other=0.0) for ref in (x_ref, y_ref))
        total = x + y
        scale = jax.lax.rsqrt(jnp.sum(total * total) / columns + jnp.float32(eps))
        own_total = own_x + own_y
        h = own_total * scale * (1 + weight)
        total_ref[row, own] = own_total
        h_ref[row, own] = h
        digits, scales = split(h)
        for limb, digit in enumerate(digits):
            digits_ref[jnp.int32(limb), row, own] = digit
        scales_ref[row, group] = scales

    row_of_floats = jax.ShapeDtypeStruct((batch, columns), jnp.float32)
    return Normed(
        *pl.pallas_call(
            body,
            grid=(groups // block, batch),
            in_specs=[ANYWHERE] * 4,
            out_specs=(ANYWHERE,) * 4,
            out_shape=(
                row_of_floats,
                row_of_floats,
                jax.ShapeDtypeStruct((limbs, batch, columns), jnp.int8),
                jax.ShapeDtypeStruct((batch, groups), jnp.float32),
            ),
            compiler_params=plt.CompilerParams(num_warps=8, num_stages=1),
            interpret=interpret,
            name="norm_rows",
        )(x, y, weight, weight_layer)
    )
