"""Figures for the plots of benchmarks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def figure(
    file: Path, panels: int, size: tuple[float, float], title: str = "", dpi: int = 100
) -> Iterator[Sequence[Any]]:
    """So many panels side by side to draw on, `size` inches in all; written to `file` on exit."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sheet, grid = pyplot.subplots(1, panels, figsize=size, squeeze=False)
    yield grid[0]
    if title:
        sheet.suptitle(title, fontsize=9)
    sheet.tight_layout()
    sheet.savefig(file, dpi=dpi)
    pyplot.close(sheet)
