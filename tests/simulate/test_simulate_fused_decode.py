"""The simulated generator against times computed by hand, and what dies with it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shapeshift.simulate.fused_decode import LOST, REFUSED, SERVED, DecodeMachine, SimulationResult, run
from shapeshift.workloads.trace import Trace

MACHINE = DecodeMachine(slots=4, base_s=0.01, row_s=0.001, token_s=0.0001, prefill_tokens=100)


def serve(at_s: list[float], answers: list[int], prompt: int = 10, **changed: object) -> SimulationResult:
    lengths = np.full(len(at_s), prompt)
    trace = Trace(np.array(at_s), lengths, np.array(answers, np.int64))
    return run(replace(MACHINE, **changed), trace)  # type: ignore[arg-type]


def test_a_prompt_is_read_in_chunks_and_each_iteration_gives_a_token() -> None:
    alone = serve([1.0], [3], prompt=250)
    assert alone.first_s == pytest.approx([3 * 0.011 + 250 * 0.0001])
    assert alone.last_s == pytest.approx(alone.first_s + 2 * 0.011)
    assert alone.tokens.tolist() == [0, 0, 1, 1, 1] and alone.launches == 5


def test_a_request_joins_between_two_iterations() -> None:
    both = serve([0.0, 0.015], [4, 1])
    # The first reads its prompt; the second comes during its second iteration, and takes part in the third.
    assert both.first_s == pytest.approx([0.012, 0.023 + 0.013 - 0.015])
    assert both.last_s[0] == pytest.approx(0.012 + 0.011 + 0.013 + 0.011)


def test_more_requests_than_slots_wait_and_more_than_the_queue_holds_are_refused() -> None:
    result = serve([0.0] * 7, [2] * 7, queue_requests=6)
    assert result.outcome.tolist() == [SERVED] * 6 + [REFUSED]
    assert result.first_s[4] > result.last_s[3]


def test_a_window_collects_a_batch_that_ends_together() -> None:
    result = serve([0.0, 0.3, 0.6], [2, 5, 2], batching="window", window_s=0.5)
    # The third comes after the first two have ended, and waits for a window of its own.
    assert 0.5 < result.first_s[0] < 0.52
    assert result.last_s[0] == pytest.approx(result.last_s[1] + 0.3)
    assert result.first_s[2] > 0.5


def test_instances_take_turns() -> None:
    fused, instances = serve([0.0] * 4, [100] * 4), serve([0.0] * 4, [100] * 4, batching="instances")
    assert instances.launches == 4 * fused.launches
    assert instances.last_s.max() == pytest.approx(100 * 0.044 + 40 * 0.0001)


def test_compaction_computes_no_row_of_those_that_have_left() -> None:
    answers = [30, 2, 2, 30]
    rows = {rows: serve([0.0] * 4, answers, rows=rows) for rows in ("running", "contiguous", "compacted")}
    assert {name: one.rows for name, one in rows.items()} == {"running": 64, "contiguous": 120, "compacted": 64}
    assert [rows[name].moves for name in rows] == [0, 0, 1]
    assert rows["compacted"].last_s.max() < rows["contiguous"].last_s.max()


@pytest.mark.parametrize("batching", ["fused", "window", "instances"])
def test_what_a_dead_process_held_is_lost_and_later_requests_are_served(batching: str) -> None:
    result = serve(
        [0.0, 0.99, 1.5, 3.0], [10, 1000, 5, 5], kill_s=1.69, recovery_s=1.0, batching=batching, window_s=0.2
    )
    assert result.outcome.tolist() == [SERVED, LOST, LOST if batching == "window" else SERVED, SERVED]
    assert np.isnan(result.first_s[1]) and result.first_s[3] < 0.5
    assert serve([2.0], [5], kill_s=1.6, recovery_s=1.0).outcome.tolist() == [REFUSED]
