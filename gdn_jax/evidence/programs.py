"""The library's functions as a user would compile them: jitted once for all checks, donating the state."""

import jax

from gdn_jax import layer, taps

__all__ = ["STATIC", "scan", "step", "trace"]

STATIC = ("cfg", "precision", "implementation")

step = jax.jit(layer.step, static_argnames=STATIC, donate_argnames=("state",))
scan = jax.jit(layer.scan, static_argnames=STATIC, donate_argnames=("state",))
trace = jax.jit(taps.trace, static_argnames=STATIC, donate_argnames=("state",))
