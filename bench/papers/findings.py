"""What the papers say beside what is measured here: tables, and a verdict on each claim."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.common.output import Row, table

RESULTS = Path(__file__).resolve().parents[1] / "results"

YES, PARTLY, NO, OTHER = "yes", "in part", "no", "not here"
"""Verdicts on a claim. OTHER: it needs what a simulation does not have."""


@dataclass(frozen=True)
class Claim:
    """A claim of a paper. where: table or figure; ours: what was measured; why: the reason of a verdict."""

    paper: str
    where: str
    claim: str
    ours: str
    holds: str
    why: str = ""


class Findings:
    """The findings on one paper. scale: factor on the simulated time; texts: all of them, to be printed."""

    def __init__(self, paper: str, scale: float = 1.0) -> None:
        self.scale = scale
        self.texts: list[str] = []
        self.tables: list[dict[str, object]] = []
        self.claims: list[Claim] = []
        self._paper = paper

    def table(self, where: str, title: str, rows: Sequence[Row]) -> None:
        """Keep a table."""
        self.texts.append(table(f"{self._paper}, {where}: {title}", rows))
        self.tables.append({"paper": self._paper, "where": where, "title": title, "rows": [*rows]})

    def claim(self, where: str, claim: str, ours: str, holds: str, why: str = "") -> None:
        """Keep a verdict."""
        self.texts.append(f"{where}: {claim}\n  here: {ours}\n  reproduced: {holds}" + (f"; {why}" if why else ""))
        self.claims.append(Claim(self._paper, where, claim, ours, holds, why))


Step = Callable[[Findings, int], None]
"""Measures a part of a paper; the number is a seed."""


def measured(step: Step, paper: str, scale: float, seed: int) -> tuple[Findings, float]:
    """What a step finds, and the seconds of processor time that it takes."""
    began, findings = time.process_time(), Findings(paper, scale)
    step(findings, seed)
    return findings, time.process_time() - began


def verdict(*held: bool) -> str:
    """YES where all held, NO where none did."""
    return YES if all(held) else PARTLY if any(held) else NO


def lower(ours: Mapping[str, float], theirs: Mapping[str, float], name: str) -> float:
    """By which share a figure of ours is below theirs."""
    return 1.0 - ours[name] / theirs[name]


def claims(folder: Path = RESULTS) -> list[Claim]:
    """The verdicts of the runs whose results are kept."""
    return [Claim(**one) for file in _files(folder) for one in json.loads(file.read_text()).get("claims", ())]


def rows(where: str, folder: Path = RESULTS) -> list[dict[str, float]]:
    """The rows of a table of those runs. Raises StopIteration where there is none."""
    tables = [one for file in _files(folder) for one in json.loads(file.read_text()).get("tables", ())]
    table_rows: list[dict[str, float]] = next(one["rows"] for one in tables if one["where"] == where)
    return table_rows


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("papers*.json"))
