"""What a request was carried out by, read off the traced program: what a row says and what runs are one thing."""

from typing import Any

import jax
import jax.numpy as jnp

from gdn_jax.bench.timing import Step

__all__ = ["implementation_of"]

# How calls of kernels appear in a traced program.
_KERNELS = {"mosaic": ("mpmd_map[", "core_map["), "triton": ("pallas_call[",)}


def implementation_of(step: Step, carry: Any) -> str:
    """The kinds of kernels that a step calls, "mosaic+triton" if both, interpret if it interprets them; or xla."""
    text = str(jax.make_jaxpr(step.advance)(carry, jnp.int32(0), step.operands))
    if "interpret=True" in text:
        return "interpret"
    return "+".join(name for name, calls in _KERNELS.items() if any(call in text for call in calls)) or "xla"
