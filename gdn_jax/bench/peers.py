"""Other implementations of the same operations, each held to float64 and rotated through as much memory as ours.

A peer says beforehand why it cannot be had here (`available`). Those in other frameworks run in processes of their own,
so that no two of them share an allocator, and answer with one line of JSON; they take launches off by CUDA graphs.
"""

import atexit
import dataclasses
import functools
import importlib.util
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gdn_jax.bench import gate, operands
from gdn_jax.bench.chunk_case import Sequences
from gdn_jax.bench.dialogue import Program
from gdn_jax.bench.rows import Row
from gdn_jax.bench.timing import Effort, Step, Timing, kernels_for, layers_for, measure, touch
from gdn_jax.q4 import GROUP

__all__ = ["PEERS", "Heads", "Peer", "Product", "begin", "rows"]

_PUBLISHED = pathlib.Path(__file__).parents[2] / "experiments" / "published_design" / "published_design.cu"
_TIMEOUT = 240.0
# Of one answer of a program that stays, which compiles and chooses among hundreds of forms for it.
_ANSWER_TIMEOUT = 60.0


class Product(NamedTuple):
    """y = W x, W [rows, columns], for `batch` rows of x."""

    rows: int
    columns: int
    batch: int

    def __str__(self):
        return f"{self.rows}x{self.columns}"


class Heads(NamedTuple):
    """One delta step of `batch` sequences."""

    batch: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    def __str__(self):
        return f"{self.value_heads} heads {self.key_dim}x{self.value_dim}"


class Outcome(NamedTuple):
    """What a peer answered: its own bytes, error and times, or in `note` why there are none."""

    nbytes: int = 0
    max_rel: float | None = None
    timing: Timing | None = None
    note: str = ""
    details: dict[str, Any] = {}  # noqa: RUF012 (never written to)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peer:
    """One implementation of a subject. `available()` is None, or the reason why it cannot be asked here."""

    name: str
    subject: str
    precision: str
    available: Callable[[], str | None]
    measure: Callable[[Any, Effort], Outcome]
    begin: Callable[[], Any] = lambda: None
    """Whatever can be done before the first case, in the background."""


def begin(subject: str) -> None:
    """Have the peers of a subject that can be asked here make a start, while there is nothing being timed."""
    for peer in PEERS:
        if peer.subject == subject and peer.available() is None:
            peer.begin()


def rows(subject: str, case: Product | Heads | Sequences, effort: Effort) -> Iterator[Row]:
    """A row for every peer of a subject, whether it could be asked or not."""
    for peer in PEERS:
        if peer.subject != subject:
            continue
        reason = peer.available()
        outcome = Outcome(note=f"not available: {reason}") if reason else _asked(peer, case, effort)
        yield Row(
            subject=subject,
            case=str(case),
            batch=case.batch,
            implementation=peer.name,
            precision=peer.precision,
            nbytes=outcome.nbytes,
            max_rel=outcome.max_rel,
            bound=_bound(peer, case),
            timing=outcome.timing,
            is_peer=True,
            note=outcome.note,
            details=outcome.details,
        )


def _asked(peer: Peer, case: Any, effort: Effort) -> Outcome:
    """A peer's answer; its failure is a line in the table, never the end of the run."""
    try:
        outcome = peer.measure(case, effort)
    except Exception as error:
        first = str(error).strip().splitlines() or [""]
        return Outcome(note=f"failed: {type(error).__name__}: {first[0][:200]}")
    if outcome.max_rel is not None and outcome.max_rel > _bound(peer, case):
        return outcome._replace(timing=None, note="not timed: wrong result")
    return outcome


def _bound(peer: Peer, case: Any) -> float:
    """Of the case's own gate, if it has one."""
    return gate.BOUNDS[getattr(case, "gate", peer.subject), peer.precision]


# ----------------------------------------------------------------------------------------------------------------------
# XLA: dots in bfloat16, summed in float32
# ----------------------------------------------------------------------------------------------------------------------


class _Weights(NamedTuple):
    """A form in which XLA holds a matrix."""

    make: Callable[[Product, jax.Array], Any]
    """A random matrix of a case, from a key."""
    nbytes: Callable[[Product], int]
    """Its bytes: those of the shapes would count 4-bit codes as bytes."""
    unpack: Callable[[Any], jax.Array]
    """The matrix as bfloat16 [I, N], inside a program …"""
    exact: Callable[[Any, np.ndarray], np.ndarray]
    """… and some columns of it as float64, on the host."""
    options: dict[str, Any]
    """What XLA is told."""


def _make_int4(case: Product, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    codes, scales = jax.random.split(key)
    groups = case.columns // GROUP
    octets = jax.random.bits(codes, (groups, GROUP, case.rows), jnp.uint8) & jnp.uint8(15)
    spread = jax.random.uniform(scales, (groups, case.rows), jnp.float32, 2 / 3, 4 / 3)
    return (octets.astype(jnp.int8) - jnp.int8(8)).astype(jnp.int4), spread.astype(jnp.bfloat16)


def _unpack_int4(w: tuple[jax.Array, jax.Array]) -> jax.Array:
    codes, scales = w
    return (codes.astype(jnp.bfloat16) * scales[:, None, :]).reshape(-1, scales.shape[-1])


def _exact_int4(w: tuple[jax.Array, jax.Array], chosen: np.ndarray) -> np.ndarray:
    codes, scales = (np.asarray(part.astype(jnp.float32)[..., chosen], np.float64) for part in w)
    return (codes * scales[:, None, :]).reshape(-1, len(chosen))


def _make_dense(case: Product, key: jax.Array) -> jax.Array:
    return jax.random.normal(key, (case.rows, case.columns), jnp.bfloat16)


_INT4 = _Weights(
    _make_int4,
    lambda case: case.rows * case.columns // 2 + 2 * case.rows * case.columns // GROUP,
    _unpack_int4,
    _exact_int4,
    # Else XLA writes out the dequantised matrix.
    {"xla_gpu_experimental_enable_subchannel_dequantisation_fusion": True},
)
_DENSE = _Weights(
    _make_dense,
    lambda case: 2 * case.rows * case.columns,
    lambda w: w.T,
    lambda w, chosen: np.asarray(w[chosen].astype(jnp.float32), np.float64).T,
    {},
)


def _xla_measure(form: _Weights, case: Product, effort: Effort) -> Outcome:
    """y = x W with W in that form.

    Every layer is an array of its own: slices of a stack would be copied before the dot, which is not the dot's doing.
    """
    one, make = form.nbytes(case), jax.jit(functools.partial(form.make, case))
    layers = layers_for(one, effort)

    def product(x, w):
        return jnp.dot(x.astype(jnp.bfloat16), form.unpack(w), preferred_element_type=jnp.float32)

    ws = [make(key) for key in jax.random.split(operands.key(1), layers)]
    x = operands.activations(2, (case.batch, case.columns))
    chosen = gate.sample(case.rows)
    y = jax.jit(product, compiler_options=form.options)(x, ws[-1])
    error = gate.product_error(np.asarray(y)[:, chosen], form.exact(ws[-1], chosen).T, np.asarray(x))
    nbytes = one + x.nbytes + 4 * case.batch * case.rows
    if error > gate.BOUNDS["gemv", "bf16"]:
        return Outcome(nbytes, error)

    def through(one_layer):
        """All layers in turn; the loop around it has no part in the rotation."""

        def advance(x, _, ws):
            for w in ws:
                x = lax.optimization_barrier(one_layer(x, w))
            return x

        return Step(advance, ws)

    steps = {"glue": through(lambda x, _: touch(x, x)), "product": through(lambda x, w: touch(x, product(x, w)))}
    rounds = max(1, kernels_for(nbytes, effort) // layers)
    effort = dataclasses.replace(effort, unroll=1, options={**effort.options, **form.options})
    samples = measure(steps, jnp.copy(x), layers=1, kernels=rounds, effort=effort)
    timing = Timing.between(samples["product"] / layers, samples["glue"] / layers, rounds * layers)
    return Outcome(nbytes, error, timing, details={"layers": layers})


# ----------------------------------------------------------------------------------------------------------------------
# Other processes
# ----------------------------------------------------------------------------------------------------------------------


def _process(command: list[str]) -> Outcome:
    """Run a peer's program and read its last line: an `Outcome` as JSON."""
    ran = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    lines = ran.stdout.strip().splitlines()
    if ran.returncode or not lines:
        complaint = (ran.stderr.strip() or ran.stdout.strip()).splitlines()
        last = complaint[-1][:200] if complaint else "no output"
        return Outcome(note=f"failed with status {ran.returncode}: {last}")
    return _outcome(json.loads(lines[-1]))


def _outcome(answer: dict[str, Any]) -> Outcome:
    """What a peer's program answered, timing fields flat."""
    timing = Timing(*(answer.pop(name) for name in Timing._fields)) if "us" in answer else None
    known = {name: answer.pop(name) for name in ("nbytes", "max_rel", "note") if name in answer}
    return Outcome(**known, timing=timing, details=answer)


def _no_gpu() -> str | None:
    return None if jax.default_backend() == "gpu" else "it needs an NVIDIA GPU"


def _missing(module: str, package: str) -> str | None:
    return None if importlib.util.find_spec(module) else f"{package} is not installed"


def _torch_available() -> str | None:
    return _no_gpu() or _missing("torch", "PyTorch")


def _fla_available() -> str | None:
    return _torch_available() or _missing("fla", "flash-linear-attention")


def _jla_available() -> str | None:
    return _no_gpu() or _missing("jla", "jax-linear-attention")


def _asked_of(case: Any, effort: Effort) -> dict[str, Any]:
    return {**case._asdict(), "rotate": effort.rotate, "seconds": effort.seconds, "warm": effort.warm}


def _torch_measure(which: str, case: Product | Heads, effort: Effort) -> Outcome:
    asked = json.dumps(_asked_of(case, effort))
    return _process([sys.executable, "-m", "gdn_jax.bench.torch_peers", which, asked])


def _program_measure(program: Program, case: Sequences, effort: Effort) -> Outcome:
    return _outcome(program.ask(_asked_of(case, effort)))


_FLA_CHUNK = Program(sys.executable, "-m", "gdn_jax.bench.torch_peers", "fla_chunk", timeout=_ANSWER_TIMEOUT)
_JLA_CHUNK = Program(sys.executable, "-m", "gdn_jax.bench.jax_peers", timeout=_ANSWER_TIMEOUT)


def _published_available() -> str | None:
    if reason := _no_gpu():
        return reason
    if not _PUBLISHED.exists():
        return "its source is in the repository, not in the installed package"
    return None if shutil.which("nvcc") else "it needs nvcc to be compiled"


def _published_measure(case: Product, effort: Effort) -> Outcome:
    if case.batch != 1:
        return Outcome(note="it takes one row of x")
    asked = {"rows": case.rows, "columns": case.columns, "rotate": int(effort.rotate), "seconds": effort.seconds}
    return _process([str(_published_program()), *(f"--{name}={value}" for name, value in asked.items())])


@functools.cache
def _published_program() -> pathlib.Path:
    """The program, compiled once per process into a folder that goes when the process does."""
    folder = tempfile.mkdtemp(prefix="gdn-bench-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    program = pathlib.Path(folder) / "published_design"
    command = ["nvcc", "-O3", "-std=c++17", "-arch=native", "-o", str(program), str(_PUBLISHED)]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT)
    return program


PEERS = (
    *(
        Peer(
            name=f"xla {name}",
            subject=subject,
            precision="bf16",
            available=lambda: None,
            measure=functools.partial(_xla_measure, form),
        )
        for subject, name, form in (("gemv", "int4", _INT4), ("gemm", "int4", _INT4), ("gemm", "dense", _DENSE))
    ),
    Peer(
        name="torch int4",
        subject="gemv",
        precision="bf16",
        available=_torch_available,
        measure=functools.partial(_torch_measure, "int4"),
    ),
    Peer(
        name="published",
        subject="gemv",
        precision="f32",
        available=_published_available,
        measure=_published_measure,
    ),
    Peer(
        name="fla",
        subject="delta",
        precision="f32",
        available=_fla_available,
        measure=functools.partial(_torch_measure, "fla"),
    ),
    *(
        Peer(
            name=name,
            subject="chunk",
            precision="bf16",
            available=available,
            measure=functools.partial(_program_measure, program),
            begin=program.start,
        )
        for name, available, program in (("fla", _fla_available, _FLA_CHUNK), ("jla", _jla_available, _JLA_CHUNK))
    ),
)
