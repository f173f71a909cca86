"""Tables and ratios of `bench.token_adapt`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from bench.token_adapt.cells import NEVER_RUN, Cell
from bench.token_adapt.systems import INFAAS_NAME, OURS_NAME, PAPER_NAME, PETS_NAME

GOALS = {PETS_NAME: 18.2, "best fixed gamma": 8.0, PAPER_NAME: 4.0}
"""Percent of utility that ours should gain over each at 1.2 times the capacity of gamma 0, emulated ViT-Base."""
_HEADING = (
    f"  {'':26}{'utility':>9}{'right':>8}{'wrong':>8}{'late':>8}{'evicted':>9}{'failed':>8}{'batch':>7}{'foreign':>9}"
)


class Results:
    """All cells of one part of the benchmark."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.cells: list[Cell] = []

    @property
    def loads(self) -> list[str]:
        return list(dict.fromkeys(cell.load for cell in self.cells))

    def schemes(self, load: str) -> list[str]:
        """The schemes of a load, in the order of their first cells."""
        return list(dict.fromkeys(cell.scheme for cell in self.cells if cell.load == load))

    def of(self, load: str, scheme: str) -> list[Cell]:
        """The cells of a scheme, one a seed."""
        return [cell for cell in self.cells if cell.load == load and cell.scheme == scheme]

    def share(self, load: str, scheme: str) -> float:
        """The share of the offered utility that was gained, the mean over the seeds."""
        return float(np.mean([cell.share for cell in self.of(load, scheme)]))

    def best_fixed(self, load: str) -> str | None:
        """The measured fixed gamma that gained the most."""
        fixed = [name for name in self.schemes(load) if name.startswith("gamma ")]
        return max(fixed, key=lambda name: self.share(load, name), default=None)


def tables(results: Results) -> Iterator[str]:
    """Every cell, the means over the seeds, and the gammas that served."""
    yield f"\n{results.what}"
    for load in results.loads:
        yield f"\n{load}"
        yield _HEADING
        for scheme in results.schemes(load):
            yield _row(scheme, results.of(load, scheme))
        for scheme in (OURS_NAME, PAPER_NAME):
            if cells := results.of(load, scheme):
                yield f"  gammas of {scheme}: {_gammas(cells)}"


def ratios(results: Results) -> Iterator[str]:
    """How much more utility ours gains than the others, in percent."""
    yield f"\n{results.what}: utility of ours over others'"
    for load in results.loads:
        ours = results.share(load, OURS_NAME)
        others = [PETS_NAME, results.best_fixed(load), PAPER_NAME, INFAAS_NAME]
        for name in [name for name in others if name in results.schemes(load)]:
            other = results.share(load, name)
            is_best = name == results.best_fixed(load) and name != PETS_NAME
            shown = f"best fixed gamma ({name})" if is_best else name
            goal = GOALS.get("best fixed gamma" if is_best else name) if load.startswith("1.2") else None
            percent = 100 * (ours / other - 1) if other else float("inf")
            yield f"  {load:34} over {shown:36}{percent:+8.1f}%" + (f"   goal {goal:+.1f}%" if goal else "")


def records(results: Results) -> list[dict[str, Any]]:
    """Every cell as a plain record."""
    rows = []
    for cell in results.cells:
        right, wrong, late, evicted = cell.types
        rows.append(
            {
                "what": results.what,
                "load": cell.load,
                "scheme": cell.scheme,
                "seed": cell.seed,
                "requests": len(cell.utility),
                "utility_share": round(cell.share, 4),
                "right": round(right, 4),
                "wrong": round(wrong, 4),
                "late": round(late, 4),
                "evicted": round(evicted, 4),
                "failed": cell.failed,
                "gammas": {str(gamma): round(share, 4) for gamma, share in gamma_shares([cell]).items()},
                "foreign": round(cell.foreign, 2),
            }
        )
    return rows


def gamma_shares(cells: Sequence[Cell]) -> dict[int, float]:
    """The share of each gamma among the requests that ran."""
    ran = np.concatenate([cell.gamma[cell.gamma != NEVER_RUN] for cell in cells])
    values, counts = np.unique(ran, return_counts=True)
    return {int(value): float(count / len(ran)) for value, count in zip(values, counts, strict=True)}


def _row(scheme: str, cells: Sequence[Cell]) -> str:
    right, wrong, late, evicted = np.mean([cell.types for cell in cells], axis=0)
    sizes = np.concatenate([cell.batch[cell.gamma != NEVER_RUN] for cell in cells])
    batches = float((1.0 / sizes).sum()) if len(sizes) else 0.0
    mean = len(sizes) / batches if batches else 0.0
    utility = float(np.mean([cell.share for cell in cells]))
    failed, foreign = sum(cell.failed for cell in cells), float(np.mean([cell.foreign for cell in cells]))
    types = f"{right:8.1%}{wrong:8.1%}{late:8.1%}{evicted:9.1%}"
    return f"  {scheme:26}{utility:9.3f}{types}{failed:8}{mean:7.1f}{foreign:9.2f}"


def _gammas(cells: Sequence[Cell]) -> str:
    return ", ".join(f"{gamma} {share:.0%}" for gamma, share in gamma_shares(cells).items() if share >= 0.005)
