"""One run of `gdn bench`: the request that its options stand for; rows printed, recorded and drawn."""

import argparse
import functools
import itertools
import json
import math
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import jax

from gdn_jax import ops
from gdn_jax.bench import (
    ceiling,
    chunk,
    decode,
    delta,
    gemm,
    gemv,
    layer,
    models,
    prefill,
    provenance,
    roofline,
    speculation,
)
from gdn_jax.bench.request import Request
from gdn_jax.bench.rows import Row, record
from gdn_jax.bench.timing import Effort
from gdn_jax.config import GEOMETRIES
from gdn_jax.evidence import report
from gdn_jax.evidence.subjects import parse_geometry

__all__ = ["carry_out"]

SUBJECTS = {"ceiling": ceiling, "gemv": gemv, "gemm": gemm, "delta": delta, "chunk": chunk, "layer": layer}
SUBJECTS |= {"decode": decode, "prefill": prefill, "speculation": speculation}
WITH_PEERS = ("gemv", "gemm", "delta", "chunk")
WHOLE_MODELS = ("decode", "prefill", "speculation")
BATCHES = {"delta": (1, 8, 64), "gemm": (16, 128, 512, 2048)}
PRECISIONS = {"gemm": ("bf16", "exact"), "chunk": ("bf16", "exact")}
CONTEXT = 1024
TOKENS = {"decode": (32,), "prefill": (128,), "chunk": (512, 4096, 16384), "speculation": (4, 8)}
# Of the 27B model: the two parts of its in-projection, alone and as one; out; the MLP's three; the head.
SHAPES = (
    (10240, 5120),
    (6144, 5120),
    (16384, 5120),
    (5120, 6144),
    (17408, 5120),
    (34816, 5120),
    (5120, 17408),
    (248320, 5120),
)
# The same of a prompt: its projections that are large, where no two of one input are taken apart.
PROMPT_SHAPES = ((16384, 5120), (5120, 6144), (34816, 5120), (5120, 17408))
GEOMETRY = "qwen3.5-27b"
# On a CPU the command can be tried, no more.
CPU_SHAPES = ((48, 96), (37, 64))
CPU_GEOMETRY = "64,2,6,32,32,4"
CPU_BATCHES = (1,)
CPU_LAYERS = 2
CPU_CONTEXT = 16
CPU_TOKENS = {"chunk": (70,)}
CPU_NOTE = "cpu, not a measurement of the kernels"


def carry_out(options: argparse.Namespace) -> int:
    """Gate and time every case, print the table, and return the exit status: 1 if a gate of ours was red."""
    request = _request(options)
    if _on_cpu():
        _say(f"{CPU_NOTE}; what is not given is tiny")
    if options.peers and options.subject not in WITH_PEERS:
        _say(f"there are no peers for {options.subject}, only for {', '.join(WITH_PEERS)}")
    origin = provenance.describe(_command_line(options))
    best, read = ceiling.read_ceiling(request.effort)
    # Reading is the subject of `ceiling`; elsewhere it is a means, of which only a failure is worth a line.
    leading = read if options.subject == "ceiling" else [row for row in read if not row.passed]
    found = itertools.chain(leading, SUBJECTS[options.subject].run(request))
    rows, lines = [], []
    for row, line in _recorded(found, best, origin, options.jsonl):
        rows.append(row)
        lines.append(line)
    if options.plot:
        drawn = roofline.plot(rows, best, options.plot, f"gdn bench {options.subject}, {origin['device']}")
        _say(f"{drawn} rows drawn in {options.plot}")
    good = all(row.passed for row in rows if not row.is_peer)
    (_print_json if options.json else _print_table)(options.subject, lines, best, origin, good)
    return 0 if good else 1


def _request(options: argparse.Namespace) -> Request:
    on_cpu = _on_cpu()
    ops.check_implementation(options.implementation)
    usual = CPU_GEOMETRY if on_cpu else GEOMETRY
    name, cfg = parse_geometry(usual if options.geometry is None else options.geometry)
    published = GEOMETRIES[name].layers if name in GEOMETRIES and not on_cpu else CPU_LAYERS
    whole = models.decoder_by_name(name, cfg) if options.subject in WHOLE_MODELS else None
    tier = options.tier or "q4"
    lengths = options.tokens or (CPU_TOKENS.get(options.subject, (4,)) if on_cpu else TOKENS.get(options.subject, (1,)))
    if whole is not None:
        for precision in options.precision or ():
            of_tiers = ops.PROMPT_PRECISIONS if options.subject == "prefill" else ops.PRECISIONS
            ops.check_precision(precision, "q4" if tier == "q4" else "f32", of_tiers)
    return Request(
        batches=options.batch or (CPU_BATCHES if on_cpu else BATCHES.get(options.subject, (1,))),
        shapes=options.shapes or (CPU_SHAPES if on_cpu else PROMPT_SHAPES if options.subject == "gemm" else SHAPES),
        geometry=name,
        cfg=cfg,
        layers=options.layers or published,
        precisions=options.precision or PRECISIONS.get(options.subject, ("exact",)),
        implementation=options.implementation,
        peers=options.peers,
        effort=Effort.here(options.seconds),
        lengths=lengths,
        decoder=whole,
        tier=tier,
        context=options.context or (CPU_CONTEXT if on_cpu else CONTEXT),
        tokens=lengths[0],
        kv_dtype=options.kv or "float32",
        parts=not options.no_parts,
        pieces=options.pieces or 1,
        backward=bool(options.backward),
    )


def _recorded(
    rows: Iterable[Row], best: float | None, origin: dict[str, Any], jsonl: Any
) -> Iterator[tuple[Row, dict[str, Any]]]:
    """Each row with its record, which is in the file and on stderr before the next row is measured."""
    for row in rows:
        line = {**record(row, best), **origin}
        if _on_cpu():
            line["note"] = "; ".join(filter(None, (row.note, CPU_NOTE)))
        if jsonl:
            with jsonl.open("a") as file:
                file.write(json.dumps(_jsonable(line), allow_nan=False) + "\n")
        time = f"{row.timing.us:.2f} µs" if row.timing else row.note
        _say(f"{row.case}, batch {row.batch}, {row.implementation} {row.precision}: {time}")
        yield row, line


def _print_json(subject: str, lines: list[dict[str, Any]], best: float | None, origin: dict[str, Any], good: bool):
    columns = tuple(dict.fromkeys(itertools.chain.from_iterable(lines)))
    cells = [tuple(line.get(name) for name in columns) for line in lines]
    print(report.as_json([report.Section(subject, _title(subject, best, origin), columns, cells, good)], origin))


def _print_table(subject: str, lines: list[dict[str, Any]], best: float | None, origin: dict[str, Any], good: bool):
    columns = ("case", "batch", "implementation", "precision", "µs", "p10…p90", "MB", "GB/s", "of read", "max_rel")
    cells = [_cells(line) for line in lines]
    section = report.Section(subject, _title(subject, best, origin), (*columns, "note"), cells, good)
    print(report.as_text(section), end="\n\n")
    print(f"gdn bench: {'passed' if good else 'FAILED'}{f' ({CPU_NOTE})' if _on_cpu() else ''}")


def _cells(line: dict[str, Any]) -> tuple[Any, ...]:
    def number(name: str, form: str, factor: float = 1.0) -> str:
        return "-" if line[name] is None else format(line[name] * factor, form)

    spread = "-" if line["us"] is None else f"{line['us_p10']:.2f}…{line['us_p90']:.2f}"
    return (
        *(line[name] for name in ("case", "batch", "implementation", "precision")),
        number("us", ".2f"),
        spread,
        number("nbytes", ",.2f", 1e-6) if line["nbytes"] else "-",
        number("gb_per_s", ",.0f"),
        number("fraction", ".1%"),
        number("max_rel", ".1e"),
        line["note"],
    )


def _title(subject: str, best: float | None, origin: dict[str, Any]) -> str:
    roof = f"read ceiling {best / 1e12:.3f} TB/s in this run" if best else "no read ceiling could be measured"
    return f"{subject} on {origin['device']}, jax {origin['versions']['jax']}; {roof}"


def _command_line(options: argparse.Namespace) -> str:
    """The command that gives these rows again; where they were written is left out."""
    plain = ("geometry", "layers", "implementation", "seconds", "tier", "context", "kv", "pieces")
    given = {name: getattr(options, name) for name in plain}
    for name in ("batch", "tokens"):
        values = getattr(options, name)
        given[name] = values and ",".join(map(str, values))
    given["shapes"] = options.shapes and ",".join(f"{rows}x{columns}" for rows, columns in options.shapes)
    given["precision"] = options.precision and ",".join(options.precision)
    words = [f"--{name} {value}" for name, value in given.items() if value is not None]
    flags = [f"--{name.replace('_', '-')}" for name in ("no_parts", "backward", "peers") if getattr(options, name)]
    return " ".join(("gdn bench", options.subject, *words, *flags))


def _jsonable(line: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity; it appears as a string, as in the reports of `gdn check`."""
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in line.items()
    }


@functools.cache
def _on_cpu() -> bool:
    return jax.default_backend() == "cpu"


def _say(text: str) -> None:
    print(f"gdn bench: {text}", file=sys.stderr, flush=True)
