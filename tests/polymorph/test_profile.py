from __future__ import annotations

from collections.abc import Sequence

import pytest

from shapeshift.engines.manifest import EngineEntry, Latency, Manifest, Output
from shapeshift.polymorph.service_times import bin_edges, entry_of_bin, service_times


def entry(tokens: int | None, *points: tuple[int, float]) -> EngineEntry:
    """An engine whose median is twice its best."""
    latency = tuple(Latency(at, 1, 2 * ms, 3 * ms, ms) for at, ms in points)
    return EngineEntry("file", tokens, None if tokens is None else 4, 0.0, 1.0, latency)


def manifest(engines: Sequence[EngineEntry], max_tokens: int = 100) -> Manifest:
    outputs = (Output("EMBEDDING", "TYPE_FP32", (8,)),)
    named = ("front", "0", "0", "emulated", "1", "f32")
    return Manifest(*named, 30522, max_tokens, True, 0, "", "", "", outputs, {}, tuple(engines))


def limits(edge: int) -> tuple[int, int]:
    return edge or 48, 4


DYNAMIC = entry(None, (1, 2.0), (51, 7.0), (100, 14.0))
STATIC = [entry(16, (16, 1.0)), entry(64, (64, 5.0))]
LONGEST = entry(100, (100, 9.0))


@pytest.mark.parametrize(
    ("engines", "edges"),
    [
        ([DYNAMIC, *STATIC], [16, 64, 100]),
        ([DYNAMIC, *STATIC, LONGEST], [16, 64, 100]),
        ([*STATIC, LONGEST], [16, 64, 100]),
        ([DYNAMIC], [100]),
    ],
)
def test_bins_are_the_static_lengths_and_the_longest_text(engines: list[EngineEntry], edges: list[int]) -> None:
    assert bin_edges(manifest(engines)) == edges


def test_the_engine_of_a_bin() -> None:
    made = manifest([DYNAMIC, *STATIC])
    assert [entry_of_bin(made, edge).tokens for edge in (16, 64, 100)] == [16, 64, None]
    assert entry_of_bin(manifest([*STATIC, LONGEST]), 100) is LONGEST


def test_service_times_are_the_best_measured() -> None:
    made = manifest([DYNAMIC, *STATIC])
    times = service_times(made, bin_edges(made), limits)
    assert [times.of_bin(edge) for edge in (16, 64, 100)] == [1.0, 5.0, 14.0]
    # A static engine takes the same however full it is; the dynamic one lies on a line between its points.
    assert [times.of_pack(16, tokens) for tokens in (1, 16)] == [1.0, 1.0]
    assert [times.of_pack(100, tokens) for tokens in (1, 26, 51, 100)] == [2.0, 4.5, 7.0, 14.0]


def test_a_worker_with_all_engines_is_as_fast_as_the_best_of_them() -> None:
    made = manifest([DYNAMIC, *STATIC])
    times = service_times(made, bin_edges(made), limits)
    assert [times.of_pack(0, tokens) for tokens in (1, 16, 26, 51, 64)] == [1.0, 1.0, 4.5, 5.0, 5.0]
    assert times.of_pack(0, 65) == pytest.approx(7.0 + 14 * 7.0 / 49)


def test_beyond_the_longest_text_the_time_is_constant() -> None:
    made = manifest([DYNAMIC, *STATIC])
    times = service_times(made, bin_edges(made), limits)
    assert times.of_pack(0, 1000) == times.of_pack(100, 1000) == 14.0
    assert times.of_pack(17, 26) == times.of_pack(0, 26)


def test_a_row_costs_its_share_of_a_call_on_the_engine_of_its_bin() -> None:
    made = manifest([DYNAMIC, *STATIC])
    times = service_times(made, bin_edges(made), limits)
    # Calls of at most four rows, and of 16 or 64 tokens; on any engine of 48 tokens: three rows of 16.
    assert [times.of_row(16, tokens) for tokens in (1, 4, 5, 16)] == [0.25, 0.25, 1 / 3, 1.0]
    assert [times.of_row(64, tokens) for tokens in (16, 64)] == [1.25, 5.0]
    assert times.of_row(0, 16) == times.of_pack(0, 48) / 3
    assert times.of_row(100, 100) == 14.0
