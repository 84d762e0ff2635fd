"""Borders between stages of a computation, so that every program computes a stage in the same way."""

import jax
from jax.experimental.layout import Layout, with_layout_constraint

__all__ = ["fence"]


def fence[Tree](tree: Tree) -> Tree:
    """The same arrays, materialised and stored row-major: compiler stages on either side are not mixed.

    A value is only as reproducible as the code generated for it. XLA fuses a stage with its neighbours, and lays out
    intermediate arrays, as the program around it suggests: a loop over tokens keeps S transposed, say, and a sum over K
    then runs in another order than in a single step. Between fences a stage has the same inputs, in the same layout,
    in every program, and so gives the same bits.
    """
    tree = jax.lax.optimization_barrier(tree)
    return jax.tree.map(lambda leaf: with_layout_constraint(leaf, Layout(tuple(range(leaf.ndim)))), tree)
