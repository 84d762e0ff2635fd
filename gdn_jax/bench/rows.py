"""One line of a benchmark: what was measured, how, and what it comes to against the ceiling."""

import dataclasses
from typing import Any

from gdn_jax.bench.timing import Timing

__all__ = ["Row", "record"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One case of one implementation. `timing` is None where nothing was timed; `note` then says why."""

    subject: str
    case: str
    batch: int
    implementation: str
    precision: str
    nbytes: int
    """Bytes that must move: operands read once, results written once."""
    max_rel: float | None = None
    """Of the gate, against float64."""
    bound: float | None = None
    """What `max_rel` had to keep to."""
    timing: Timing | None = None
    is_peer: bool = False
    note: str = ""
    details: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What else a reader of the record may want: versions of a peer, the cut of a kernel."""

    @property
    def passed(self) -> bool:
        """Whether the gate let it through. A peer that could not be asked has not failed."""
        return self.max_rel is None or self.bound is None or self.max_rel <= self.bound

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second; None without a time, or where a clock too coarse gave none above zero."""
        return self.nbytes / self.timing.us * 1e6 if self.timing and self.timing.us > 0 else None


def record(row: Row, ceiling: float | None) -> dict[str, Any]:
    """The row as flat JSON-ready fields; `ceiling` in bytes per second."""
    rate = row.bandwidth
    return {
        **{name: getattr(row, name) for name in ("subject", "case", "batch", "implementation", "precision")},
        "is_peer": row.is_peer,
        "passed": row.passed,
        **dict.fromkeys(Timing._fields),
        **(row.timing._asdict() if row.timing else {}),
        "nbytes": row.nbytes,
        "gb_per_s": rate and rate / 1e9,
        "fraction": rate and ceiling and rate / ceiling,
        "ceiling_gb_per_s": ceiling and ceiling / 1e9,
        "max_rel": row.max_rel,
        "bound": row.bound,
        "note": row.note,
        **row.details,
    }
