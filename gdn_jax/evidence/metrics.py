"""Distances between two arrays of the same shape, computed in float64."""

import numpy as np
from numpy.typing import ArrayLike

__all__ = ["differing", "max_abs", "max_rel", "rms_rel"]


def max_abs(got: ArrayLike, reference: ArrayLike) -> float:
    """max |got - reference|; NaN if either holds a NaN, 0 for empty arrays."""
    return float(np.max(np.abs(_wide(got) - _wide(reference)), initial=0.0))


def max_rel(got: ArrayLike, reference: ArrayLike) -> float:
    """max |got - reference| / max |reference|, one figure for a whole array.

    Ratios per element would blow up near zero and mean nothing. Two zero arrays are 0 apart.
    """
    return _ratio(max_abs(got, reference), float(np.max(np.abs(_wide(reference)), initial=0.0)))


def rms_rel(got: ArrayLike, reference: ArrayLike) -> float:
    """|got - reference|₂ / |reference|₂. Two zero arrays are 0 apart."""
    return _ratio(float(np.linalg.norm(_wide(got) - _wide(reference))), float(np.linalg.norm(_wide(reference))))


def differing(a: ArrayLike, b: ArrayLike) -> int:
    """How many elements of two float32 arrays differ in their bits: -0.0 is not 0.0, and a NaN equals itself."""
    a, b = np.asarray(a), np.asarray(b)
    if a.dtype != np.float32 or b.dtype != np.float32 or a.shape != b.shape:
        raise ValueError(f"expected float32 arrays of one shape, got {a.dtype} {a.shape} and {b.dtype} {b.shape}")
    return int(np.sum(np.ascontiguousarray(a).view(np.uint32) != np.ascontiguousarray(b).view(np.uint32)))


def _wide(array: ArrayLike) -> np.ndarray:
    return np.asarray(array, np.float64).ravel()


def _ratio(difference: float, size: float) -> float:
    return difference / size if size else (0.0 if difference == 0 else float("inf"))
