"""Sizes as Python integers: what configurations keep of whatever integer type they were given."""

import operator
from typing import Any

__all__ = ["integer", "positive_int"]


def integer(name: str, value: Any) -> int:
    """`value` as a Python int, if it is an integer of any type; `name` names it in the error.

    Raises:
        TypeError: it is not an integer, or a bool.
    """
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None


def positive_int(name: str, value: Any) -> int:
    """`integer`, of at least 1.

    Raises:
        TypeError: as `integer`. ValueError: it is below 1.
    """
    number = integer(name, value)
    if number < 1:
        raise ValueError(f"{name} must be at least 1, got {number}")
    return number
