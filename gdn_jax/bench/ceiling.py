"""What the memory can do: the rate of reading, and of copying, by kernels that do nothing else."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from gdn_jax import ops
from gdn_jax.bench import operands
from gdn_jax.bench.request import Request
from gdn_jax.bench.rows import Row
from gdn_jax.bench.timing import Effort, Step, Timing, kernels_for, measure

__all__ = ["read_ceiling", "run"]

_LAYERS = 2
# So large that a launch and the way up to speed, some microseconds, are lost in half a millisecond.
_WORDS = 2**29
_UNLIKELY = 1_234_567_891


class Form(NamedTuple):
    """One way to cut a stream into programs; see `ops.bandwidth_read`."""

    block: int
    depth: int
    warps: int
    per_core: int | None
    """Programs per multiprocessor; None: one program for each block."""

    def options(self) -> dict[str, Any]:
        """The arguments that this form stands for, on the device here."""
        # The attribute is the plugin's own; without it the number of an H200 does as well as any.
        cores = getattr(jax.devices()[0], "core_count", None) or 132
        programs = self.per_core and self.per_core * cores
        return {"block": self.block, "depth": self.depth, "warps": self.warps, "programs": programs}


# What 16 bytes per lane and load leave open: loads in flight per lane, and who takes the next block. A lane has
# block / (128 · warps) loads of a block.
_FORMS = (
    Form(4096, 1, 8, 4),
    Form(4096, 1, 8, 6),
    Form(4096, 1, 8, 16),
    Form(4096, 1, 8, 64),
    Form(4096, 1, 8, None),
    Form(1024, 4, 8, 8),
    Form(1024, 8, 8, 6),
    Form(2048, 4, 4, 8),
    Form(16384, 1, 8, None),
)
_TINY_FORMS = (Form(256, 1, 1, None), Form(128, 3, 1, 2))


def read_ceiling(effort: Effort) -> tuple[float | None, list[Row]]:
    """The best rate of reading in bytes per second, and a row for every form; None if a gate or the clock failed."""
    rows = list(_read(_stack(effort), dataclasses.replace(effort, seconds=0.0, rounds=min(effort.rounds, 5))))
    return _best(rows), rows


def run(request: Request) -> Iterator[Row]:
    """A row for every form of copying. Reading is measured by `read_ceiling` in every run, this one included."""
    yield from _copy(_stack(request.effort), request.effort)


def _best(rows: Sequence[Row]) -> float | None:
    rates = [row.bandwidth for row in rows if row.bandwidth and row.passed]
    return max(rates, default=None)


def _stack(effort: Effort) -> jax.Array:
    words = _WORDS if effort.rotate else 4096
    return lax.bitcast_convert_type(jax.random.bits(operands.key(0), (_LAYERS, words), jnp.uint32), jnp.int32)


def _interpret() -> bool:
    return jax.default_backend() == "cpu"


def _forms() -> tuple[Form, ...]:
    return _TINY_FORMS if _interpret() else _FORMS


def _read(stack: jax.Array, effort: Effort) -> Iterator[Row]:
    functions: dict[Form | None, Callable] = {form: _reader(form) for form in _forms()}
    functions[None] = lambda stack, layer: jnp.sum(stack[layer])[None]  # what XLA makes of it
    nbytes = stack[0].nbytes

    def advance(function):
        def step(shift, layer, stack):
            sums = function(stack, layer + shift)
            return jnp.where(lax.optimization_barrier(sums)[0] == _UNLIKELY, jnp.int32(1), jnp.int32(0))

        return Step(step, stack)

    # Not a sum of the whole stack: XLA would have to give the function under test its own kernel.
    wrong = {}
    for form, function in functions.items():
        layers = [jnp.int32(layer) for layer in range(_LAYERS)]
        sums = [(jnp.sum(jax.jit(function)(stack, layer)), jnp.sum(stack[layer])) for layer in layers]
        wrong[form] = 0.0 if all(int(got) == int(want) for got, want in sums) else float("inf")
    steps = {form: advance(function) for form, function in functions.items() if wrong[form] == 0}
    glue = Step(lambda shift, layer, _: jnp.where(layer + shift == _UNLIKELY, jnp.int32(1), jnp.int32(0)))
    yield from _rows("read", steps, glue, jnp.int32(0), nbytes, wrong, effort)


def _reader(form: Form):
    options, interpret = form.options(), _interpret()
    return lambda stack, layer: ops.bandwidth_read(stack, layer[None], **options, interpret=interpret)


def _copy(stack: jax.Array, effort: Effort) -> Iterator[Row]:
    nbytes = 2 * stack[0].nbytes

    def copier(form):
        options, interpret = form.options(), _interpret()

        def step(stack, layer, _):
            route = jnp.stack([layer, (layer + 1) % _LAYERS])
            return ops.bandwidth_copy(stack, route, **options, interpret=interpret)

        return step

    steps, wrong = {}, {}
    for form in _forms():
        steps[form] = Step(copier(form))
        stack = stack.at[1, ::1024].add(1)  # so that there is something to copy
        copied = jax.jit(steps[form].advance)(stack, jnp.int32(0), ())
        same = jnp.array_equal(copied[1], stack[0]) & jnp.array_equal(copied[0], stack[0])
        wrong[form] = 0.0 if bool(same) else float("inf")
        del copied
    right = {form: step for form, step in steps.items() if wrong[form] == 0}
    yield from _rows("copy", right, Step(lambda stack, *_: stack), stack, nbytes, wrong, effort)


def _rows(case, steps, glue, carry, nbytes, wrong, effort) -> Iterator[Row]:
    """Time `steps`, by form, and make a row of every form in `wrong`, the gate's findings."""
    kernels = kernels_for(nbytes, effort)
    samples = measure({"glue": glue, **steps}, carry, layers=_LAYERS, kernels=kernels, effort=effort)
    for form, error in wrong.items():
        timing = Timing.between(samples[form], samples["glue"], kernels) if form in samples else None
        yield Row(
            subject="ceiling",
            case=case if form is None else f"{case} {form.depth}x{form.block} w{form.warps} p{form.per_core or '-'}",
            batch=1,
            implementation="xla" if form is None else ("interpret" if _interpret() else "triton"),
            precision="int32",
            nbytes=nbytes,
            max_rel=error,
            bound=0.0,
            timing=timing,
            note="" if timing else "wrong sum" if case == "read" else "wrong copy",
            details={} if form is None else form.options(),
        )
