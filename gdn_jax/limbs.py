"""Activations as fixed-point numbers of signed bytes, and products with 4-bit weights in exact integer arithmetic.

Per group of 32 columns, with m = max|x| and n limbs l_1 … l_n (signed bytes, the leading one first):

    scale = m / 127 rounded to 16 significant bits,    x ≈ scale · (l_1 + l_2 / 256 + l_3 / 65536),

the number in brackets being x / scale rounded to a multiple of 256^(1-n). The scale belongs to the leading limb, so it
is the same for every n; a scale of the last limb would leave the range of float32 already at m = 1e-31.

One limb is the 8-bit activation of CPU engines; three limbs carry 24 bits, as float32 does, relative to the group's
largest activation. The error of x is at most 0.51 units of the last limb, that is 1.03 · 2^-24 · m for n = 3: the
remainder x - l_1 · scale is exact in float32, since l_1 · scale has at most 23 bits, so an inexact quotient (XLA
multiplies by the reciprocal) touches only the few digits that follow.

Special groups: all zeros give limbs 0 and scale 1. An infinite or NaN member gives limbs 0 and scale NaN, so that
every product with the group is NaN and none is a finite number. The scale is kept from falling below 2^-126, the
smallest normal float32: below m = 1.5e-36 the error of x stays at 2^-143 instead of falling with m. Subnormal
activations count as zero wherever the hardware flushes them.
"""

import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Float32, Int8, Int32

from gdn_jax.axes import Array
from gdn_jax.fence import fence
from gdn_jax.q4 import GROUP, Q4Tensor, unpack_groups

__all__ = ["LIMBS", "group_digits", "q4_matvec", "split_limbs"]

LIMBS = {"exact": 3, "q8": 1}
"""Precision -> limbs per activation."""

_LEADING = 127
_FAINT = np.float32(2.0**-64)
_SMALLEST_SCALE = np.finfo(np.float32).tiny
_LANES = 32
"""Groups per step of the product; also the number of partial sums per output."""
_BATCH = 8
"""Rows of x multiplied at a time: what bounds the memory of a product."""


@typing.no_type_check
def split_limbs(x: Float32[Array, "... I"], limbs: int = 3) -> tuple[Array, Array]:
    """x [..., I] -> limbs int8 [limbs, ..., I], leading limb first, and group scales float32 [..., I/32].

    The format and its error are stated at the head of this module.

    Raises:
        TypeError: x is not float32. ValueError: `limbs` is not 1, 2 or 3, or I is not a multiple of 32.
    """
    if limbs not in (1, 2, 3):
        raise ValueError(f"limbs must be 1, 2 or 3, got {limbs!r}")
    _check_activations(x)
    return _split(jnp.asarray(x), limbs)


def _split(x: Float32[Array, "... I"], limbs: int) -> tuple[Int8[Array, "limbs ... I"], Float32[Array, "... groups"]]:
    digits, scales = group_digits(x.reshape(*x.shape[:-1], -1, GROUP), limbs)
    return jnp.stack(digits).reshape(limbs, *x.shape), scales


def group_digits(
    groups: Float32[Array, "... groups 32"], limbs: int
) -> tuple[list[Int8[Array, "... groups 32"]], Float32[Array, "... groups"]]:
    """`split_limbs` on x in groups: its limbs one by one, and the scales.

    Only operations that the GPU kernels' compiler has, since the producer of an x may split it inside its kernel.
    """
    finite = jnp.isfinite(groups)
    # Not the largest |x| itself: whether a maximum passes on a NaN is the backend's choice.
    spoilt = jnp.max(jnp.where(finite, jnp.float32(0), jnp.float32(1)), axis=-1) > 0
    groups = jnp.where(finite & ~spoilt[..., None], groups, jnp.float32(0))
    largest = jnp.max(jnp.abs(groups), axis=-1)
    scale = jnp.maximum(_sixteen_bits(largest * jnp.float32(1 / _LEADING)), jnp.float32(_SMALLEST_SCALE))
    scale = jnp.where(largest > 0, scale, jnp.float32(1))
    # Faint groups are lifted by an exact power of two, so that no remainder is subnormal.
    lift = jnp.where(largest < jnp.float32(_FAINT), jnp.float32(1 / _FAINT), jnp.float32(1))[..., None]
    fixed = _fixed_point(groups * lift, scale[..., None] * lift, 256 ** (limbs - 1))
    return _digits(fixed, limbs), jnp.where(spoilt, jnp.float32(np.nan), scale)


def _sixteen_bits(positive: Array) -> Array:
    """The nearest float32 of 16 significant bits, exact where there are fewer; of two, the larger."""
    bits = lax.bitcast_convert_type(positive, jnp.int32)
    return lax.bitcast_convert_type((bits + 0x80) & ~0xFF, jnp.float32)


def _fixed_point(x: Array, scale: Array, unit: int) -> Int32[Array, "..."]:
    """x / scale in units of 1 / `unit`; the leading part is taken out first, since what remains of x is exact."""
    leading = _nearest(x / scale)
    rest = (x - leading * scale) / scale
    return leading.astype(jnp.int32) * unit + _nearest(rest * jnp.float32(unit)).astype(jnp.int32)


def _nearest(x: Array) -> Array:
    """The nearest integer, of two the even one: `jnp.round` in terms of `jnp.floor`."""
    above = jnp.floor(x + jnp.float32(0.5))
    odd = above != 2 * jnp.floor(above * jnp.float32(0.5))
    return jnp.where(odd & (above - x == jnp.float32(0.5)), above - 1, above)


def _digits(fixed: Int32[Array, "..."], limbs: int) -> list[Int8[Array, "..."]]:
    """The digits of `fixed` in base 256, each in -128 … 127, leading one first."""
    digits = []
    for _ in range(limbs):
        digit = ((fixed + 128) & 255) - 128
        digits.insert(0, digit.astype(jnp.int8))
        fixed = (fixed - digit) >> 8
    return digits


@typing.no_type_check
def q4_matvec(q: Q4Tensor, x: Float32[Array, "B I"], *, precision: str = "exact") -> Float32[Array, "B N"]:
    """y[b, n] = sum_i code[n, i] · scale[n, i // 32] · x[b, i], with x as three limbs ("exact") or one ("q8").

    Per group the dot products d_1 … d_limbs of the codes with the limbs are exact in int32 and at most 32 · 8 · 128;
    D = d_1 + d_2 / 256 + d_3 / 65536 is rounded once, to float32. The group's term is (D · x scale) · weight scale, in
    this order. Terms are added in a fixed order: 32 partial sums, group g going to number g mod 32 in ascending order
    of g; then the upper half of the partial sums is added to the lower half, five times over.

    In "exact", up to max|x| = 1.3e36 (above, D · x scale may overflow), the error of a group's term is at most

        2^-24 · (1.03 · max|x| · sum|w| + 3 · |term|) + 2^-126 · (sum|w| + |weight scale| + 1):

    that of the limbs, three roundings, and what flushing subnormal numbers to zero may take away. So the product is
    float32 relative to a group's largest activation; where a spike meets codes of 0, and all else in its group is 2^-24
    of it, a float32 multiply-and-add would do better.

    An infinite or NaN activation makes its row of y NaN throughout, also where it meets codes of 0.

    Raises:
        TypeError: `q` is not a Q4Tensor or x is not float32.
        ValueError: another precision, `q` is a stack of matrices, or I differs.
    """
    if precision not in LIMBS:
        raise ValueError(f"precision must be one of {', '.join(LIMBS)}, got {precision!r}")
    if not isinstance(q, Q4Tensor):
        raise TypeError(f"q must be a Q4Tensor, got {type(q).__name__}")
    if len(q.shape) != 2:
        raise ValueError(f"q must be one matrix [N, I], got {q.shape}; take one layer of the stack")
    _check_activations(x)
    if jnp.ndim(x) != 2 or x.shape[-1] != q.shape[-1]:
        raise ValueError(f"x must be [B, I] with I={q.shape[-1]} (the columns of q), got {jnp.shape(x)}")
    return _products(q, jnp.asarray(x), limbs=LIMBS[precision])


# Compiled here, since loops over closures would be compiled again at every call outside of a jit.
@functools.partial(jax.jit, static_argnames=("limbs",))
def _products(q: Q4Tensor, x: Float32[Array, "B I"], limbs: int) -> Float32[Array, "B N"]:
    return lax.map(lambda row: _product(q, row, limbs), x, batch_size=_BATCH)


def _product(q: Q4Tensor, x: Float32[Array, "I"], limbs: int) -> Float32[Array, "N"]:
    """One row of `q4_matvec`; 32 groups at a time, so that the codes of all columns are never unpacked at once."""
    # The fences here and below make the product the same computation in every program: x is split once, and the last
    # multiplication of a term is not contracted with the addition in one program and left alone in another.
    digits, scales = fence(_split(x, limbs))
    digits = digits.reshape(limbs, -1, GROUP)
    rows, groups = q.scales.shape

    def terms(start, lanes):
        words = lax.dynamic_slice_in_dim(q.codes, start * (GROUP // 8), lanes * (GROUP // 8), axis=1)
        dots = _group_dots(unpack_groups(words), lax.dynamic_slice_in_dim(digits, start, lanes, axis=1))
        weight_scales = lax.dynamic_slice_in_dim(q.scales, start, lanes, axis=1).astype(jnp.float32)
        # dots · scale first: it has the magnitude of the activations, whereas the product of two small scales would be
        # flushed to zero before the dots could lift it.
        scaled = (dots * lax.dynamic_slice_in_dim(scales, start, lanes)[None]) * weight_scales
        return fence(scaled)

    def step(i, partial):
        return partial + terms(i * _LANES, _LANES)

    whole, rest = divmod(groups, _LANES)
    partial = jnp.zeros((rows, _LANES), jnp.float32)
    if whole:
        partial = lax.fori_loop(0, whole, step, partial)
    if rest:
        partial = partial.at[:, :rest].add(terms(whole * _LANES, rest))
    return _halving_sum(partial)


def _group_dots(codes: Int8[Array, "N lanes 32"], digits: Int8[Array, "limbs lanes 32"]) -> Float32[Array, "N lanes"]:
    """D[n, g] = sum_j codes[n, g, j] · sum_l digits[l, g, j] / 256^l, l from 0, in one rounding."""
    dots = jnp.einsum("ngj,lgj->lng", codes, digits, preferred_element_type=jnp.int32).astype(jnp.float32)
    # Horner's rule: every step but the last is exact, 16 bits above the point and 8 below. (The same number as one
    # int32, scaled afterwards, would let XLA move the factor to the scale, out of the range of float32.)
    total = dots[-1]
    for dot in dots[-2::-1]:
        total = dot + total * np.float32(1 / 256)
    return total


def _halving_sum(partial: Float32[Array, "N lanes"]) -> Float32[Array, "N"]:
    while (half := partial.shape[1] // 2) > 0:
        partial = partial[:, :half] + partial[:, half:]
    return partial[:, 0]


def _check_activations(x: Array) -> None:
    if jnp.result_type(x) != jnp.float32:
        raise TypeError(f"x must be float32, got {jnp.result_type(x)}; cast it with x.astype(jnp.float32)")
    if jnp.ndim(x) == 0 or not x.shape[-1] or x.shape[-1] % GROUP:
        raise ValueError(f"x must be [..., I] with I a multiple of {GROUP}, got shape {jnp.shape(x)}")
