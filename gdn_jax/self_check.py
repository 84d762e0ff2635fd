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
from gdn_jax.decoder.attention import Cache, attention_step
from gdn_jax.decoder.config import DecoderConfig
from gdn_jax.decoder.weights import abstract_decoder
from gdn_jax.q4 import Q4Tensor
from gdn_jax.stages import advance
from gdn_jax.state import state_shapes
from gdn_jax.weights import GdnStack, abstract
from gdn_jax.window import look, new_window, take

__all__ = ["BOUND", "Check", "self_check"]

BOUND = 5e-6
"""Of max_rel. Float32 summed in two orders differs by less, anything wrong by far more. Measured on a CPU: 2.0e-7."""

_CFG = GdnConfig(hidden=64, key_heads=2, value_heads=4, key_dim=16, value_dim=32, conv_width=4)
_PRODUCT = (64, 512)
"""Rows and columns that every form of the product takes."""
_BATCHES = (1, 2, 4, 8)
"""Rows of x: each has a form of its own on tensor cores, or is dot products."""
_PROMPT = 24
"""Rows of x that are many."""
_CHUNKS = (65, 1, 1, 2, 64, 64)
"""T, B, G, H, K and V that every form of the chunked delta rule takes."""
_WINDOW = 3
"""Tokens."""
_ATTENTION = DecoderConfig(
    vocab=32,
    hidden=64,
    layer_types=("full_attention",) * 2,
    mlp_types=("dense",) * 2,
    heads=4,
    kv_heads=2,
    head_dim=32,
    rotary_dim=16,
    rope_theta=1e4,
    norm_eps=1e-6,
    tied=True,
    ffn=32,
)
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
    """Compare the kernels with XLA on the default device: every operation that has some, also of prompts and windows.

    `implementation` names the kernels instead of those that would be chosen. What disagrees has `passed` False.

    Raises:
        ValueError: an unknown implementation, or "xla", which is what the others are compared with.
        UnsupportedError: a named implementation that cannot carry out one of the operations here.
    """
    if implementation == "xla":
        raise ValueError("implementation='xla' is what kernels are compared with; name a kernel, or None")
    ops.check_implementation(implementation)
    parts = (_products, _layer, _chunks, _window, _attention)
    return tuple(check for part in parts for check in part(implementation))


def _products(implementation: str | None) -> Iterator[Check]:
    rows, columns = _PRODUCT
    shape = jax.ShapeDtypeStruct
    codes, scales = shape((_LAYERS, rows, columns // 8), jnp.uint32), shape((_LAYERS, rows, columns // 32), jnp.float16)
    w = _filled(Q4Tensor(codes, scales))  # pyright: ignore[reportArgumentType]
    for batch in _BATCHES:
        [x] = _normal((batch, columns))
        name = _kernel(ops.choose_product([w], x.shape, "exact", implementation))

        def product(implementation, x=x):
            return ops.project(w, x, layer=jnp.int32(_LAYER), implementation=implementation)

        yield _compared(f"project, batch {batch}", name, implementation, product)

    [x] = _normal((_PROMPT, columns))
    name = _kernel(ops.choose_rows([w], _PROMPT, "exact", implementation))

    def rows_of_prompt(implementation):
        return ops.project_rows([w], x, layer=jnp.int32(_LAYER), precision="exact", implementation=implementation)

    yield _compared("project_rows", name, implementation, rows_of_prompt)


def _layer(implementation: str | None) -> Iterator[Check]:
    w = _filled(abstract(_CFG, layers=_LAYERS, tier="q4"))
    large: Any = w.large
    [x] = _normal((1, _CFG.hidden))
    state = _filled(state_shapes(_CFG, layers=_LAYERS, batch=1))
    s, history, layer = state.S, state.conv_hist, jnp.int32(_LAYER)

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


def _chunks(implementation: str | None) -> Iterator[Check]:
    tokens, batch, key_heads, heads, key_dim, value_dim = _CHUNKS
    many = tokens, batch
    shapes = ((batch, heads, key_dim, value_dim), *((*many, key_heads, key_dim),) * 2, (*many, heads, value_dim))
    s, q, k, v, beta, g = _normal(*shapes, *((*many, heads),) * 2)
    q, k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    operands = (s, q, k, v, jax.nn.sigmoid(beta), -jax.nn.softplus(g))
    name = _kernel(ops.choose_delta_chunks(v, key_heads, key_dim, "exact", implementation))

    def chunks(implementation):
        return ops.delta_chunks(*operands, precision="exact", implementation=implementation)

    yield _compared("delta_chunks", name, implementation, chunks)


def _window(implementation: str | None) -> Iterator[Check]:
    """Looking at tokens, and taking some of them."""
    stack = GdnStack(_filled(abstract(_CFG, layers=_LAYERS, tier="q4")))
    [x] = _normal((_WINDOW, _CFG.hidden))
    state, layer = _filled(state_shapes(_CFG, layers=_LAYERS, batch=1)), jnp.int32(_LAYER)
    empty = new_window(_CFG, layers=_LAYERS, tokens=_WINDOW, batch=1)
    name = _kernel(ops.choose_delta_window(state.S, _WINDOW, implementation))

    def window(implementation):
        y, filled = look(stack, state, empty, x, _CFG, layer, jnp.array([_WINDOW]), "exact", implementation)
        return y, take(stack, state, filled, jnp.array([_WINDOW - 1]), _CFG, implementation)

    yield _compared("delta_window", name, implementation, window)


def _attention(implementation: str | None) -> Iterator[Check]:
    """One token more for a cache of 64 slots that are all taken but one."""
    cfg, slots = _ATTENTION, 64
    w = _filled(abstract_decoder(cfg, tier="q4").attention)
    cache_shape = (_LAYERS, 1, slots, cfg.kv_heads, cfg.head_dim)
    x, keys, values = _normal((1, cfg.hidden), cache_shape, cache_shape)
    name = _kernel(ops.choose_attend(keys, cfg.heads, implementation))

    def attention(implementation):
        return attention_step(
            *(w, Cache(keys, values), x, jnp.array([slots - 1]), jnp.array([True])),
            cfg=cfg,
            layer=jnp.int32(_LAYER),
            precision="exact",
            implementation=implementation,
        )

    yield _compared("attend", name, implementation, attention)


def _compared(operation: str, name: str, implementation: str | None, run: Callable[[str | None], Any]) -> Check:
    """`run` as it is asked for, which chooses the kernel of that name, and by XLA.

    Asked for by that name, other parts of the same layer would have to have such a kernel, too.
    """
    given = name if name == "interpret" else implementation
    return _check(operation, name, functools.partial(run, given), _run(functools.partial(run, "xla")))


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


def _normal(*shapes: tuple[int, ...]) -> list[Array]:
    return _filled([jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes])


def _filled(shapes: Any) -> Any:
    """Random codes, scales of about a tenth, and normal floats, in place of the shapes of arrays."""
    generator = np.random.default_rng(0)

    def fill(leaf):
        if leaf.dtype == jnp.uint32:
            return jnp.asarray(generator.integers(2**32, size=leaf.shape, dtype=np.uint32))
        values = generator.standard_normal(leaf.shape)
        return jnp.asarray(values / 10 if leaf.dtype == jnp.float16 else values, leaf.dtype)

    return jax.tree.map(fill, shapes)
