"""Which implementation carries out an operation here, and why: the only module that may import `pallas_kernels`.

A request without a name gets the best implementation that supports it; a named one is carried out exactly or refused.
"""

from typing import NamedTuple

import jax

from gdn_jax.errors import UnsupportedError

__all__ = ["IMPLEMENTATIONS", "PRECISIONS", "Choice", "check_precision", "choose", "implementation_report"]

IMPLEMENTATIONS = ("xla", "mosaic", "triton")
PRECISIONS = ("exact",)
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


def check_precision(precision: str) -> None:
    """Refuse a precision that the float32 tier does not have.

    Raises:
        UnsupportedError: anything but "exact".
    """
    if precision not in PRECISIONS:
        raise UnsupportedError(
            f"precision must be one of {', '.join(PRECISIONS)} for float32 weights, got {precision!r}"
        )
