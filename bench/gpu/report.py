"""Tables, profiles and plots of the parts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.common.plots import figure
from bench.gpu.part import Row


def line(row: Row) -> str:
    """One row as text, without the columns that it does not have."""
    return "  " + ", ".join(f"{name} {value}" for name, value in row.items())


def write(folder: Path, part: str, head: Mapping[str, object], rows: Sequence[Row]) -> Path:
    """Write the profile of a part, which is named after it and its hardware; returns the file."""
    hardware = head["hardware"]
    assert isinstance(hardware, Mapping)
    name = str(hardware.get("gpu") or hardware["cpu"]).partition(",")[0]
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"gpu-{part}-{re.sub('[^a-z0-9]+', '-', name.lower()).strip('-')}.json"
    file.write_text(json.dumps({**head, "part": part, "rows": list(rows)}, indent=1) + "\n", encoding="utf-8")
    return file


def plot_step_curve(file: Path, rows: Sequence[Row]) -> bool:
    """Draw the latencies of the static lengths of each model; whether there are any, and matplotlib is installed."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row.get("kind") == "step curve":
            curves.setdefault(row["model"], []).append((row["tokens"], row["ms"]))
    if not curves:
        return False
    try:
        with figure(file, len(curves), (5.0 * len(curves), 3.2)) as panels:
            for panel, (model, points) in zip(panels, curves.items(), strict=True):
                panel.step(*zip(*points, strict=True), where="pre")
                panel.set(title=model, xlabel="tokens", ylabel="ms")
    except ModuleNotFoundError:
        return False
    return True
