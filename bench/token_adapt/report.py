"""Tables and ratios of `bench.token_adapt`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bench.common.output import Row, table
from bench.token_adapt.cells import NEVER_RUN, Cell
from bench.token_adapt.systems import OURS_NAME


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


def tables(results: Results) -> str:
    """Every load's schemes, and how much more utility ours gains than the others."""
    shown = []
    for load in results.loads:
        rows = [{"scheme": scheme, **_figures(results.of(load, scheme))} for scheme in results.schemes(load)]
        shown.append(table(f"{results.what}, {load}", rows))
    return "\n".join([*shown, table(f"{results.what}: utility of ours over others'", ratios(results))])


def ratios(results: Results) -> list[Row]:
    """The utility of ours over that of each other scheme; the best fixed gamma is named so."""
    rows: list[Row] = []
    for load in results.loads:
        best = results.best_fixed(load)
        for scheme in [name for name in results.schemes(load) if name != OURS_NAME]:
            over, share = f"{scheme}, the best fixed one" if scheme == best else scheme, results.share(load, scheme)
            rows.append({"load": load, "over": over, "ratio": results.share(load, OURS_NAME) / share if share else 0.0})
    return rows


def records(results: Results) -> list[Row]:
    """Every cell as a plain record."""
    return [
        {"what": results.what, "load": cell.load, "scheme": cell.scheme, "seed": cell.seed, **_figures([cell])}
        for cell in results.cells
    ]


def _figures(cells: Sequence[Cell]) -> Row:
    """The means over the seeds, and the gammas that served."""
    right, wrong, late, evicted = np.mean([cell.types for cell in cells], axis=0)
    sizes = np.concatenate([cell.batch[cell.gamma != NEVER_RUN] for cell in cells])
    shares = gamma_shares(cells).items()
    return {
        "utility": round(float(np.mean([cell.share for cell in cells])), 4),
        "right": round(float(right), 4),
        "wrong": round(float(wrong), 4),
        "late": round(float(late), 4),
        "evicted": round(float(evicted), 4),
        "failed": sum(cell.failed for cell in cells),
        "batch": round(len(sizes) / float((1.0 / sizes).sum()), 1) if len(sizes) else 0.0,
        "foreign": round(float(np.mean([cell.foreign for cell in cells])), 2),
        "gammas": ", ".join(f"{gamma} {share:.0%}" for gamma, share in shares if share >= 0.005),
    }


def gamma_shares(cells: Sequence[Cell]) -> dict[int, float]:
    """The share of each gamma among the requests that ran."""
    ran = np.concatenate([cell.gamma[cell.gamma != NEVER_RUN] for cell in cells])
    values, counts = np.unique(ran, return_counts=True)
    return {int(value): float(count / len(ran)) for value, count in zip(values, counts, strict=True)}
