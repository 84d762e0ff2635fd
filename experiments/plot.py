"""Draw recorded rows of `gdn bench` as `gdn bench --plot` draws those of one run: GB/s over bytes, under the ceiling.

    python -m experiments.plot RESULTS.jsonl … PICTURE.svg [--batch B] [--without WORD …]

Rows of several runs share the highest ceiling that one of them measured. The same rows give the same picture.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import sys
from typing import Any

import matplotlib

from gdn_jax.bench import roofline
from gdn_jax.bench.rows import Row
from gdn_jax.bench.timing import Timing


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    lines = [json.loads(line) for file in options.results for line in file.read_text().splitlines()]
    chosen = [line for line in lines if is_chosen(line, options)]
    devices = {line["device"] for line in chosen}
    if len(devices) != 1:
        raise SystemExit(f"the rows must be of one device, got {', '.join(sorted(devices)) or 'none'}")
    ceiling = max((line["ceiling_gb_per_s"] for line in chosen if line["ceiling_gb_per_s"]), default=None)
    subjects = ", ".join(dict.fromkeys(line["subject"] for line in chosen))
    batch = f", batch {options.batch}" if options.batch else ""
    title = f"gdn bench {subjects}{batch}, {devices.pop()}, {max(line['date'] for line in chosen)}"
    os.environ["SOURCE_DATE_EPOCH"] = "0"  # else the picture holds the time at which it was drawn
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "gdn"}):
        drawn = roofline.plot([as_row(line) for line in chosen], ceiling and ceiling * 1e9, options.picture, title)
    print(f"{drawn} of {len(lines)} rows drawn in {options.picture}")
    return 0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m experiments.plot")
    parser.add_argument("results", type=pathlib.Path, nargs="+", help="records of gdn bench --jsonl")
    parser.add_argument("picture", type=pathlib.Path, help=".svg or .png")
    parser.add_argument("--batch", type=int, help="rows of this batch alone")
    parser.add_argument("--without", nargs="+", default=[], metavar="WORD", help="leave out cases with such a word")
    return parser


def is_chosen(line: dict[str, Any], options: argparse.Namespace) -> bool:
    return options.batch in (None, line["batch"]) and not set(options.without) & set(line["case"].split())


def as_row(line: dict[str, Any]) -> Row:
    """The row that a line records."""
    derived = ("timing", "details")
    fields = {field.name: line[field.name] for field in dataclasses.fields(Row) if field.name not in derived}
    timing = None if line["us"] is None else Timing(*(line[name] for name in Timing._fields))
    return Row(**fields, timing=timing)


if __name__ == "__main__":
    sys.exit(main())
