from __future__ import annotations

import pytest

from shapeshift.polymorph.policy.placement import Placement, decide


@pytest.mark.parametrize(
    ("engines", "engine_mb", "gpus", "workers", "name", "count"),
    [
        (9, 100, 0, 0, "inline", 0),
        (1, 10**6, 0, 0, "inline", 0),
        (9, 100, 0, 3, "resident", 3),
        (9, 100, 4, 0, "resident", 4),
        (9, 100, 4, 2, "resident", 2),
        (10, 100, 4, 0, "resident", 4),
        (11, 100, 4, 0, "partitioned", 4),
        (11, 100, 0, 2, "partitioned", 2),
        (9, 100, 1, 0, "inline", 0),
        (11, 100, 1, 0, "inline", 0),
        (11, 100, 1, 1, "resident", 1),
        (11, 100, 4, 1, "resident", 1),
    ],
)
def test_devices_memory_and_requested_workers_decide(
    engines: int, engine_mb: float, gpus: int, workers: int, name: str, count: int
) -> None:
    placed = decide(engines, engine_mb, 1000, gpus, workers)
    assert (placed.name, placed.workers) == (name, count)


def test_the_reason_names_what_decided() -> None:
    assert "no GPU" in decide(3, 10, 1000, 0).reason and "one GPU" in decide(3, 10, 1000, 1).reason
    for engine_mb, said in ((10, "every worker holds all"), (500, "each worker holds one")):
        reason = decide(3, engine_mb, 1000, 2).reason
        assert reason.startswith(f"3 engines of about {engine_mb} MiB, 1000 MiB a worker: ") and said in reason
    assert "it holds what fits" in decide(3, 500, 1000, 1, 1).reason


def test_bins_are_divided_by_a_latency_objective_alone() -> None:
    without = decide(3, 500, 1000, 2, has_objective=False)
    assert (without.name, without.workers) == ("resident", 2) and "without slo_ms" in without.reason


@pytest.mark.parametrize("wrong", [(0, 1, 1, 0), (1, -1, 1, 0), (1, 1, -1, 0), (1, 1, 1, -1)])
def test_invalid_values_are_refused(wrong: tuple[int, int, int, int]) -> None:
    engines, engine_mb, gpus, workers = wrong
    with pytest.raises(ValueError, match="engines, engine_mb, gpus, workers: got"):
        decide(engines, engine_mb, 1000, gpus, workers)


def test_a_placement_is_plain_data() -> None:
    assert decide(1, 1, 1000, 0) == Placement("inline", 0, decide(1, 1, 1000, 0).reason)
