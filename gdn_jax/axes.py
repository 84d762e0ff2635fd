"""The glossary: one letter per axis, one alias per kind of array.

| letter | axis |
|---|---|
| B | batch rows (sequences) |
| T | time (tokens) |
| D | hidden size of the model |
| G | key heads |
| H | value heads |
| R | value heads per key head, H / G |
| K | key head dimension |
| V | value head dimension |
| W | width of the causal convolution |
| P | past frames in the convolution history, W - 1 |
| C | convolution channels, 2·G·K + H·V |
| L | GDN layers in a stack |
| I, O | input and output columns of a projection |
| N | rows of a 4-bit matrix |

Shapes in docstrings are written with these letters, outermost axis first.
"""

from typing import TYPE_CHECKING, Any

import jax
from jaxtyping import Array, BFloat16, Bool, Float32, Int8, Int32

__all__ = ["Active", "Array", "BFloat16", "Bool", "Float32", "Int8", "Int32", "Leaf"]

# Transformations rebuild pytrees with tracers, shapes, None or plain objects as leaves, so a run-time check of a
# pytree field would reject legitimate values. Static checkers still see arrays.
if TYPE_CHECKING:
    Leaf = jax.Array
else:
    Leaf = Any

Active = Bool[Array, "B"]
