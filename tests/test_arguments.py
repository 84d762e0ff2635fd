"""Numbers from people: on the command line, and as settings of configurations."""

import argparse

import numpy as np
import pytest

from gdn_jax.arguments import positive
from gdn_jax.integers import positive_int


@pytest.mark.parametrize("text", ["0", "-1", "", "1.5", "1e3", " 1", "two", "²"])
def test_an_argument_that_is_no_positive_integer_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="must be an integer of at least 1, got"):
        positive(text)


@pytest.mark.parametrize("text", ["2147483648", "99999999999999999999"])
def test_an_argument_beyond_int32_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match=f"must be at most 2147483647, got {text}"):
        positive(text)


def test_a_positive_argument_is_its_number():
    assert (positive("1"), positive("0042"), positive("2147483647")) == (1, 42, 2**31 - 1)


@pytest.mark.parametrize("value", [3, np.int8(3), np.array(3)])
def test_integers_of_any_type_become_python_ones(value):
    assert type(positive_int("size", value)) is int
    assert positive_int("size", value) == 3


@pytest.mark.parametrize(
    ("value", "error"), [(0, ValueError), (-2, ValueError), (True, TypeError), (2.0, TypeError), ("2", TypeError)]
)
def test_other_sizes_are_refused_by_name(value, error):
    with pytest.raises(error, match=r"^size must be (an integer|at least 1), got"):
        positive_int("size", value)
