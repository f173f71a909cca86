"""What the decode loop counts of an iteration: tokens by kind, milliseconds by part."""

from __future__ import annotations

import pytest

from shapeshift.fused_decode.engine.scheduler import MODEL, REST, SAMPLING, LoopMetrics


def test_the_parts_of_an_iteration_add_up_to_it() -> None:
    metrics = LoopMetrics()
    # 1 s before the model, 4 s in it, 2 s of sampling, 3 s behind that; of the first and the last ones 0.5 s waited.
    metrics.observe_iteration(100.0, 101.0, 105.0, 107.0, 110.0, 0.5)
    found = {part: own.value for part, own in metrics.parts.items()}
    assert found == {MODEL: 4500.0, SAMPLING: 2000.0, REST: 3500.0}
    metrics.observe_iteration(200.0, 200.0, 200.001, 200.001, 200.001, 0.0)
    assert metrics.parts[MODEL].value == pytest.approx(4501.0)


def test_tokens_are_counted_by_kind() -> None:
    metrics = LoopMetrics()
    for _ in range(2):
        metrics.observe_tokens(1, 20, 300, 4000)
    counters = (metrics.prompt_tokens, metrics.generated_tokens, metrics.draft_tokens, metrics.accepted_tokens)
    assert [one.value for one in counters] == [2.0, 40.0, 600.0, 8000.0]


def test_every_metric_is_exported_once() -> None:
    metrics = LoopMetrics()
    own = [one for one in vars(metrics).values() if not isinstance(one, dict)]
    assert {id(one) for one in metrics.exported} == {id(one) for one in (*own, *metrics.parts.values())}
    assert len(metrics.exported) == len(own) + 3
