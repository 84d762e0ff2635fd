"""`gdn bench` as a command: its options. What they mean is carried out by `session`, which loads JAX."""

import argparse
import itertools
import math
import os
from pathlib import Path
from typing import Any

from gdn_jax.arguments import positive

__all__ = ["add_parser", "run"]

_SUBJECTS = {"ceiling": (), "gemv": ("batch", "shapes", "precision", "implementation")}
_SUBJECTS |= {"gemm": _SUBJECTS["gemv"]}
_SUBJECTS |= {"delta": ("batch", "geometry", "implementation")}
_SUBJECTS |= {"chunk": ("batch", "geometry", "tokens", "precision", "implementation", "pieces", "backward")}
_SUBJECTS |= {"layer": ("batch", "geometry", "layers", "precision", "implementation")}
_MODEL = ("batch", "geometry", "precision", "implementation", "tier", "context", "tokens", "kv")
_SUBJECTS |= {"decode": (*_MODEL, "no_parts"), "prefill": _MODEL, "speculation": _MODEL}
"""Subject -> the options that choose its cases."""
_PRECISIONS = dict.fromkeys(_SUBJECTS, ("exact", "q8"))
_PRECISIONS |= {"gemm": ("exact", "bf16"), "chunk": ("exact", "bf16"), "prefill": ("exact", "q8", "bf16")}
"""Subject -> the precisions that can be asked for."""
_OF_LENGTHS = ("chunk", "speculation")
"""Subjects of sequences of several lengths."""
_PLOTS = (".png", ".svg")


def add_parser(commands: Any) -> None:
    """Add `bench` to the commands of an argument parser."""
    bench = commands.add_parser(
        "bench",
        help="time the kernels against the memory's measured ceiling, and against other implementations",
        description=(
            "Every case is first held to float64; what does not pass is not timed, and the exit status is 1. Times are "
            "per kernel, inside one program, operands rotating beyond the caches, the loop's own cost taken off."
        ),
    )
    bench.add_argument(
        "subject",
        choices=_SUBJECTS,
        help=(
            "ceiling: read and copy; gemv, gemm: 4-bit products of few and of many rows; delta: a step of the delta "
            "rule; chunk: the rule over all tokens of sequences (operands as a layer leaves them, in the caches); "
            "layer: a whole layer and its parts; decode, prefill, speculation: a whole model with random weights"
        ),
    )
    bench.add_argument(
        "--batch",
        type=_integers,
        metavar="B[,B…]",
        help="sequences at once (default 1; delta 1,8,64); gemm: rows (default 16,128,512,2048)",
    )
    bench.add_argument(
        "--shapes", type=_shapes, metavar="NxI[,…]", help="gemv, gemm: matrices such as 16384x5120,5120x6144"
    )
    bench.add_argument("--geometry", help="all but gemv, gemm: a published geometry (default 27b) or D,G,H,K,V,W")
    bench.add_argument("--layers", type=positive, metavar="L", help="layer: layers to rotate through (default: all)")
    bench.add_argument(
        "--precision",
        type=_precisions,
        metavar="P[,P]",
        help="not delta: exact (the default), q8; prefill: bf16 too; gemm, chunk: bf16, exact",
    )
    bench.add_argument("--implementation", metavar="NAME", help="instead of the one that the library would choose")
    bench.add_argument("--tier", choices=("f32", "bf16", "q4"), help="whole models: form of the weights (default q4)")
    bench.add_argument(
        "--context", type=positive, metavar="N", help="whole models: room for N tokens a sequence (default 1024)"
    )
    bench.add_argument(
        "--tokens",
        type=_integers,
        metavar="T[,T…]",
        help="decode: steps of a program (default 32); prefill: of a prompt (128); chunk: of sequences, any number of "
        "lengths (512,4096,16384); speculation: of windows, likewise (4,8)",
    )
    bench.add_argument("--kv", choices=("float32", "bfloat16"), help="whole models: type of keys and values")
    bench.add_argument(
        "--no-parts", action="store_const", const=True, help="decode: the step alone, not what it consists of"
    )
    bench.add_argument(
        "--pieces", type=positive, metavar="P", help="chunk: pieces of each sequence at a time, two passes (default 1)"
    )
    bench.add_argument(
        "--backward",
        action="store_const",
        const=True,
        help="chunk: each case once more with its gradients, forward and backward pass together",
    )
    bench.add_argument("--peers", action="store_true", help="gemv, gemm, delta, chunk: other implementations too")
    bench.add_argument("--seconds", type=_seconds, metavar="S", help="to measure each case for (default 1)")
    bench.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    bench.add_argument("--jsonl", type=Path, metavar="FILE", help="append a line for every row, as soon as it is there")
    bench.add_argument("--plot", type=Path, metavar="FILE", help="draw GB/s over bytes: .png or .svg")
    bench.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Carry out `gdn bench`: 0 if every gate of ours was green, 1 if one was red.

    Raises:
        ValueError: options that do not belong together, or a file that cannot be written.
        UnsupportedError: a named implementation that cannot do what it was asked for.
    """
    _check(options)
    # Peers need room on the card, most of which JAX would take for itself as soon as it starts.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from gdn_jax.bench import session

    return session.carry_out(options)


def _check(options: argparse.Namespace) -> None:
    """Refuse before any work what could only fail after it."""
    for name in dict.fromkeys(itertools.chain.from_iterable(_SUBJECTS.values())):
        if getattr(options, name) is not None and name not in _SUBJECTS[options.subject]:
            fits = ", ".join(subject for subject, names in _SUBJECTS.items() if name in names)
            raise ValueError(f"--{name.replace('_', '-')} belongs to {fits}, not to {options.subject}")
    known = _PRECISIONS[options.subject]
    if not set(options.precision or ()) <= set(known):
        given = ",".join(options.precision)
        raise ValueError(f"--precision must be {' or '.join(known)} for {options.subject}, got {given}")
    if options.subject not in _OF_LENGTHS and len(options.tokens or ()) > 1:
        given = ",".join(map(str, options.tokens))
        several = " and ".join(_OF_LENGTHS)
        raise ValueError(f"--tokens must be one number for {options.subject}, got {given}; {several} take several")
    for name in ("jsonl", "plot"):
        path: Path | None = getattr(options, name)
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise ValueError(f"--{name} must name a file in an existing folder, got {path}")
    if options.plot is not None and options.plot.suffix not in _PLOTS:
        raise ValueError(f"--plot must end in {' or '.join(_PLOTS)}, got {options.plot.name!r}")


def _once[T](values: tuple[T, ...], text: str) -> tuple[T, ...]:
    """The values, of which none may come twice: its rows would."""
    if len(set(values)) != len(values):
        raise argparse.ArgumentTypeError(f"must name each case once, got {text!r}")
    return values


def _integers(text: str) -> tuple[int, ...]:
    return _once(tuple(positive(part) for part in text.split(",")), text)


def _shapes(text: str) -> tuple[tuple[int, int], ...]:
    shapes = []
    for part in text.split(","):
        sizes = part.split("x")
        if len(sizes) != 2:
            raise argparse.ArgumentTypeError(f"must be shapes such as 16384x5120 with commas between, got {text!r}")
        rows, columns = map(positive, sizes)
        if columns % 32:
            raise argparse.ArgumentTypeError(f"the columns of a 4-bit matrix are a multiple of 32, got {part!r}")
        shapes.append((rows, columns))
    return _once(tuple(shapes), text)


def _precisions(text: str) -> tuple[str, ...]:
    """Whether there are such is known with the subject."""
    return _once(tuple(text.split(",")), text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, got {text!r}")
    return seconds
