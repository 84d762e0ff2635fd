"""Refusals that every border function shares: what was expected, what came, in which argument."""

from typing import Any

import jax
import numpy as np

from gdn_jax.config import GdnConfig

__all__ = ["require_array", "require_config", "require_kind"]


def require_kind(name: str, value: Any, kind: type) -> None:
    """Refuse a value of another type.

    Raises:
        TypeError: naming the argument, the type wanted and the type given.
    """
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be a {kind.__name__}, got {type(value).__name__}")


def require_config(cfg: Any) -> None:
    """Refuse anything but a GdnConfig. Raises TypeError."""
    require_kind("cfg", cfg, GdnConfig)


def require_array(name: str, value: Any, dtype: str) -> None:
    """Refuse anything but a JAX or numpy array of `dtype`; nothing is converted in silence.

    Raises:
        TypeError: naming the argument, and what it is.
    """
    if not isinstance(value, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct):
        raise TypeError(f"{name} must be an array, got {type(value).__name__}")
    if value.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, got {value.dtype}; cast it with .astype({dtype!r})")
