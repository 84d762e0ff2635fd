"""Rules that turn float weights into 4-bit codes and float16 scales; numpy only, a few rows at a time and per core.

A group is 32 consecutive columns of a row, and its dequantised weight is code · scale. Three rules:

- `"absmax"`: scale = absmax / 7 rounded to float16, code = round-half-even(w / scale), at most 7. Where the rounding of
  a subnormal scale would leave absmax beyond 7.5 scales, the next larger float16 is taken. So |w - code · scale| <=
  scale / 2 holds for every weight: up to 7 scales only the rounding errs, and from there to 7.5 clipping to 7 errs by
  at most half a scale. The float32 quotient does not spoil this: the tie (k + 1/2) · scale is itself a float32, and its
  neighbours lie further from it than half a step of the quotient, so no weight is rounded onto or over a tie.
- `"q4_0"`: the rule of GGUF's Q4_0, bit for bit: step = -m / 8 in float32, m being the first weight of the largest
  magnitude; code = trunc(w · (1 / step) + 8.5) - 8, at most 7. The scale is the step as float16, of either sign.
- `"mse"`: the scale, of either sign, that minimises sum_i a_i · (w_i - code_i · scale)² over a grid and its
  least-squares refinements, with the nearest codes; a_i is the mean square activation of column i, or 1. Never worse
  than the two other rules on this objective.

A group of zeros gets codes 0 and scale 0 (in q4_0 of either sign, as the reference encoder writes it).
"""

import functools
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np

from checkpoints.q4_blocks import CODES_PER_WORD, GROUP, Q4Codes, Q4Words, pack_words
from gdn_jax.threads import map_in_threads

__all__ = ["METHODS", "quantize_rows", "quantize_words", "row_chunks"]

METHODS = ("absmax", "q4_0", "mse")

_SOURCES = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
"""What a weight may be stored in: the types that widen to float32 exactly."""

_CHUNK = 1 << 17
"""Weights handled at a time: half a megabyte of float32, so that the intermediate arrays stay in the cache."""

_LIMIT = np.float32(np.finfo(np.float16).max)

# The search of "mse" starts where no code is clipped by far and ends where the weights that count begin to be. Twenty
# scales of each sign and two refinements come within 0.3 % of the RMS error that 300 scales reach on Gaussian weights.
_WIDEST, _NARROWEST = np.float32(5.5), np.float32(9)
_GRID = 20
_REFINEMENTS = 2

_Encoder = Callable[[np.ndarray], Q4Codes]
"""Float32 groups [n, I/32, 32] -> codes of that shape and scales [n, I/32], not finite where no finite one exists."""


@typing.no_type_check
def quantize_rows(
    w: np.ndarray | jax.Array, method: str = "absmax", *, activation_ms: np.ndarray | jax.Array | None = None
) -> Q4Codes:
    """w [..., I] -> codes int8 [..., I] and scales float16 [..., I/32], by one of the rules of this module.

    `w` is float32, or float16 or bfloat16, which widen exactly. `activation_ms` [I], for `"mse"` only, is the mean
    square activation of each input column. Beyond its result this takes a few megabytes per core, however large `w` is.

    Raises:
        TypeError: `w` is of another type.
        ValueError: an unknown method; I is not a multiple of 32; a weight is infinite or NaN (the message counts them
            and names the first) or too large for a float16 scale; `activation_ms` does not fit.
    """
    return Q4Codes(*_quantized(w, method, activation_ms, packed=False))


@typing.no_type_check
def quantize_words(
    w: np.ndarray | jax.Array, method: str = "absmax", *, activation_ms: np.ndarray | jax.Array | None = None
) -> Q4Words:
    """`quantize_rows` with the codes as device words: w [..., I] -> uint32 [..., I/8] and float16 [..., I/32].

    Packed as it goes, the codes never stand in memory with a byte each.

    Raises:
        As `quantize_rows`.
    """
    return Q4Words(*_quantized(w, method, activation_ms, packed=True))


class _UnfitError(Exception):
    """No finite scale exists for some group."""


def _quantized(w: Any, method: str, activation_ms: Any, *, packed: bool) -> tuple[np.ndarray, np.ndarray]:
    """Codes [..., I], or words [..., I/8] if `packed`, and scales [..., I/32]."""
    w = np.asarray(w)
    _check_source(w)
    columns = w.shape[-1]
    encode = _encoder(method, columns, activation_ms)
    rows = w.reshape(-1, columns)
    coded = np.empty((len(rows), columns // CODES_PER_WORD), np.uint32) if packed else np.empty(rows.shape, np.int8)
    scales = np.empty((len(rows), columns // GROUP), np.float16)

    def work(part: slice) -> None:
        groups = rows[part].astype(np.float32, copy=False).reshape(-1, scales.shape[1], GROUP)
        # A weight that is not finite, or too large, shows in the scale: no separate pass over the weights looks for it.
        with np.errstate(all="ignore"):
            codes, scales[part] = encode(groups)
        if not np.isfinite(scales[part]).all():
            raise _UnfitError
        codes = codes.reshape(-1, columns)
        coded[part] = pack_words(codes) if packed else codes

    try:
        map_in_threads(work, row_chunks(*rows.shape))
    except _UnfitError:
        raise ValueError(_unfit(w, method)) from None
    return coded.reshape(*w.shape[:-1], -1), scales.reshape(*w.shape[:-1], -1)


def row_chunks(rows: int, columns: int) -> Iterator[slice]:
    """Slices that cover `rows` rows, each of about as many weights as the cache holds and at least one row."""
    step = max(1, _CHUNK // columns)
    return (slice(start, start + step) for start in range(0, rows, step))


def _encoder(method: str, columns: int, activation_ms: np.ndarray | None) -> _Encoder:
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    if method == "mse":
        return functools.partial(_encode_mse, importance=_importance(columns, activation_ms))
    if activation_ms is not None:
        raise ValueError(f"activation_ms is used by method='mse' only, got method={method!r}")
    return _encode_absmax if method == "absmax" else _encode_q4_0


def _encode_absmax(groups: np.ndarray) -> Q4Codes:
    scales = _absmax_scales(groups)
    return Q4Codes(_nearest_codes(groups, scales).astype(np.int8), scales)


def _absmax_scales(groups: np.ndarray) -> np.ndarray:
    absmax = np.abs(groups).max(axis=-1)
    scales = (absmax / np.float32(7)).astype(np.float16)
    too_small = absmax > np.float32(7.5) * scales.astype(np.float32)
    return np.where(too_small, np.nextafter(scales, np.float16(np.inf)), scales)


def _nearest_codes(groups: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The codes, as floats, whose products with `scales` lie nearest to the weights; 0 under a scale of 0."""
    divisors = np.where(scales == 0, np.inf, scales).astype(groups.dtype)
    codes = groups / divisors[..., None]
    np.rint(codes, out=codes)
    return np.clip(codes, -8, 7, out=codes)


def _encode_q4_0(groups: np.ndarray) -> Q4Codes:
    steps = _q4_0_steps(groups)
    inverse = np.float32(1) / steps
    # The reference encoder is undefined where the inverse overflows; there, as in a group of zeros, every code is 0.
    inverse[np.isinf(inverse)] = 0
    levels = groups * inverse[..., None]
    levels += np.float32(8.5)
    np.trunc(levels, out=levels)
    np.minimum(levels, 15, out=levels)
    levels -= 8
    return Q4Codes(levels.astype(np.int8), steps.astype(np.float16))


def _q4_0_steps(groups: np.ndarray) -> np.ndarray:
    largest = np.abs(groups).argmax(axis=-1)
    return np.take_along_axis(groups, largest[..., None], axis=-1)[..., 0] / np.float32(-8)


class _Fit(NamedTuple):
    """Candidate scales [n, I/32] and the weighted squared error that each group has with them."""

    scales: np.ndarray
    error: np.ndarray


def _encode_mse(groups: np.ndarray, importance: np.ndarray) -> Q4Codes:
    simple = (_absmax_scales(groups), _q4_0_steps(groups).astype(np.float16))
    weights = importance.astype(np.float32)
    best = _best_fit(groups, weights, (*simple, *_grid(groups, weights)))
    for _ in range(_REFINEMENTS):
        best = _better(best, _fit(groups, weights, _least_squares_scales(groups, weights, best.scales)))
    # The search may err by the rounding of float32 sums; against the two simple rules the decision is made in float64.
    scales = _best_fit(groups.astype(np.float64), importance, (best.scales, *simple)).scales
    return Q4Codes(_nearest_codes(groups, scales).astype(np.int8), scales)


def _grid(groups: np.ndarray, importance: np.ndarray) -> Iterator[np.ndarray]:
    """Candidate scales, of both signs, in geometric steps from absmax / 5.5 to max(sqrt(a) · |w|) / 9.

    The importances a are at most 1. Where they differ, outliers in columns of faint activation are cheaply clipped, and
    the best scale may be far below absmax / 9.
    """
    magnitudes = np.abs(groups)
    scales = magnitudes.max(axis=-1) / _WIDEST
    last = (np.sqrt(importance) * magnitudes).max(axis=-1) / _NARROWEST
    step = (last / scales) ** np.float32(1 / (_GRID - 1))
    for _ in range(_GRID):
        candidate = np.minimum(scales, _LIMIT).astype(np.float16)
        yield candidate
        yield -candidate
        scales = scales * step


def _best_fit(groups: np.ndarray, importance: np.ndarray, candidates: Iterable[np.ndarray]) -> _Fit:
    return functools.reduce(_better, (_fit(groups, importance, scales) for scales in candidates))


def _fit(groups: np.ndarray, importance: np.ndarray, scales: np.ndarray) -> _Fit:
    error = _nearest_codes(groups, scales)
    error *= scales.astype(groups.dtype)[..., None]
    error -= groups
    error *= error
    error *= importance
    return _Fit(scales, error.sum(axis=-1))


def _better(held: _Fit, rival: _Fit) -> _Fit:
    """Per group the fit of the smaller error; the one held where they are equal or not comparable."""
    wins = rival.error < held.error
    return _Fit(*(np.where(wins, new, old) for new, old in zip(rival, held, strict=True)))


def _least_squares_scales(groups: np.ndarray, importance: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """sum(a · w · code) / sum(a · code²), the best scale for the codes that `scales` lead to."""
    codes = _nearest_codes(groups, scales)
    weighted = codes * importance
    numerator, denominator = (groups * weighted).sum(axis=-1), (codes * weighted).sum(axis=-1)
    refined = numerator / np.where(denominator == 0, np.inf, denominator)
    return np.clip(refined, -_LIMIT, _LIMIT).astype(np.float16)


def _importance(columns: int, activation_ms: np.ndarray | None) -> np.ndarray:
    """The weights of the objective, float64 [I/32, 32]: each group scaled by a power of two to a largest of 0.5 … 1.

    The scaling changes no decision, and keeps the float32 sums of the search in range.
    """
    if activation_ms is None:
        return np.ones((columns // GROUP, GROUP))
    ms = np.asarray(activation_ms, np.float64)
    if ms.shape != (columns,):
        raise ValueError(f"activation_ms must be [I] = ({columns},), one mean square per column, got shape {ms.shape}")
    if not (np.isfinite(ms) & (ms >= 0)).all():
        raise ValueError("activation_ms must be finite and not negative: it holds means of squares")
    groups = ms.reshape(-1, GROUP)
    _, exponent = np.frexp(groups.max(axis=-1, keepdims=True))
    return np.ldexp(groups, -exponent)


def _check_source(w: np.ndarray) -> None:
    if w.dtype not in _SOURCES:
        raise TypeError(f"w must be float32, float16 or bfloat16, got {w.dtype}; cast it with w.astype(np.float32)")
    if w.ndim == 0 or w.size == 0:
        raise ValueError(f"w must be [..., I] and not empty, got shape {w.shape}")
    if w.shape[-1] % GROUP:
        raise ValueError(
            f"I (the number of columns) must be a multiple of {GROUP}, got {w.shape[-1]}; keep this matrix in float32"
        )


def _unfit(w: np.ndarray, method: str) -> str:
    """Why no finite scale exists for `w`, in words."""
    rows = w.reshape(-1, w.shape[-1])
    bad, first = 0, None
    for part in row_chunks(*rows.shape):
        finite = np.isfinite(rows[part].astype(np.float32))
        bad += finite.size - np.count_nonzero(finite)
        if first is None and not finite.all():
            first = part.start * rows.shape[1] + int(finite.argmin())
    if first is not None:
        position = tuple(map(int, np.unravel_index(first, w.shape)))
        return f"w must be finite, but {bad} of {w.size} weights are infinite or NaN, the first at {position}"
    return (
        f"w is too large for method={method!r}: a group's scale would exceed {_LIMIT:.0f}, the largest float16; "
        "rescale the matrix or keep it in float32"
    )
