"""The turns of `bench.fused_decode.ranks`."""

from __future__ import annotations

import torch

from bench.fused_decode.ranks import CONTEXT, System, _cell
from shapeshift.fused_decode.interfaces import StepBatch


class Recorder:
    """A model that only notes its steps, and the threads that torch has then."""

    def __init__(self) -> None:
        self.steps: list[StepBatch] = []
        self.threads: set[int] = set()

    def forward(self, batch: StepBatch) -> None:
        self.steps.append(batch)
        self.threads.add(torch.get_num_threads())


def test_each_system_computes_the_same_steps_with_its_own_threads() -> None:
    before = torch.get_num_threads()
    models = [Recorder(), Recorder()]
    times = _cell([System("one", models[0], 2), System("two", models[1], 1)], rows=3, turns=2, steps=4)
    torch.set_num_threads(before)
    assert set(times) == {"one", "two"} and min(times.values()) > 0
    assert [model.threads for model in models] == [{2}, {1}]
    for model in models:
        # One step of each turn is not timed.
        assert len(model.steps) == 2 * (4 + 1)
        assert model.steps[0].slots.tolist() == [0, 1, 2] and set(model.steps[0].starts.tolist()) == {CONTEXT}
