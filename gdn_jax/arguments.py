"""Types of command-line arguments that several commands share, for argparse."""

import argparse

__all__ = ["positive"]


def positive(text: str) -> int:
    """An integer of at least 1, in decimal digits.

    Raises:
        argparse.ArgumentTypeError: anything else.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return int(text)
