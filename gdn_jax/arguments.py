"""Types of command-line arguments that several commands share, for argparse."""

import argparse

__all__ = ["positive"]

_LARGEST = 2**31 - 1
"""Sizes and positions on a device are int32."""


def positive(text: str) -> int:
    """An integer from 1 to the largest int32, in decimal digits.

    Raises:
        argparse.ArgumentTypeError: anything else.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    if int(text) > _LARGEST:
        raise argparse.ArgumentTypeError(f"must be at most {_LARGEST}, got {text}")
    return int(text)
