"""The choice of the engine for a pack, with fake engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from shapeshift.engines.execution import engine_set
from shapeshift.engines.execution.engine_set import EngineSet, efficient_tokens, row_slots
from shapeshift.engines.interfaces import Array
from shapeshift.engines.manifest import EngineEntry, Latency, Manifest, Output
from shapeshift.errors import EngineError
from tests.recording import recording


class FakeEngine:
    """Returns the sum of each row's ids; the arrays change at the next call."""

    def __init__(self, tokens: int | None, rows: int | None) -> None:
        self.tokens = tokens
        self.rows = rows
        self.shapes: list[tuple[int, int]] = []
        self._out = np.zeros((256, 1), np.float32)

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        ids, segments, rows = inputs["INPUT_IDS"], inputs["SEGMENTS"], inputs["ROWS"]
        self.shapes.append((ids.shape[1], len(rows)))
        assert self.tokens in (None, ids.shape[1]) and self.rows in (None, len(rows))
        self._out[: len(rows), 0] = [ids[segments == row].sum() for row in rows]
        return {"SUM": self._out[: len(rows)]}


def entry(tokens: int | None, rows: int | None, *points: tuple[int, float]) -> EngineEntry:
    # The median of a noisy machine misleads on purpose: the least time decides.
    latency = tuple(Latency(tokens=at, rows=1, median_ms=100 - ms, p99_ms=100.0, best_ms=ms) for at, ms in points)
    return EngineEntry("file", tokens, rows, 0.0, 1.0, latency)


def manifest_of(*engines: EngineEntry, max_tokens: int = 64, packs_rows: bool = True) -> Manifest:
    return Manifest(
        model="m",
        checkpoint_sha256="",
        build_key="",
        provider="emulated",
        provider_version="1",
        precision="f32",
        vocabulary=100,
        max_tokens=max_tokens,
        packs_rows=packs_rows,
        position_offset=0,
        reference="",
        tolerance="",
        hardware="",
        outputs=(Output("SUM", "TYPE_FP32", (1,)),),
        files={},
        engines=engines,
    )


DYNAMIC = entry(None, None, (1, 2.0), (64, 10.0))
SMALL = entry(16, 4, (16, 3.0))
LARGE = entry(64, 16, (64, 7.0))


def filled(*entries: EngineEntry, max_tokens: int = 64) -> tuple[EngineSet, dict[str, FakeEngine]]:
    """An engine set with a fake engine for each entry."""
    made = EngineSet(manifest_of(*entries, max_tokens=max_tokens))
    engines = {}
    for one in entries:
        engines[one.name] = FakeEngine(one.tokens, one.rows)
        made.add(engines[one.name], one)
    return made, engines


def test_the_cheapest_engine_is_chosen_for_every_length() -> None:
    made, engines = filled(DYNAMIC, SMALL, LARGE)
    for tokens in range(1, 65):
        costs = {"dynamic": float(np.interp(tokens, [1, 64], [2, 10])), "64": 7.0} | (
            {"16": 3.0} if tokens <= 16 else {}
        )
        assert made.choose(tokens, 1) is engines[min(costs, key=costs.__getitem__)], tokens
    assert made.choose(3, 1) is engines["dynamic"]
    assert made.choose(12, 1) is engines["16"]
    assert made.choose(17, 1) is engines["dynamic"]
    assert made.choose(60, 1) is engines["64"]


def test_too_many_rows_for_the_cheapest() -> None:
    made, engines = filled(DYNAMIC, SMALL, LARGE)
    assert made.choose(16, 4) is engines["16"]
    assert made.choose(16, 5) is engines["64"]
    assert made.choose(16, 17) is engines["dynamic"]


def test_pack_larger_than_every_engine_is_an_error() -> None:
    made, _ = filled(SMALL, max_tokens=16)
    for tokens, rows in ((17, 1), (16, 5), (1000, 1)):
        with pytest.raises(EngineError, match=f"no engine for {rows} rows of {tokens} tokens"):
            made.choose(tokens, rows)


def test_a_dynamic_engine_takes_a_pack_beyond_the_longest_text() -> None:
    made, engines = filled(DYNAMIC, LARGE)
    assert made.choose(100, 3) is engines["dynamic"]


def test_added_engines_are_used_from_the_next_call() -> None:
    made = EngineSet(manifest_of(DYNAMIC, SMALL, LARGE))
    dynamic, small, large = FakeEngine(None, None), FakeEngine(16, 4), FakeEngine(64, 16)
    made.add(dynamic, DYNAMIC)
    assert (made.choose(12, 1), made.choose(60, 1)) == (dynamic, dynamic)
    made.add(large, LARGE)
    assert (made.choose(12, 1), made.choose(60, 1)) == (dynamic, large)
    made.add(small, SMALL)
    assert (made.choose(12, 1), made.choose(60, 1)) == (small, large)
    assert made.loaded == ["dynamic", "64", "16"]


def test_runs_a_pack_in_the_shape_of_its_engine() -> None:
    made, engines = filled(DYNAMIC, SMALL, LARGE)
    texts = [np.arange(5), np.array([7] * 6)]
    assert made.run(texts)["SUM"].tolist() == [[10], [42]]
    assert engines["16"].shapes == [(16, 4)]
    assert made.run([np.array([1, 2])])["SUM"].tolist() == [[3]]
    assert engines["dynamic"].shapes == [(2, 1)]


def test_results_outlive_the_next_call() -> None:
    made, _ = filled(SMALL, max_tokens=16)
    first = made.run([np.array([1, 2, 3])])["SUM"]
    made.run([np.array([50])])
    assert first.tolist() == [[6]]


@pytest.mark.parametrize(
    ("points", "tokens"),
    [
        # Straight through the origin: only what is left empty at the end of a pack favours long ones.
        ([(8, 0.8), (64, 6.4), (128, 12.8), (256, 25.6), (512, 51.2)], 128),
        # Longer texts cost more a token than shorter ones: attention is square.
        ([(64, 5.0), (128, 10.0), (256, 24.0), (512, 60.0)], 128),
        # A flat start, as on a GPU.
        ([(64, 9.0), (128, 9.0), (256, 9.0), (512, 17.9)], 256),
        # Where even the longest holds less than a short row there is nothing to choose.
        ([(8, 1.0), (16, 2.0)], 600),
    ],
)
def test_efficient_tokens(points: Sequence[tuple[int, float]], tokens: int) -> None:
    assert efficient_tokens(manifest_of(entry(None, None, *points), max_tokens=600)) == tokens


def test_row_slots_of_static_engines() -> None:
    assert [row_slots(tokens, True, 512) for tokens in (1, 3, 4, 8, 15, 64, 512)] == [1, 1, 1, 2, 3, 16, 16]
    assert row_slots(512, False, 512) == 1


def test_max_rows_is_that_of_the_largest_engine() -> None:
    assert engine_set.max_rows(manifest_of(DYNAMIC, SMALL)) == 16
    assert engine_set.max_rows(manifest_of(DYNAMIC, packs_rows=False)) == 1
    # Without a dynamic engine nothing could run more rows than the longest static one has slots.
    assert engine_set.max_rows(manifest_of(entry(8, 2, (8, 1.0)), SMALL, max_tokens=16)) == 4


def test_a_call_is_recorded_with_the_lengths_of_its_texts(tmp_path: Path) -> None:
    made, _ = filled(DYNAMIC, SMALL, LARGE)
    made.run([np.arange(5)])
    with recording(tmp_path) as reader:
        made.run([np.arange(5), np.arange(6)])
        made.run([np.zeros(1, np.int64)] * 200)
    first, many = reader.read()
    assert (first.kind, first.values["size"], first.values["tokens"], first.values["texts"]) == ("pack", 16, 11, [5, 6])
    assert (many.values["tokens"], many.values["texts"]) == (200, 200), "only their number has room"
