"""The harness: seconds per kernel, inside one compiled program, with everything that is not the kernel taken off.

A call from the host costs some hundred microseconds, a kernel a few. So a program runs many kernels in a `lax.scan`,
each depending on the one before through the carry, and each on the next layer of its operands, so that nothing is still
in cache when its turn comes round. A second program is the same loop without the kernel, the glue; what is reported is
the difference. The programs of one case take turns, since a card's clocks drift: a difference is one of neighbours.
"""

import concurrent.futures
import dataclasses
import functools
import math
import operator
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

__all__ = ["Effort", "Step", "Timing", "kernels_for", "layers_for", "measure", "program", "sample", "touch"]

ROTATE = 512_000_000
"""Bytes to rotate through: four times the largest last-level cache that a GPU has today (126 MB)."""

_PROGRAM_SECONDS = 0.02
# Only to choose how many kernels a program runs, so that it lasts about that long.
_EXPECTED_BANDWIDTH = 3e12
_EXPECTED_LAUNCH = 5e-6
_MOST_KERNELS = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class Effort:
    """How hard to measure one case.

    `kernels`: at least so many in one program. `unroll`: kernels in one turn of its loop. `warm`: seconds of running
    before the first sample, so that clocks have risen. `seconds`, `rounds`: samples are taken for that long, and at
    least so many. `rotate`: bytes that the layers of an operand have together. `options`: XLA's, for what is timed.
    """

    kernels: int = 128
    unroll: int = 8
    warm: float = 0.25
    seconds: float = 1.0
    rounds: int = 9
    rotate: int = ROTATE
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def here(cls, seconds: float | None = None) -> "Effort":
        """What suits the default backend: on a CPU just enough to run every line."""
        if jax.default_backend() == "cpu":
            options = {"xla_backend_optimization_level": 0}  # what runs six times need not be compiled well
            return cls(kernels=2, unroll=1, warm=0.0, seconds=seconds or 0.0, rounds=3, rotate=0, options=options)
        return cls() if seconds is None else cls(seconds=seconds)


class Step(NamedTuple):
    """One turn of a loop: `advance(carry, layer, operands) -> carry` launches the kernel on an int32 scalar layer.

    What the kernel returns must reach the carry (`touch` does it for a float), or the compiler may drop the kernel.
    """

    advance: Callable[[Any, jax.Array, Any], Any]
    operands: Any = ()


class Timing(NamedTuple):
    """Microseconds per kernel: median and 10th and 90th percentile over `rounds` samples of `kernels` kernels each."""

    us: float
    us_p10: float
    us_p90: float
    us_with_glue: float
    """Median before the loop's own cost was taken off."""
    kernels: int
    rounds: int

    @classmethod
    def between(cls, seconds: np.ndarray, glue: np.ndarray, kernels: int) -> "Timing":
        """From seconds per kernel, round by round, of a loop with the kernel and of one without."""
        low, median, high = np.percentile((seconds - glue) * 1e6, (10, 50, 90))
        return cls(float(median), float(low), float(high), float(np.median(seconds) * 1e6), kernels, len(seconds))


def touch(x: jax.Array, *results: jax.Array) -> jax.Array:
    """x made to depend on results of any shape, in one small launch: it changes by 10^-30 of them, which is nothing.

    The results are materialised first: of an array that is only looked at in one place, a compiler computes one place.
    """
    looked_at = [result[(0,) * result.ndim].astype(jnp.float32) for result in lax.optimization_barrier(results)]
    return x + jnp.float32(1e-30) * functools.reduce(operator.add, looked_at)


def layers_for(nbytes: int, effort: Effort) -> int:
    """How many layers of `nbytes` to rotate through; two at least."""
    return max(2, math.ceil(effort.rotate / nbytes))


def kernels_for(nbytes: int, effort: Effort) -> int:
    """How many kernels that move `nbytes` one program should run: a multiple of `unroll`."""
    likely = _PROGRAM_SECONDS / (nbytes / _EXPECTED_BANDWIDTH + _EXPECTED_LAUNCH)
    wanted = effort.kernels if effort.rotate == 0 else min(max(effort.kernels, int(likely)), _MOST_KERNELS)
    return math.ceil(wanted / effort.unroll) * effort.unroll


def measure[Name](
    steps: Mapping[Name, Step],
    carry: Any,
    *,
    layers: int,
    kernels: int,
    effort: Effort,
) -> dict[Name, np.ndarray]:
    """Seconds per kernel of each step, one sample per round, with the loop's own cost.

    All steps share one carry, which every program takes over from the one before and which is donated: the caller's is
    gone afterwards.
    """
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:  # compiling takes longer than measuring

        def compiled(step):
            return program(step, layers, kernels, effort).lower(carry, step.operands).compile()

        programs = dict(zip(steps, pool.map(compiled, steps.values()), strict=True))
    runs = {name: functools.partial(_with_operands, run, steps[name].operands) for name, run in programs.items()}
    return {name: taken / kernels for name, taken in sample(runs, carry, effort).items()}


def _with_operands(run: Callable[[Any, Any], Any], operands: Any, carry: Any) -> Any:
    return run(carry, operands)


def sample[Name](runs: Mapping[Name, Callable[[Any], Any]], carry: Any, effort: Effort) -> dict[Name, np.ndarray]:
    """Seconds of each run, carry -> carry, one sample per round; each takes over the carry from the one before."""
    samples = {name: [] for name in runs}

    def one_round(carry, keep):
        for name, run in runs.items():
            begin = time.perf_counter()
            carry = jax.block_until_ready(run(carry))
            if keep:
                samples[name].append(time.perf_counter() - begin)
        return carry

    carry = one_round(carry, keep=False)
    warm_until = time.perf_counter() + effort.warm
    while time.perf_counter() < warm_until:
        carry = one_round(carry, keep=False)
    until, rounds = time.perf_counter() + effort.seconds, 0
    while rounds < effort.rounds or time.perf_counter() < until:
        carry, rounds = one_round(carry, keep=True), rounds + 1
    return {name: np.array(taken) for name, taken in samples.items()}


def program(step: Step, layers: int, kernels: int, effort: Effort) -> Any:
    """The jitted loop over `kernels` turns of a step: (carry, operands) -> carry, the first donated."""

    def run(carry, operands):
        def turn(state, _):
            for _ in range(effort.unroll):
                carry, layer = state
                carry = step.advance(carry, layer, operands)
                # The barrier keeps neighbouring launches apart, above all where there is nothing in them but glue.
                state = lax.optimization_barrier((carry, (layer + 1) % layers))
            return state, None

        (carry, _), _ = lax.scan(turn, (carry, jnp.int32(0)), None, length=kernels // effort.unroll)
        return carry

    return jax.jit(run, donate_argnums=0, compiler_options=dict(effort.options))
