"""The command line: `gdn check`, `gdn convert`, `gdn generate`, …; `gdn --help` lists the commands."""

import argparse
import json
import logging
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gdn_jax.arguments import positive
from gdn_jax.errors import GdnError

__all__ = ["main"]

# Named here, so that a command line is parsed without loading the library.
_QUANTISERS = ("absmax", "q4_0", "mse")
_Q4_PARTS = ("all", "gdn")

_SMALL = "64,2,6,16,32,4"
"""The geometry of a small model, all of which can be 4-bit."""

_TABLE_ROWS = 100
"""A table of more tensors than this is one of their kinds."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0 success, 1 a failed verdict, 2 a request that cannot be met."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(format="%(levelname)s: %(message)s")
    try:
        return options.run(options)
    except (GdnError, ValueError, TypeError, OSError) as error:
        print(f"gdn {options.command}: {error}", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):  # XLA's word for the same
            raise
        reason = (str(error).splitlines() or ["no reason given"])[0]
        remedy = "ask for fewer tokens, sequences or layers, or close what else holds memory"
        print(f"gdn {options.command}: not enough memory ({reason}); {remedy}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"gdn {options.command}: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    from gdn_jax.bench import command as bench
    from gdn_jax.decoder import command as decoder

    parser = argparse.ArgumentParser(prog="gdn", description="Gated DeltaNet in JAX, with evidence for every number.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_budget(commands)
    _add_check(commands)
    _add_convert(commands)
    _add_info(commands)
    _add_trace(commands)
    bench.add_parser(commands)
    decoder.add_parser(commands)
    return parser


def _add_budget(commands) -> None:
    budget = commands.add_parser(
        "budget",
        help="device memory of a whole model, part by part, and which cards hold it",
        description=(
            "Nothing is loaded: bytes come from the shapes of weights and state. The workspace is an estimate from "
            "above. With --card the exit status says whether it fits."
        ),
    )
    subject = budget.add_mutually_exclusive_group()
    subject.add_argument("--geometry", default="qwen3.5-27b", help="a published model (default qwen3.5-27b)")
    subject.add_argument("--model", type=Path, metavar="PATH", help="a checkpoint")
    budget.add_argument("--tier", choices=("f32", "bf16", "q4"), default="q4", help="form of the weights (default q4)")
    budget.add_argument(
        "--context", type=positive, default=4096, metavar="N", help="tokens of a sequence (default 4096)"
    )
    budget.add_argument("--batch", type=positive, default=1, metavar="B", help="sequences at once (default 1)")
    budget.add_argument("--kv", choices=("float32", "bfloat16"), default="float32", help="type of keys and values")
    budget.add_argument("--card", metavar="CARD", help="a name such as H200, auto (the device here), or bytes: 24GB")
    budget.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    budget.set_defaults(run=_budget)


def _add_check(commands) -> None:
    check = commands.add_parser(
        "check",
        help="compare the library with float64 and with transformers; the exit status is the verdict",
        description="Without arguments: single operators, every packaged golden, and the 27B geometry in detail.",
    )
    subject = check.add_mutually_exclusive_group()
    subject.add_argument("--geometry", help="a published geometry (see gdn info), or D,G,H,K,V,W as integers")
    subject.add_argument("--model", type=Path, metavar="PATH", help="a checkpoint; one of its GDN layers is checked")
    check.add_argument("--layer", type=int, default=0, help="with --model: GDN layer, counted from 0 (default 0)")
    check.add_argument(
        "--tokens", type=positive, metavar="T", help="length of the sequence (default 5; --speculation: 512)"
    )
    check.add_argument("--batch", type=positive, default=1, metavar="B", help="sequences at once (default 1)")
    check.add_argument("--inputs", choices=("gaussian", "heavy", "uniform"), default="gaussian", help="distribution")
    check.add_argument("--tier", choices=("f32", "q4"), default="f32", help="form of the large projections")
    check.add_argument("--quantiser", choices=_QUANTISERS, default="absmax", help="with --tier q4 (default absmax)")
    check.add_argument("--long", action="store_true", help="without a subject: the 512-token goldens too")
    check.add_argument(
        "--speculation",
        action="store_true",
        help="a whole model with drafts against itself without: a small one, that of --model, or --geometry at random",
    )
    check.add_argument(
        "--draft-tokens", type=positive, metavar="N", help="with --speculation: proposals at a time (default 3)"
    )
    check.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    check.set_defaults(run=_check)


def _add_convert(commands) -> None:
    convert = commands.add_parser(
        "convert",
        help="convert a checkpoint, with its linear layers in 4 bits if wanted; or prove that a result is right",
        description=(
            "SRC is a Hugging Face directory, a GGUF file or a converted checkpoint. DST must not exist; it appears "
            "when it is complete, and nothing is left behind otherwise. The tokenizer and its like go with the model."
        ),
    )
    convert.add_argument("source", type=Path, metavar="SRC", help="the checkpoint to convert")
    convert.add_argument("destination", type=Path, metavar="DST", help="a GGUF file if it ends in .gguf, else Orbax")
    convert.add_argument("--tier", choices=("f32", "q4"), help="f32: numbers as stored; q4: 4 bits (default f32)")
    convert.add_argument("--quantiser", choices=_QUANTISERS, help="rule of tier q4 (default absmax)")
    convert.add_argument(
        "--q4-parts",
        choices=_Q4_PARTS,
        help="with tier q4: all linear layers, or the large projections of GDN layers alone (default all)",
    )
    convert.add_argument("--format", choices=("orbax", "gguf"), help="instead of what the name of DST says")
    convert.add_argument(
        "--resume",
        action="store_true",
        help="keep finished items if interrupted, and go on from those of an earlier run",
    )
    convert.add_argument(
        "--verify", action="store_true", help="compare every tensor with SRC afterwards; if DST exists, do only that"
    )
    convert.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    convert.set_defaults(run=_convert)


def _add_info(commands) -> None:
    info = commands.add_parser("info", help="versions, devices, and which implementation each operation will use")
    info.add_argument("--self-check", action="store_true", help="also compare the kernels with XLA; 1 if one disagrees")
    info.add_argument("--json", action="store_true", help="one JSON object instead of text")
    info.set_defaults(run=_info)


def _add_trace(commands) -> None:
    trace = commands.add_parser(
        "trace",
        help="the error budget: 4-bit weights against float32 per operator, and 8-bit activations apart",
        description="Runs a layer in f32 and in q4 on the same inputs and prints where they differ, and by how much.",
    )
    subject = trace.add_mutually_exclusive_group()
    subject.add_argument("--geometry", default="qwen3.5-27b", help="a published geometry, or D,G,H,K,V,W (default 27b)")
    subject.add_argument("--model", type=Path, metavar="PATH", help="a checkpoint; its stored 4-bit codes are kept")
    subject.add_argument(
        "--decoder", type=Path, metavar="PATH", help="a whole model: its logits by form of the weights, against f32"
    )
    trace.add_argument("--layers", type=_layers, default=(0,), metavar="I[,J…]", help="GDN layers, from 0 (default 0)")
    trace.add_argument("--tokens", type=positive, default=16, metavar="T", help="length of the sequence (default 16)")
    inputs = trace.add_mutually_exclusive_group()
    inputs.add_argument("--inputs", choices=("gaussian", "heavy", "uniform"), default="heavy", help="distribution")
    inputs.add_argument("--activations", type=Path, metavar="FILE", help=".npy, float32 [T, B, D]: recorded inputs")
    trace.add_argument("--quantiser", choices=_QUANTISERS, default="absmax", help="rule of quantisation")
    trace.add_argument("--stack", type=int, default=0, metavar="N", help="also the growth through N layers")
    trace.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    trace.set_defaults(run=_trace)


def _budget(options: argparse.Namespace) -> int:
    # Asking a device for its memory must not take that memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from gdn_jax import memory
    from gdn_jax.evidence.report import Section

    cfg, longest = memory.of_checkpoint(options.model) if options.model else memory.published(options.geometry)
    if longest is not None and options.context > longest:
        print(
            f"warning: context {options.context} is beyond the {longest} tokens that the model was made for "
            "(max_position_embeddings)",
            file=sys.stderr,
        )
    load = memory.Load(cfg=cfg, tier=options.tier, batch=options.batch, context=options.context, kv_dtype=options.kv)
    chosen = None if options.card is None else memory.card(options.card)
    sections = (Section(*table) for table in memory.tables(load, chosen, longest))
    return _show("budget", sections, as_json=options.json)


def _check(options: argparse.Namespace) -> int:
    from gdn_jax.evidence import check

    if options.speculation:
        return _check_speculation(options)
    if options.draft_tokens is not None:
        raise ValueError("--draft-tokens belongs to --speculation")
    if (options.geometry, options.model) != (None, None) and options.long:
        raise ValueError("--long belongs to the packaged goldens; leave out --geometry and --model")
    names = ("geometry", "model", "layer", "tokens", "batch", "inputs", "long", "tier", "quantiser")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    return _show("check", check.run(check.Options(**given)), as_json=options.json)


def _check_speculation(options: argparse.Namespace) -> int:
    from gdn_jax.bench import models
    from gdn_jax.decoder.decoder import Decoder
    from gdn_jax.evidence import speculation, subjects

    foreign = {"layer": 0, "batch": 1, "inputs": "gaussian", "long": False}
    for name, default in foreign.items():
        if getattr(options, name) != default:
            raise ValueError(f"--{name} does not belong to --speculation")
    if options.model is not None:
        name = options.model.name
        decoder = Decoder.load(options.model, tier=options.tier, quantiser=options.quantiser)
    else:
        name, gdn = subjects.parse_geometry(_SMALL if options.geometry is None else options.geometry)
        cfg = models.decoder_by_name(name, gdn)
        decoder = Decoder(cfg=cfg, weights=models.decoder_weights(1, cfg, options.tier))
        name = f"{name} {options.tier}, random weights"
    given = {key: value for key in ("tokens", "draft_tokens") if (value := getattr(options, key)) is not None}
    return _show("check", speculation.run(name, decoder, speculation.Options(**given)), as_json=options.json)


def _convert(options: argparse.Namespace) -> int:
    # Files are written by way of JAX, which would otherwise take most of a GPU's memory for it.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from gdn_jax import convert, convert_verify
    from gdn_jax.progress import Meter

    for name in ("quantiser", "q4_parts"):
        if getattr(options, name) and options.tier == "f32":
            raise ValueError(f"--{name.replace('_', '-')} belongs to --tier q4")
    names = ("tier", "quantiser", "q4_parts")
    recipe = {name: value for name in names if (value := getattr(options, name)) is not None}
    paths = (options.source, options.destination)
    done, verdict = None, None
    if not options.verify or options.resume or not options.destination.exists():
        with Meter("converting", sys.stderr) as meter:
            done = convert.convert(*paths, **recipe, format=options.format, resume=options.resume, progress=meter)
    if options.verify:
        with Meter("verifying", sys.stderr) as meter:
            verdict = convert_verify.verify(*paths, **recipe, progress=meter)
    good = verdict is None or verdict.passed
    if options.json:
        outcomes = {"conversion": done and done._asdict(), "verification": verdict and verdict._asdict()}
        print(json.dumps({"passed": good, **outcomes}, indent=1))
        return 0 if good else 1
    if done is not None:
        _show_conversion(done, options.destination)
    if verdict is not None:
        for fault in verdict.faults:
            print(f"  {fault}")
        bounded = f", {verdict.bounded} within {verdict.worst:.2f} of their bound" if verdict.bounded else ""
        print(f"gdn convert: {'verified' if good else 'FAILED'}: {verdict.exact} tensors compared by bits{bounded}")
    return 0 if good else 1


def _show_conversion(done: Any, destination: Path) -> None:
    from gdn_jax.evidence import report

    if done.quantisation:
        columns = ("max_error", "rms_relative", "zero_code_share", "zeroed_rows")
        costs, kinds = done.quantisation, "" if len(done.quantisation) <= _TABLE_ROWS else ", the worst of each kind"
        rows = [(name, *(cost[column] for column in columns)) for name, cost in sorted(_worst(costs).items())]
        title = f"what quantising by {done.quantiser} cost{kinds}"
        print(report.as_text(report.Section("quantisation", title, ("tensor", *columns), rows, None)), end="\n\n")
    if done.not_q4:
        print(f"gdn convert: kept as stored: {', '.join(_worst({name: {} for name in done.not_q4}))}")
    print(
        f"gdn convert: {done.tensors} tensors ({done.resumed} of an earlier run), {done.source_nbytes:,} bytes to "
        f"{done.nbytes:,} in {done.seconds:.1f} s ({done.source_nbytes / done.seconds / 1e6:,.0f} MB/s): {destination}"
    )


def _worst(costs: Mapping[str, Mapping[str, float]]) -> Mapping[str, Mapping[str, float]]:
    """`costs` by tensor; where these are many, the worst of all tensors whose names differ in numbers only."""
    if len(costs) <= _TABLE_ROWS:
        return costs
    kinds: dict[str, dict[str, float]] = {}
    for name, cost in costs.items():
        kind = kinds.setdefault(re.sub(r"\.\d+(?=\.)", ".*", name), dict(cost))
        kind.update({column: max(kind[column], value) for column, value in cost.items()})
    return kinds


def _trace(options: argparse.Namespace) -> int:
    from gdn_jax.evidence import budget, drift

    if options.decoder is not None:
        if options.activations or options.stack or options.layers != (0,):
            raise ValueError("--layers, --activations and --stack belong to single layers, not to --decoder")
        whole = drift.Options(model=options.decoder, tokens=options.tokens, quantiser=options.quantiser)
        return _show("trace", drift.run(whole), as_json=options.json)
    names = ("geometry", "model", "layers", "tokens", "inputs", "activations", "quantiser", "stack")
    chosen = budget.Options(**{name: getattr(options, name) for name in names})
    return _show("trace", budget.run(chosen), as_json=options.json)


def _show(command: str, sections: Iterable[Any], *, as_json: bool) -> int:
    """Print tables as they come, or one JSON object at the end; the verdict is the exit status."""
    from gdn_jax import environment
    from gdn_jax.evidence import report

    environment.make_reproducible()
    done = []
    for section in sections:
        done.append(section)
        if as_json:
            print(f"{section.name}: {report.verdict(section)}", file=sys.stderr)
        else:
            print(report.as_text(section), end="\n\n", flush=True)
    good = report.passed(done)
    if as_json:
        print(report.as_json(done, environment.describe()))
    else:
        failed = [section.name for section in done if section.passed is False]
        print(f"gdn {command}: passed" if good else f"gdn {command}: FAILED ({', '.join(failed)})")
    return 0 if good else 1


def _info(options: argparse.Namespace) -> int:
    from gdn_jax import environment, self_check
    from gdn_jax.config import GEOMETRIES
    from gdn_jax.ops import implementation_report

    described = environment.describe()
    choices = implementation_report()
    warnings = environment.warnings()
    checks = self_check.self_check() if options.self_check else ()
    good = all(check.passed for check in checks)
    if options.json:
        implementations = {choice.operation: choice.implementation for choice in choices}
        report = {**described, "implementations": implementations, "warnings": warnings}
        if options.self_check:
            report["self_check"] = [check.as_json() for check in checks]
        print(json.dumps(report, indent=1))
        return 0 if good else 1
    packages = ", ".join(f"{name} {version}" for name, version in described["packages"].items() if version)
    print(f"python          {described['python']} on {described['machine']}")
    print(f"packages        {packages}")
    print(f"devices         {', '.join(described['devices'])} (default backend: {described['backend']})")
    for choice in choices:
        print(f"{choice.operation:15} {choice.implementation} ({choice.reason})")
    print(f"geometries      {', '.join(GEOMETRIES)}")
    for check in checks:
        print(f"self-check      {check}")
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return 0 if good else 1


def _layers(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"must be layer numbers such as 0 or 0,3,47, got {text!r}")
    return tuple(map(int, parts))


if __name__ == "__main__":
    sys.exit(main())
