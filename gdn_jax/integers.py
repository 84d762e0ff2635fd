"""Sizes as Python integers: what configurations keep of whatever integer type they were given."""

import operator
from typing import Any

__all__ = ["positive_int"]


def positive_int(name: str, value: Any) -> int:
    """`value` as a Python int, if it is an integer of any type, and at least 1; `name` names it in the error.

    Raises:
        TypeError: it is not an integer, or a bool. ValueError: it is below 1.
    """
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None
    if number < 1:
        raise ValueError(f"{name} must be at least 1, got {number}")
    return number
