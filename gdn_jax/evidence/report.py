"""Tables with a verdict, for people and for programs."""

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

__all__ = ["Section", "as_json", "as_text", "passed", "verdict"]


class Section(NamedTuple):
    """One table: `rows` of cells under `columns`, and whether what it shows is as it must be (None: it only informs).

    `shown` limits the printed table to some row numbers; JSON always holds every row.
    """

    name: str
    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[Any, ...]]
    passed: bool | None
    shown: Sequence[int] | None = None


def passed(sections: Iterable[Section]) -> bool:
    """Whether no section failed."""
    return all(section.passed is not False for section in sections)


def verdict(section: Section) -> str:
    """The section's verdict in one word."""
    return {True: "PASS", False: "FAIL", None: "info"}[section.passed]


def as_text(section: Section) -> str:
    """The section as an aligned table with its verdict."""
    shown = range(len(section.rows)) if section.shown is None else section.shown
    cells = [section.columns, *(tuple(_text(cell) for cell in section.rows[i]) for i in shown)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(section.columns))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join([f"[{verdict(section)}] {section.title}", *(f"  {line}" for line in lines)])


def as_json(sections: Iterable[Section], environment: dict[str, Any]) -> str:
    """All sections as one JSON object: {"passed", "environment", "sections": [{"name", "title", "passed", "rows"}]}.

    JSON has no NaN or infinity; they appear as the strings "nan", "inf" and "-inf".
    """
    sections = list(sections)
    body = [
        {
            "name": section.name,
            "title": section.title,
            "passed": section.passed,
            "rows": [
                {column: _jsonable(cell) for column, cell in zip(section.columns, row, strict=True)}
                for row in section.rows
            ],
        }
        for section in sections
    ]
    document = {"passed": passed(sections), "environment": environment, "sections": body}
    return json.dumps(document, indent=1, allow_nan=False)


def _text(cell: Any) -> str:
    if isinstance(cell, bool):
        return "pass" if cell else "FAIL"
    if isinstance(cell, float):
        return f"{cell:.3e}"
    return "-" if cell is None else str(cell)


def _jsonable(cell: Any) -> Any:
    return str(cell) if isinstance(cell, float) and not math.isfinite(cell) else cell
