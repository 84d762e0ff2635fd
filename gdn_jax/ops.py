"""Which implementation carries out an operation here, and why: the only module that may import `pallas_kernels`.

A request without a name gets the best implementation that supports it; a named one is carried out exactly or refused.
"""

from typing import NamedTuple

import jax

from gdn_jax import linear
from gdn_jax.axes import Array, Float32
from gdn_jax.errors import UnsupportedError
from gdn_jax.limbs import q4_matvec
from gdn_jax.q4 import Q4Tensor

__all__ = [
    "IMPLEMENTATIONS",
    "OPERATIONS",
    "PRECISIONS",
    "Choice",
    "check_precision",
    "choose",
    "implementation_report",
    "project",
]

IMPLEMENTATIONS = ("xla", "mosaic", "triton")
PRECISIONS = {"f32": ("exact",), "q4": ("exact", "q8")}
"""Tier of the large projections -> the precisions it has."""
OPERATIONS = ("project", "conv_step", "delta_step", "gated_rms_norm")


class Choice(NamedTuple):
    """The implementation chosen for an operation, and the reason in words."""

    operation: str
    implementation: str
    reason: str


def choose(operation: str, implementation: str | None = None) -> Choice:
    """The implementation that will carry out `operation` for the default backend.

    Raises:
        ValueError: an unknown implementation. UnsupportedError: a named one that cannot do it.
    """
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be None or one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}")
    if implementation in ("mosaic", "triton"):
        raise UnsupportedError(
            f"implementation={implementation!r} has no kernel for {operation}; use 'xla', or None to have it chosen"
        )
    reason = "asked for by name" if implementation else f"the only implementation on {jax.default_backend()}"
    return Choice(operation, "xla", reason)


def implementation_report() -> tuple[Choice, ...]:
    """What each operation will run on here, and why."""
    return tuple(choose(operation) for operation in OPERATIONS)


def check_precision(precision: str, tier: str) -> None:
    """Refuse a precision that the tier does not have: exact for both; q8 (8-bit activations) for 4-bit weights.

    Raises:
        UnsupportedError: naming what there is.
    """
    if precision not in PRECISIONS[tier]:
        raise UnsupportedError(
            f"precision must be one of {', '.join(PRECISIONS[tier])} for weights of tier {tier!r}, got {precision!r}"
        )


def project(w: Array | Q4Tensor, x: Float32[Array, "B I"], precision: str) -> Float32[Array, "B O"]:
    """y = W x for a matrix of either tier: `linear.project` in float32, `limbs.q4_matvec` in 4 bits."""
    return q4_matvec(w, x, precision=precision) if isinstance(w, Q4Tensor) else linear.project(w, x)
