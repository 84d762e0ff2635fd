"""A self-check to ask for at start-up: do the kernels compute on this device what plain XLA does?

Each operation is run once on small operands, by the kernel that would be chosen for it (where none would be, as on a
CPU, by the same body interpreted), and held to XLA's results from the same operands. Seconds, most of them compilation.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gdn_jax import ops
from gdn_jax.axes import Array
from gdn_jax.config import GdnConfig
from gdn_jax.q4 import Q4Tensor
from gdn_jax.stages import advance
from gdn_jax.weights import abstract

__all__ = ["BOUND", "Check", "self_check"]

BOUND = 5e-6
"""Of max_rel. Float32 summed in two orders differs by less, anything wrong by far more. Measured on a CPU: 2.0e-7."""

_CFG = GdnConfig(hidden=64, key_heads=2, value_heads=4, key_dim=16, value_dim=32, conv_width=4)
_PRODUCT = (16, 1024)
"""Rows and columns that every form of the product takes."""
_LAYERS, _LAYER = 2, 1


class Check(NamedTuple):
    """What one operation came to."""

    operation: str
    implementation: str
    error: float
    """The largest difference from XLA over the largest value, the worst of all results."""
    note: str = ""
    """What the kernel was stopped by, if it was."""

    @property
    def passed(self) -> bool:
        """Whether it agrees with XLA."""
        return self.error <= BOUND

    def __str__(self) -> str:
        verdict = "agrees" if self.passed else "DISAGREES"
        note = f": {self.note}" if self.note else ""
        return f"{self.operation}: {self.implementation} {verdict} with xla (max_rel {self.error:.1e}){note}"

    def as_json(self) -> dict[str, Any]:
        """Its fields and `passed`; JSON has no NaN and no infinity, which appear as strings."""
        error = self.error if math.isfinite(self.error) else str(self.error)
        return {**self._asdict(), "error": error, "passed": self.passed}


def self_check(implementation: str | None = None) -> tuple[Check, ...]:
    """Compare the kernels with XLA on the default device: two products, a layer's input half and its delta rule.

    `implementation` names the kernels instead of those that would be chosen. What disagrees has `passed` False.

    Raises:
        ValueError: an unknown implementation, or "xla", which is what the others are compared with.
        UnsupportedError: a named implementation that cannot carry out one of the operations here.
    """
    if implementation == "xla":
        raise ValueError("implementation='xla' is what kernels are compared with; name a kernel, or None")
    ops.check_implementation(implementation)
    return (*_products(implementation), *_layer(implementation))


def _products(implementation: str | None) -> Iterator[Check]:
    """One row and two: from two on, another form may be chosen."""
    rows, columns = _PRODUCT
    shape = jax.ShapeDtypeStruct
    codes, scales = shape((_LAYERS, rows, columns // 8), jnp.uint32), shape((_LAYERS, rows, columns // 32), jnp.float16)
    w = _filled(Q4Tensor(codes, scales))  # pyright: ignore[reportArgumentType]
    for batch in (1, 2):
        x = _filled(shape((batch, columns), jnp.float32))
        name = _kernel(ops.choose_product([w], x.shape, "exact", implementation))

        def product(implementation, x=x):
            return ops.project(w, x, layer=jnp.int32(_LAYER), implementation=implementation)

        want = _run(functools.partial(product, "xla"))
        yield _check(f"project, batch {batch}", name, functools.partial(product, name), want)


def _layer(implementation: str | None) -> Iterator[Check]:
    w = _filled(abstract(_CFG, layers=_LAYERS, tier="q4"))
    large: Any = w.large
    heads = (_CFG.value_heads, _CFG.key_dim, _CFG.value_dim)
    history_shape = (_CFG.conv_width - 1, _CFG.conv_channels)
    shapes = ((1, _CFG.hidden), (_LAYERS, 1, *heads), (_LAYERS, 1, *history_shape))
    x, s, history = _filled([jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes])
    layer = jnp.int32(_LAYER)

    def reference():
        one, s_before, history_before = jax.tree.map(lambda leaf: leaf[_LAYER], (w, s, history))
        return advance(one, s_before, history_before, x, _CFG, "exact")

    want = _run(reference)

    name = _kernel(ops.choose_layer_input(large.qkv, large.z, 1, "exact", implementation))
    options = {"active": None, "precision": "exact", "keep": False, "interpret": name == "interpret"}

    def input_half():
        made = ops.layer_input(w, layer, history, layer, x, **options)
        return made.xcv, made.z.reshape(want.z.shape), made.beta, made.g, made.history[_LAYER]

    yield _check("layer_input", name, input_half, (want.xcv, want.z, want.beta, want.g, want.history))

    name = _kernel(ops.choose_delta_layer(s, implementation))
    options = {"active": None, "limbs": 0, "keep": False, "interpret": name == "interpret"}

    def delta_layer():
        operands = (want.xcv, want.z, want.beta, want.g, w.norm, layer)
        sizes = {"key_heads": _CFG.key_heads, "norm_eps": _CFG.norm_eps}
        done = ops.delta_layer(s, layer, *operands, **sizes, **options)
        return done.onn, done.state[_LAYER]

    yield _check("delta_layer", name, delta_layer, (want.onn, want.s))


def _kernel(choice: ops.Choice) -> str:
    """Never XLA itself, which would agree."""
    return "interpret" if choice.implementation == "xla" else choice.implementation


def _check(operation: str, name: str, run: Callable[[], Any], want: Any) -> Check:
    try:
        got = _run(run)
    except (NotImplementedError, RuntimeError) as error:  # also what compilers and drivers raise
        return Check(operation, name, float("inf"), f"{type(error).__name__}: {error}".splitlines()[0])
    errors = jax.tree.map(_max_rel, got, want)
    return Check(operation, name, float(jnp.max(jnp.stack(jax.tree.leaves(errors)))))


def _run(function: Callable[[], Any]) -> Any:
    # On a CPU most of the time would go into compiling well what runs once.
    options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    return jax.block_until_ready(jax.jit(function, compiler_options=options)())


def _max_rel(got: Array, want: Array) -> Array:
    """Infinite where `got` is not finite throughout: a maximum need not pass on a NaN."""
    relative = jnp.max(jnp.abs(got - want)) / jnp.max(jnp.abs(want))
    return jnp.where(jnp.isfinite(got).all(), relative, jnp.float32(jnp.inf))


def _filled(shapes: Any) -> Any:
    """Random codes, scales of about a tenth, and normal floats, in place of the shapes of arrays."""
    generator = np.random.default_rng(0)

    def fill(leaf):
        if leaf.dtype == jnp.uint32:
            return jnp.asarray(generator.integers(2**32, size=leaf.shape, dtype=np.uint32))
        values = generator.standard_normal(leaf.shape)
        return jnp.asarray(values / 10 if leaf.dtype == jnp.float16 else values, leaf.dtype)

    return jax.tree.map(fill, shapes)
