"""The picture: how fast bytes moved, over how many there were, under the ceiling that the same run measured."""

import io
import pathlib
from collections.abc import Sequence

from gdn_jax.bench.rows import Row

__all__ = ["SUFFIXES", "plot"]

SUFFIXES = (".png", ".svg")
# One launch in a program costs about this much, whatever it does: what bends the roof where kernels are small.
_LAUNCH = 1.5e-6
_MARKERS = "osD^vP*X"


def plot(rows: Sequence[Row], ceiling: float | None, path: pathlib.Path, title: str) -> int:
    """Draw every timed row to `path` (.png or .svg); returns how many there were.

    Abscissa: bytes that must move. Ordinate: bytes per second, with a bar from the 10th to the 90th percentile. The
    line is the `ceiling` in bytes per second; the dashed one what is left of it once a launch is paid for.

    Raises:
        ValueError: another suffix.
    """
    if path.suffix not in SUFFIXES:
        raise ValueError(f"a plot must end in {' or '.join(SUFFIXES)}, got {path.name!r}")
    # No pyplot: it picks a backend for windows, and keeps figures in a global list.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xscale="log", yscale="log", xlabel="MB that must move", ylabel="GB/s", title=title)
    timed = [row for row in rows if row.bandwidth]
    series = dict.fromkeys((row.implementation, row.precision) for row in timed)
    for (implementation, precision), marker in zip(series, _MARKERS * len(series), strict=False):
        mine = [row for row in timed if (row.implementation, row.precision) == (implementation, precision)]
        x = [row.nbytes / 1e6 for row in mine]
        rates = [(row.bandwidth or 0) / 1e9 for row in mine]
        bars = [_bar(row) for row in mine]
        down, up = [low for low, _ in bars], [high for _, high in bars]
        label = f"{implementation}, {precision}"
        axes.errorbar(x, rates, yerr=[down, up], fmt=marker, capsize=2, label=label, markersize=5)
        for row, at, rate in zip(mine, x, rates, strict=True):
            text = row.case if row.batch == 1 else f"{row.case} B{row.batch}"
            axes.annotate(text, (at, rate), xytext=(4, 4), textcoords="offset points", fontsize=6)
    if ceiling and timed:
        sizes = [row.nbytes for row in timed]
        few = (min(sizes) / 2, max(sizes) * 2)
        xs = [few[0] * (few[1] / few[0]) ** (i / 60) for i in range(61)]
        axes.axhline(ceiling / 1e9, color="black", label=f"read ceiling, {ceiling / 1e12:.2f} TB/s")
        bent = [n / (n / ceiling + _LAUNCH) / 1e9 for n in xs]
        axes.plot([n / 1e6 for n in xs], bent, "--", color="grey", label=f"less {_LAUNCH * 1e6:.1f} µs a launch")
    if timed:
        axes.legend(fontsize=8)
    axes.grid(which="both", alpha=0.2)
    drawn = io.BytesIO()  # whole before it is written: no half picture stays behind
    figure.savefig(drawn, format=path.suffix[1:], dpi=150)
    path.write_bytes(drawn.getvalue())
    return len(timed)


def _bar(row: Row) -> tuple[float, float]:
    """How far GB/s reach below and above the median."""
    assert row.timing is not None
    median = row.nbytes / row.timing.us / 1e3
    slow, fast = (row.nbytes / us / 1e3 if us > 0 else median for us in (row.timing.us_p90, row.timing.us_p10))
    return max(median - slow, 0.0), max(fast - median, 0.0)
