"""Products of two computed arrays, summed in float32: of the operands as they are, or rounded to bfloat16."""

import jax.numpy as jnp
from jax import lax

from gdn_jax.axes import Array

__all__ = ["einsum"]


def einsum(subscripts: str, a: Array, b: Array, *, precision: str = "exact") -> Array:
    """`jnp.einsum` of two operands, float32.

    "bf16" rounds both to bfloat16; their products are exact in float32 and summed there. Every other precision
    multiplies in float32 on every device, where the default would be TF32 on a GPU.
    """
    if precision == "bf16":
        a, b = (x.astype(jnp.bfloat16) for x in (a, b))
    return jnp.einsum(subscripts, a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
