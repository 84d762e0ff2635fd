"""Projections: exact where arithmetic is exact, and as close as two-level sums should be where it is not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gdn_jax.linear import GROUP, project
from tests.support.cases import assert_same_bits, error
from tests.support.tolerances import PROJECTION

project = jax.jit(project)


@pytest.mark.parametrize("columns", [1, 2, 31, 32, 33, 40, 63, 64, 65, 100])
def test_every_column_counts_once(columns):
    """F27: small integers, whose sums are exact in any order, so a column lost or taken twice shows."""
    rng = np.random.default_rng(columns)
    w, x = rng.integers(-9, 10, (7, columns)), rng.integers(-9, 10, (3, columns))
    got = project(jnp.asarray(w, jnp.float32), jnp.asarray(x, jnp.float32))
    np.testing.assert_array_equal(got, x @ w.T)


@pytest.mark.parametrize("columns", [20, 33, 72, 1024, 5120])
def test_error_does_not_grow_with_the_columns(columns):
    """F13: one long sum in float32 would reach 1.3e-6 at 5120 columns, TF32 or bfloat16 1e-3."""
    rng = np.random.default_rng(columns)
    w, x = (rng.standard_normal((n, columns)).astype(np.float32) for n in (256, 2))
    got = project(jnp.asarray(w), jnp.asarray(x))
    assert got.dtype == jnp.float32
    for row, want in zip(np.asarray(got), x.astype(np.float64) @ w.T.astype(np.float64), strict=True):
        assert error(row, want) <= PROJECTION


def test_rows_do_not_depend_on_each_other():
    """F11, F58: a NaN stays in its row, and the others keep their bits."""
    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.standard_normal((n, 3 * GROUP + 5)), jnp.float32) for n in (11, 3))
    clean, poisoned = project(w, x), project(w, x.at[1, 7].set(jnp.nan))
    assert np.isnan(poisoned[1]).all()
    assert_same_bits(poisoned[::2], clean[::2])
