"""4-bit matrices: the device layout, quantisation and its report, and the float32 matrix that they stand for."""

import math
import typing
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Float32, Int8, UInt32

from checkpoints.q4_blocks import CODES_PER_WORD, GROUP, Q4Codes, check_codes, pack_words, unpack_words
from gdn_jax.axes import Array, Leaf
from gdn_jax.q4_quantizers import METHODS, quantize_rows, quantize_words, row_chunks
from gdn_jax.threads import map_in_threads

__all__ = [
    "CODES_PER_WORD",
    "GROUP",
    "METHODS",
    "Q4Tensor",
    "QuantReport",
    "dequantize",
    "quantization_report",
    "quantize",
    "quantize_rows",
    "quantize_words",
    "unpack_groups",
]


@flax.struct.dataclass
class Q4Tensor:
    """A matrix of 4-bit weights: weight[n, i] = code[n, i] · scale[n, i // 32], code in -8 … 7, scale float16.

    `codes` uint32 [..., N, I/8] and `scales` float16 [..., N, I/32] are what the device holds: 4.5 bits per weight.
    Leading axes stack matrices. The four words 4g … 4g + 3 of a row hold the 32 codes of group g as sixteen bytes, byte
    0 in the lowest bits of the first word; byte j holds column 32g + j in its low and column 32g + 16 + j in its high
    nibble, both in two's complement. So bits 4(2b + h) … 4(2b + h) + 3 of word 4g + a are the code of column
    32g + 16h + 4a + b.

    A worked byte: column 3 holds -2 (0xE) and column 19 holds 5 (0x5): byte 3 is 0x5E, the top byte of word 0.

    Building one from its fields checks nothing, since transformations rebuild pytrees from other leaves than arrays;
    `from_logical` and `quantize` check.
    """

    codes: Leaf
    scales: Leaf

    @classmethod
    @typing.no_type_check
    def from_logical(cls, codes: np.ndarray, scales: np.ndarray) -> "Q4Tensor":
        """Codes int8 [..., N, I] in -8 … 7 and finite scales float16 [..., N, I/32] -> the same matrix on the device.

        Raises:
            TypeError: another dtype. ValueError: no rows axis, I is not a multiple of 32, the shapes disagree, a code
                is out of range, or a scale is infinite or NaN; the message gives the position.
        """
        codes, scales = np.asarray(codes), np.asarray(scales)
        check_codes(codes, scales)
        if codes.ndim < 2:
            raise ValueError(f"codes must be [..., N, I], got shape {codes.shape}; a single row is [1, I]")
        return cls(codes=jnp.asarray(pack_words(codes)), scales=jnp.asarray(scales))

    def to_logical(self) -> Q4Codes:
        """The codes int8 [..., N, I] and scales float16 [..., N, I/32] in numpy: the inverse of `from_logical`."""
        return Q4Codes(unpack_words(np.asarray(self.codes)), np.asarray(self.scales))

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., N, I], the shape of the matrix that this stands for."""
        return (*self.codes.shape[:-1], self.codes.shape[-1] * CODES_PER_WORD)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales together, 0.5625 per weight."""
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in (self.codes, self.scales))


@typing.no_type_check
def quantize(
    w: np.ndarray | jax.Array, method: str = "absmax", *, activation_ms: np.ndarray | jax.Array | None = None
) -> Q4Tensor:
    """w [..., N, I] float32 (or float16, bfloat16) -> the Q4Tensor nearest to it under the rule `method`.

    `"absmax"` keeps |w - code · scale| <= scale / 2; `"q4_0"` is GGUF's rule, bit for bit; `"mse"` searches the scale
    of the least squared error, weighted by `activation_ms` [I], the mean square activation of each input column, when
    given. The rules are stated in `gdn_jax.q4_quantizers`. Runs in numpy on the host.

    Raises:
        TypeError: `w` is of another type.
        ValueError: an unknown method; no rows axis; I is not a multiple of 32; a weight is infinite, NaN or too large
            for a float16 scale; `activation_ms` does not fit.
    """
    return Q4Tensor.from_logical(*quantize_rows(w, method, activation_ms=activation_ms))


@typing.no_type_check
def dequantize(q: Q4Tensor) -> Float32[Array, "... N I"]:
    """code · scale as float32 [..., N, I], exact: 4 significant bits times 11, and no result is subnormal.

    Raises:
        TypeError: `q` is not a Q4Tensor.
    """
    if not isinstance(q, Q4Tensor):
        raise TypeError(f"q must be a Q4Tensor, got {type(q).__name__}")
    weights = unpack_groups(q.codes).astype(jnp.float32) * q.scales.astype(jnp.float32)[..., None]
    return weights.reshape(q.shape)


def unpack_groups(words: UInt32[Array, "... N words"]) -> Int8[Array, "... N groups 32"]:
    """Device words [..., N, I/8] -> codes int8 [..., N, I/32, 32]."""
    # A bitcast to a narrower type puts the lowest bits first, as the layout does; shifts of int8 fill with the sign.
    octets = lax.bitcast_convert_type(words, jnp.int8).reshape(*words.shape[:-1], -1, GROUP // 2)
    low, high = (octets << 4) >> 4, octets >> 4
    return jnp.concatenate([low, high], axis=-1)


class QuantReport(NamedTuple):
    """What quantisation cost one tensor, measured in float64."""

    max_error: float
    """Largest |w - code · scale|."""
    rms_error: float
    """Root of the mean square of w - code · scale."""
    rms_relative: float
    """`rms_error` over the root mean square of w; 0 for a tensor of zeros."""
    zero_code_share: float
    """Share of the codes that are 0."""
    zeroed_rows: float
    """Share of the rows that hold a weight other than 0, but dequantise to zeros only."""
    zeroed_blocks: float
    """The same share for blocks, the groups of 32 columns: where the scale underflowed to 0, or every code is 0."""


@typing.no_type_check
def quantization_report(w: np.ndarray | jax.Array, q: Q4Tensor) -> QuantReport:
    """Compare w [..., N, I] with the matrix that `q` stands for, a few rows at a time, on the host.

    Raises:
        TypeError: `q` is not a Q4Tensor. ValueError: the shapes differ.
    """
    if not isinstance(q, Q4Tensor):
        raise TypeError(f"q must be a Q4Tensor, got {type(q).__name__}")
    w = np.asarray(w)
    if w.shape != q.shape:
        raise ValueError(f"w must have the shape of q, {q.shape}, got {w.shape}")
    rows, columns = math.prod(w.shape[:-1]), w.shape[-1]
    grouped = (rows, columns // GROUP, GROUP)
    source, codes, scales = w.reshape(grouped), np.asarray(q.codes).reshape(rows, -1), np.asarray(q.scales)
    scales = scales.reshape(grouped[:2])

    def work(part: slice) -> tuple[float, np.ndarray]:
        return _compare(source[part], unpack_words(codes[part]), scales[part])

    largest, sums = zip(*map_in_threads(work, row_chunks(rows, columns)), strict=True)
    max_error = max(largest)
    error, norm, zero_codes, zeroed_rows, zeroed_blocks = map(float, sum(sums))  # one after the other: always the same
    return QuantReport(
        max_error=max_error,
        rms_error=math.sqrt(error / w.size),
        rms_relative=math.sqrt(error / norm) if norm else 0.0,
        zero_code_share=zero_codes / w.size,
        zeroed_rows=zeroed_rows / rows,
        zeroed_blocks=zeroed_blocks / scales.size,
    )


def _compare(source: np.ndarray, codes: np.ndarray, scales: np.ndarray) -> tuple[float, np.ndarray]:
    """The largest error, and the sums of error², of w², of zero codes, of zeroed rows and of zeroed blocks."""
    weights = source.astype(np.float64)
    stored = codes.reshape(weights.shape) * scales.astype(np.float64)[..., None]
    error = weights - stored
    held, kept = (weights != 0).any(axis=-1), (stored != 0).any(axis=-1)
    zeroed_rows = np.count_nonzero(held.any(axis=-1) & ~kept.any(axis=-1))
    # Plain sums: a BLAS dot would wake its threads for every chunk.
    sums = (np.sum(error * error), np.sum(weights * weights), np.count_nonzero(codes == 0))
    return float(np.abs(error).max()), np.array([*sums, zeroed_rows, np.count_nonzero(held & ~kept)], np.float64)
