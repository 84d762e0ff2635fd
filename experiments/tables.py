"""The tables of measurements in the kernels' READMEs, from the records of `gdn bench` on an H200.

python -m experiments.tables [ceiling|gemv|batches|gemm|delta|chunk|layer …]
"""

import json
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from pallas_kernels.q4_gemv import choose_mosaic_tile

RESULTS = pathlib.Path(__file__).parent / "results"

type Line = dict[str, Any]
type Table = Iterator[tuple[str, ...]]


def recorded(subject: str) -> list[Line]:
    return lines_of(f"bench-{subject}")


def lines_of(record: str) -> list[Line]:
    return [json.loads(line) for line in (RESULTS / f"{record}-h200.jsonl").read_text().splitlines()]


def find(lines: list[Line], **wanted: Any) -> Line | None:
    """The one line with these fields, if it was timed."""
    found = [line for line in lines if line["us"] and all(line[name] == value for name, value in wanted.items())]
    assert len(found) <= 1, f"{len(found)} lines with {wanted}"
    return found[0] if found else None


def cell(line: Line | None, name: str, form: str, factor: float = 1.0) -> str:
    return "" if line is None or line[name] is None else format(line[name] * factor, form)


def ceiling() -> Table:
    yield "blocks in flight x words", "warps", "programs per core", "read, TB/s", "copy, TB/s"
    lines = recorded("ceiling")
    for cut in dict.fromkeys(line["case"].partition(" ")[2] for line in lines):
        pair = (find(lines, case=f"{what} {cut}".strip()) for what in ("read", "copy"))
        names = [part.lstrip("wp").replace("-", "one per block") for part in cut.split()] or ["XLA's own", "", ""]
        yield *names, *(cell(line, "gb_per_s", ".2f", 1e-3) for line in pair)


def gemv() -> Table:
    yield "matrix", "µs", "from float32 x", "GB/s", "of read", "max_rel", "torch int4", "published design", "XLA int4"
    lines = recorded("gemv")
    for shape in shapes(lines):
        kernel = find(lines, case=f"{shape} kernel", batch=1)
        product = find(lines, case=f"{shape} product", batch=1)
        peers = (find(lines, case=shape, implementation=name) for name in ("torch int4", "published", "xla int4"))
        ours = (cell(kernel, "us", ".1f"), cell(product, "us", ".1f"), cell(kernel, "gb_per_s", ".0f"))
        quality = (cell(kernel, "fraction", ".0%"), cell(kernel, "max_rel", ".1e"))
        yield shape, *ours, *quality, *(cell(peer, "us", ".1f") for peer in peers)


def batches() -> Table:
    yield "matrix", *(f"batch {batch}" for batch in (1, 2, 4, 8)), "8 rows over 1", "GB/s at 8", "max_rel at 8"
    lines, cuts = recorded("gemv"), lines_of("q4_gemv_cuts")
    for rows, columns in dict.fromkeys((line["N"], line["K"]) for line in cuts):
        one = find(lines, case=f"{rows}x{columns} kernel", batch=1)
        chosen = {batch: choose_mosaic_tile("NVIDIA H200", rows, columns, batch, 3).tile for batch in (2, 4, 8)}
        more = [find(cuts, N=rows, K=columns, batch=batch, cut=list(tile)) for batch, tile in chosen.items()]
        eight = more[-1]
        assert one is not None
        assert eight is not None
        times = (cell(line, "us", ".1f") for line in (one, *more))
        rate = rows * columns * 9 / 16 / eight["us"] / 1e3
        quality = f"{eight['us'] / one['us']:.2f}", f"{rate:.0f}", cell(eight, "max_rel", ".1e")
        yield f"{rows}x{columns}", *times, *quality


def gemm() -> Table:
    ours = ("µs, bf16", "TFLOP/s", "of dense bf16", "max_rel", "µs, exact", "TFLOP/s", "max_rel")
    yield "matrix", "rows of x", *ours, "XLA bf16 weights, µs", "XLA int4, µs"
    lines = recorded("gemm")
    for shape, batch in dict.fromkeys((line["case"], line["batch"]) for line in lines):
        case = {"case": shape, "batch": batch}
        rounded, exact = (find(lines, precision=name, is_peer=False, **case) for name in ("bf16", "exact"))
        peers = (find(lines, implementation=f"xla {form}", **case) for form in ("dense", "int4"))
        yield (
            *(shape, str(batch)),
            *(
                cell(rounded, "us", ".0f"),
                cell(rounded, "tflop_per_s", ".0f"),
                cell(rounded, "fraction_of_bf16", ".0%"),
            ),
            *(cell(rounded, "max_rel", ".1e"), cell(exact, "us", ".0f"), cell(exact, "tflop_per_s", ".0f")),
            *(cell(exact, "max_rel", ".1e"), *(cell(peer, "us", ".0f") for peer in peers)),
        )


def shapes(lines: list[Line]) -> list[str]:
    return list(dict.fromkeys(line["case"].split()[0] for line in lines))


def delta() -> Table:
    yield "batch", "µs", "10th to 90th percentile", "GB/s", "of read", "max_rel"
    for line in recorded("delta"):
        if line["us"]:
            spread = f"{line['us_p10']:.2f} to {line['us_p90']:.2f}"
            rate = (cell(line, "gb_per_s", ".0f"), cell(line, "fraction", ".0%"))
            yield str(line["batch"]), cell(line, "us", ".2f"), spread, *rate, cell(line, "max_rel", ".1e")


def chunk() -> Table:
    ours = ("µs", "per chunk", "TFLOP/s", "least by bytes, µs", "max_rel", "RMS error", "XLA, µs")
    yield "tokens", "batch", "precision", *ours, "FLA, µs", "jax-linear-attention, µs"
    # What was recorded before there was a backward pass is the forward pass alone.
    lines = [{"backward": False, **line} for line in recorded("chunk") if line.get("pieces", 1) == 1]
    names = ("tokens", "batch", "precision", "backward")
    for tokens, batch, precision, backward in dict.fromkeys(tuple(line[name] for name in names) for line in lines):
        case = {"tokens": tokens, "batch": batch, "precision": precision, "backward": backward}
        xla, fla, jla = (find(lines, implementation=name, **case) for name in ("xla", "fla", "jla"))
        kernels = (find(lines, implementation=name, **case) for name in ("mosaic", "triton"))
        kernel = next(filter(None, kernels), None)
        work = (cell(kernel, "us_per_chunk", ".2f"), cell(kernel, "tflop_per_s", ".0f"))
        floor = "" if kernel is None else f"{kernel['nbytes'] / kernel['ceiling_gb_per_s'] / 1e3:.1f}"
        quality = (cell(kernel, "max_rel", ".1e"), cell(kernel, "rms_rel", ".1e"))
        others = (cell(line, "us", ",.1f") for line in (xla, fla, jla))
        passes = f"{precision}, and backward" if backward else precision
        yield f"{tokens:,}", str(batch), passes, cell(kernel, "us", ",.1f"), *work, floor, *quality, *others


def layer() -> Table:
    yield "part", "µs, exact", "of read", "µs, q8", "of read"
    lines = recorded("layer")
    for case in dict.fromkeys(line["case"] for line in lines):
        pair = [find(lines, case=case, precision=precision) for precision in ("exact", "q8")]
        times = ((cell(line, "us", ".1f"), cell(line, "fraction", ".0%")) for line in pair)
        yield case.partition(" ")[2], *(text for pair in times for text in pair)


TABLES: dict[str, Callable[[], Table]] = {
    table.__name__: table for table in (ceiling, gemv, batches, gemm, delta, chunk, layer)
}


def markdown(table: Table) -> list[str]:
    """Its lines, with a rule under the head."""
    rows = [f"| {' | '.join(row)} |" for row in table]
    return [rows[0], "|---" * rows[0].count(" | ") + "|---|", *rows[1:]]


def main(*names: str) -> int:
    for name in names or TABLES:
        print(name, *markdown(TABLES[name]()), sep="\n", end="\n\n")
    return 0


if __name__ == "__main__":
    if not set(sys.argv[1:]) <= set(TABLES):
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
