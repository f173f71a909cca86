"""Service times and capacities of the bins, from the latency profile that `make engines` publishes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shapeshift.engines.execution.engine_set import best_curve, cost_curve
from shapeshift.engines.manifest import EngineEntry, Manifest
from shapeshift.engines.policy.packs import row_costs


def bin_edges(manifest: Manifest) -> list[int]:
    """The longest texts of the bins that a worker may hold: the static lengths, and the model's longest text.

    An engine of packs that are longer than any text has no bin.
    """
    lengths = {entry.tokens for entry in manifest.engines if entry.tokens and entry.tokens < manifest.max_tokens}
    return sorted(lengths | {manifest.max_tokens})


def entry_of_bin(manifest: Manifest, edge: int) -> EngineEntry:
    """The engine of one bin: the static engine of that length, else the dynamic one."""
    static = next((entry for entry in manifest.engines if entry.tokens == edge), None)
    return static or next(entry for entry in manifest.engines if entry.tokens is None)


@dataclass(frozen=True)
class ServiceTimes:
    """Milliseconds of one call by total tokens, on one bin's engine or on the fastest engine.

    table: [max_tokens + 1] for each bin edge; best: the minimum of all engines at each number of tokens; rows: as
    `row_costs`, for each bin edge, and for 0 on the fastest engine.
    """

    table: dict[int, list[float]]
    best: list[float]
    rows: dict[int, list[float]]

    def of_pack(self, bin_edge: int, tokens: int) -> float:
        """Time of one call of `tokens` tokens in all; bin_edge 0: on the fastest engine."""
        times = self.table.get(bin_edge, self.best)
        return times[min(tokens, len(times) - 1)]

    def of_row(self, bin_edge: int, tokens: int) -> float:
        """Time of one text among others; bin_edge: as of `of_pack`, at least `tokens` or 0."""
        return self.rows[bin_edge][tokens]

    def of_bin(self, edge: int) -> float:
        """Time of one text of a bin, padded to its edge (without a static engine: of the bin's longest text)."""
        return self.table[edge][edge]


def service_times(
    manifest: Manifest, edges: Sequence[int], pack_limits: Callable[[int], tuple[int, int]]
) -> ServiceTimes:
    """The service times of a model's bins, from its profile. pack_limits(bin edge): most tokens and rows of a call."""
    table = {edge: cost_curve(entry_of_bin(manifest, edge), manifest.max_tokens).tolist() for edge in edges}
    best = best_curve(manifest).tolist()
    rows = {0: row_costs(best, *pack_limits(0))}
    for edge in edges:
        tokens, most = pack_limits(edge)
        rows[edge] = row_costs(table[edge][: edge + 1], min(tokens, edge), most)
    return ServiceTimes(table, best, rows)
