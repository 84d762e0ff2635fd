"""One case of the chunked delta rule: its operands, its gate and its time, for whatever carries it out.

Unlike weights, the operands do not rotate through more memory than the caches hold: a layer has just written them.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gdn_jax import delta
from gdn_jax.bench import gate, operands
from gdn_jax.bench.naming import implementation_of
from gdn_jax.bench.timing import Effort, Step, Timing, program, sample, touch

__all__ = [
    "Exact",
    "Form",
    "Programs",
    "Sequences",
    "compiled",
    "errors",
    "exact",
    "flop",
    "moved",
    "operands_of",
    "passes",
    "serially",
    "step_of",
    "timed",
]

type Results = tuple[jax.Array, ...]
type Operands = tuple[jax.Array, ...]
"""S [B, H, K, V]; q and k [T, B, G, K], v [T, B, H, V], beta and g [T, B, H]; with gradients also those of o and S."""

_DTYPES = {"exact": jnp.float32, "bf16": jnp.bfloat16}
"""Precision -> type of q, k, v and of the gradient of o; all else is float32."""
_TOKENS_IN_OPERANDS = slice(1, 7)
"""Those with an axis of tokens: all but S and its gradient."""
_BLOCK = 128
"""Tokens from one S to the next that the exact gradients keep."""
_ORACLE_TOKENS = 64
_ORACLE_BOUND = 1e-12
# Only to choose how many times a program runs the rule, so that it lasts about that long.
_PROGRAM_SECONDS = 0.02
_CHUNK_SECONDS = 3e-6
_XLA_CHUNK_SECONDS = 60e-6
_BACKWARD_CHUNK_SECONDS = 120e-6


class Sequences(NamedTuple):
    """`batch` sequences of so many tokens; `backward`: with the gradients of all operands."""

    batch: int
    tokens: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    backward: bool = False

    def __str__(self):
        sizes = f"{self.tokens} tokens, {self.value_heads} heads {self.key_dim}x{self.value_dim}"
        return f"{sizes}, forward and backward" if self.backward else sizes

    @property
    def gate(self) -> str:
        """The subject of `gate.BOUNDS`."""
        return "chunk backward" if self.backward else "chunk"

    @property
    def chunks(self) -> int:
        """Chunks of a sequence, which follow one another."""
        return -(-self.tokens // delta.CHUNK)


@functools.partial(jax.jit, static_argnames=("case", "precision"))
def operands_of(case: Sequences, precision: str) -> Operands:
    """As a layer makes them: q and k normalised, q also scaled; some heads forget at once, others hold on.

    S is as if tokens had gone before.
    """
    keys = iter(jax.random.split(operands.key(1), 8))
    lead, heads, dtype = (case.tokens, case.batch), case.value_heads, _DTYPES[precision]

    def normal(*shape):
        return jax.random.normal(next(keys), shape)

    def uniform(low, high):
        return jax.random.uniform(next(keys), (1, 1, heads), jnp.float32, low, high)

    def unit():
        x = normal(*lead, case.key_heads, case.key_dim)
        return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True))

    s = normal(case.batch, heads, case.key_dim, case.value_dim) / 4
    q, k, v = unit() * jnp.float32(case.key_dim**-0.5), unit(), normal(*lead, heads, case.value_dim)
    beta = jax.nn.sigmoid(normal(*lead, heads))
    g = -jnp.exp(uniform(-4.6, 2.8)) * jax.nn.softplus(normal(*lead, heads) + uniform(-7.0, 1.0))
    given = s, q.astype(dtype), k.astype(dtype), v.astype(dtype), beta, g
    if not case.backward:
        return given
    of_o, of_s = jax.random.split(operands.key(2))
    return *given, jax.random.normal(of_o, v.shape).astype(dtype), jax.random.normal(of_s, s.shape)


def passes(rule: Callable[..., Results], case: Sequences) -> Callable[..., Results]:
    """The rule; or for a case with gradients both passes: o and S, then the gradients of S, q, k, v, beta and g."""

    def both(*inputs):
        *given, do, ds = inputs
        (o, s), pull = jax.vjp(rule, *given)
        return o, s, *pull((do.astype(o.dtype), ds))

    return both if case.backward else rule


def moved(programs: "Programs") -> int:
    """Bytes that must move: S read and written, the operands read, o written; and each gradient once."""
    inputs = programs.form.inputs
    return operands.nbytes((inputs, jax.eval_shape(programs.form.rule, *inputs)))


def flop(case: Sequences) -> int:
    """Multiplications and additions of the chunked form's matrix products, with chunks of c = 64 tokens.

    Per token and value head 6KV for what goes through S (Sᵀk, Sᵀq and k uᵀ) and 4cV within the chunk (the triangular
    inverse and the scores, applied); per key head 4cK for k·k and q·k. The inverse itself is not counted. The backward
    pass has twice as much, two products for every one; what it computes again is not counted.
    """
    chunk, key_dim, value_dim = delta.CHUNK, case.key_dim, case.value_dim
    per_value_head = 6 * key_dim * value_dim + 4 * chunk * value_dim
    per_token = case.value_heads * per_value_head + case.key_heads * 4 * chunk * key_dim
    return (3 if case.backward else 1) * case.batch * case.tokens * per_token


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """Something that carries out a case: `rule(*inputs)`, as `passes` has it, of `Operands` as it wants them."""

    rule: Callable[..., Results]
    inputs: Any
    """Arrays, or shapes that stand for them."""
    batch_first: bool = False
    """Whether all with an axis of tokens have the axes [B, T, …]."""

    @classmethod
    def with_batch_first(cls, rule: Callable[..., Results], given: Operands) -> "Form":
        """Of operands as they are described above."""
        inputs = list(given)
        inputs[_TOKENS_IN_OPERANDS] = _with_axes_exchanged(inputs[_TOKENS_IN_OPERANDS])
        return cls(rule=rule, inputs=tuple(inputs), batch_first=True)

    def results(self) -> Callable[..., Results]:
        """The rule, with results that have the axes [T, B, …]."""

        def run(*inputs):
            o, s, *gradients = self.rule(*inputs)
            if self.batch_first:
                o, *gradients[1:] = _with_axes_exchanged((o, *gradients[1:]))
            return o, s, *gradients

        return run


def _with_axes_exchanged(arrays: Iterable[jax.Array]) -> list[jax.Array]:
    return [jnp.moveaxis(x, 0, 1) for x in arrays]


class Programs(NamedTuple):
    """A form, compiled: once for the gate, and in a loop `kernels` times with and without what is timed."""

    form: Form
    once: Any
    loop: Any
    glue: Any
    kernels: int
    used: str
    """The implementation, as the traced program shows it."""


def compiled(form: Form, case: Sequences, effort: Effort) -> Programs:
    """What `errors` and `timed` will run."""
    s, rest = form.inputs[0], form.inputs[1:]
    step, glue = step_of(form), Step(lambda s, *_: touch(s, s))
    used = implementation_of(step, s)
    kernels, singly = _kernels(case, used, effort), dataclasses.replace(effort, unroll=1)
    once = jax.jit(form.results(), compiler_options=dict(effort.options)).lower(*form.inputs).compile()
    loop = program(step, 1, kernels, singly).lower(s, rest).compile()
    return Programs(form, once, loop, program(glue, 1, kernels, singly).lower(s, ()).compile(), kernels, used)


def step_of(form: Form) -> Step:
    """The rule on the S that the turn before has left."""

    def advance(s, _, rest):
        o, s, *gradients = form.rule(*_opaque(s, *rest))
        return touch(*_opaque(s), o, *gradients)

    return Step(advance, form.inputs[1:])


def _opaque(*arrays: jax.Array) -> Operands:
    """The same arrays, laid out in memory as a caller has them, and new in every turn.

    Else the compiler would do before the loop what does not depend on S, and carry what the loop hands on in whatever
    layout the rule likes best. Flat, there is only one.
    """
    flat = lax.optimization_barrier(tuple(x.reshape(-1) for x in arrays))
    return tuple(x.reshape(array.shape) for x, array in zip(flat, arrays, strict=True))


def _kernels(case: Sequences, used: str, effort: Effort) -> int:
    if effort.rotate == 0:
        return effort.kernels
    likely = _XLA_CHUNK_SECONDS if used == "xla" else _CHUNK_SECONDS
    likely += _BACKWARD_CHUNK_SECONDS if case.backward else 0
    return max(2, int(_PROGRAM_SECONDS / (case.batch * case.chunks * likely)))


class Exact(NamedTuple):
    """The serial rule in float64: o [T, B, H, V], S after the last token, and the gradients of a case that has them."""

    o: jax.Array
    s: jax.Array
    strays: float
    """max_rel of the first o, of the first and the last row, from the oracle's."""
    gradients: Results = ()


def exact(given: Operands) -> Exact:
    """Of these operands, all tokens on the device, where the oracle would take minutes; it vouches for the first."""
    with jax.enable_x64(True):
        wide = tuple(x.astype(jnp.float64) for x in given)
        (o, s), cotangents = serially(*wide[:6]), wide[6:]
        gradients = _serial_gradients(wide[:6], cotangents) if cotangents else ()
    few, rows = slice(_ORACLE_TOKENS), sorted({0, given[0].shape[0] - 1})
    before, first = np.asarray(given[0])[rows], (np.asarray(x[few].astype(jnp.float32))[:, rows] for x in given[1:6])
    expected, _ = gate.serial_delta(before, *first)
    return Exact(o, s, gate.error(np.asarray(o[few])[:, rows], expected), gradients)


@jax.jit
def serially(s, *tokens):
    """o of every token and S after the last, by the serial form; of any precision."""
    step = inspect.unwrap(delta.delta_step)  # whose annotations speak of float32, and may be enforced

    def body(s, token):
        o, s = step(s, *token)
        return s, o

    s, o = lax.scan(body, s, tokens)
    return o, s


@jax.jit
def _serial_gradients(given, cotangents):
    """By autodiff, of blocks of tokens that are each computed again: the S of every token would not fit."""

    @jax.checkpoint
    def block(s, tokens):
        o, s = serially(s, *tokens)
        return s, o

    def in_blocks(s, *tokens):
        count = len(tokens[0])
        # Tokens of zeros leave S as it is.
        padded = (jnp.pad(x, [(0, -count % _BLOCK)] + [(0, 0)] * (x.ndim - 1)) for x in tokens)
        s, o = lax.scan(block, s, tuple(x.reshape(-1, _BLOCK, *x.shape[1:]) for x in padded))
        return o.reshape(-1, *o.shape[2:])[:count], s

    return jax.vjp(in_blocks, *given)[1](cotangents)


def errors(programs: Programs, reference: Exact, precision: str) -> tuple[float, float]:
    """The worst max_rel of o, S and the gradients, and the worst of their RMS errors; `gate.chunk_errors`."""
    results = programs.once(*programs.form.inputs)
    subject = "chunk backward" if reference.gradients else "chunk"
    if not reference.strays <= _ORACLE_BOUND:
        return float("inf"), float("inf")
    with jax.enable_x64(True):
        got = tuple(x.astype(jnp.float64) for x in results)
        return gate.chunk_errors(got, (reference.o, reference.s, *reference.gradients), precision, subject)


def timed(programs: Programs, effort: Effort) -> Timing:
    """Of the rule alone; every run finds the S that the one before has left."""
    s, rest = programs.form.inputs[0], programs.form.inputs[1:]
    runs = {"glue": lambda s: programs.glue(s, ()), "rule": lambda s: programs.loop(s, rest)}
    samples = sample(runs, jnp.copy(s), effort)
    seconds = {name: taken / programs.kernels for name, taken in samples.items()}
    return Timing.between(seconds["rule"], seconds["glue"], programs.kernels)
