"""Tables as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Row = Mapping[str, object]


def table(title: str, rows: Sequence[Row]) -> str:
    """Text of aligned columns. What a row lacks stays empty; numbers have four digits, integers all of theirs."""
    if not rows:
        return f"\n{title}: nothing was measured"
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [columns, *([_cell(row.get(name, "")) for name in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [f"\n{title}"]
    for first, *others in cells:
        lines.append("  ".join([f"  {first:{widths[0]}}", *map(str.rjust, others, widths[1:])]).rstrip())
    return "\n".join(lines)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)
