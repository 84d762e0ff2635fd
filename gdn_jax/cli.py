"""The command line: `gdn check`, `gdn info`."""

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from gdn_jax.errors import GdnError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0 success, 1 a failed verdict, 2 a request that cannot be met."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(format="%(levelname)s: %(message)s")
    try:
        return options.run(options)
    except (GdnError, ValueError, TypeError, OSError) as error:
        print(f"gdn {options.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"gdn {options.command}: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gdn", description="Gated DeltaNet in JAX, with evidence for every number.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_check(commands)
    _add_info(commands)
    return parser


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
    check.add_argument("--tokens", type=_positive, default=5, metavar="T", help="length of the sequence (default 5)")
    check.add_argument("--batch", type=_positive, default=1, metavar="B", help="sequences at once (default 1)")
    check.add_argument("--inputs", choices=("gaussian", "heavy", "uniform"), default="gaussian", help="distribution")
    check.add_argument("--tier", choices=("f32",), default="f32", help="weights of the large projections")
    check.add_argument("--long", action="store_true", help="without a subject: the 512-token goldens too")
    check.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    check.set_defaults(run=_check)


def _add_info(commands) -> None:
    info = commands.add_parser("info", help="versions, devices, and which implementation each operation will use")
    info.add_argument("--json", action="store_true", help="one JSON object instead of text")
    info.set_defaults(run=_info)


def _check(options: argparse.Namespace) -> int:
    from gdn_jax import environment
    from gdn_jax.evidence import check, report

    if (options.geometry or options.model) and options.long:
        raise ValueError("--long belongs to the packaged goldens; leave out --geometry and --model")
    names = ("geometry", "model", "layer", "tokens", "batch", "inputs", "long")
    chosen = check.Options(**{name: getattr(options, name) for name in names})
    sections = []
    for section in check.run(chosen):
        sections.append(section)
        if options.json:
            print(f"{section.name}: {report.verdict(section)}", file=sys.stderr)
        else:
            print(report.as_text(section), end="\n\n", flush=True)
    good = report.passed(sections)
    if options.json:
        print(report.as_json(sections, environment.describe()))
    else:
        failed = [section.name for section in sections if section.passed is False]
        print("gdn check: passed" if good else f"gdn check: FAILED ({', '.join(failed)})")
    return 0 if good else 1


def _info(options: argparse.Namespace) -> int:
    from gdn_jax import environment
    from gdn_jax.config import GEOMETRIES
    from gdn_jax.ops import implementation_report

    described = environment.describe()
    choices = implementation_report()
    warnings = environment.warnings()
    if options.json:
        implementations = {choice.operation: choice.implementation for choice in choices}
        print(json.dumps({**described, "implementations": implementations, "warnings": warnings}, indent=1))
        return 0
    packages = ", ".join(f"{name} {version}" for name, version in described["packages"].items() if version)
    print(f"python          {described['python']} on {described['machine']}")
    print(f"packages        {packages}")
    print(f"devices         {', '.join(described['devices'])} (default backend: {described['backend']})")
    for choice in choices:
        print(f"{choice.operation:15} {choice.implementation} ({choice.reason})")
    print(f"geometries      {', '.join(GEOMETRIES)}")
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return 0


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
