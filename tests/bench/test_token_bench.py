"""The loads, cells and tables of `bench.token_adapt`."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from bench.common.cells import Cells, Run
from bench.token_adapt import cells, loads, systems, vit_base
from bench.token_adapt.cells import NEVER_RUN, Images
from shapeshift.token_adapt.request import Task
from shapeshift.workloads.images import TABLE_II
from shapeshift.workloads.trace import Trace


def task(name: str, ease: float) -> Task:
    return Task(name, ("a", "b"), {-4: ease - 0.1, 0: ease}, 600.0, 1.0)


TASKS = {name: task(name, ease) for name, ease in {"CIFAR10": 0.9, "CIFAR100": 0.7, "EuroSAT": 0.99}.items()}


def test_traffic_has_its_rate_and_table_iis_mix() -> None:
    even = loads.fluctuating(200.0, 30.0, 1)
    assert len(even.at_s) == pytest.approx(6000, rel=0.05)
    assert np.all(np.diff(even.at_s) >= 0) and even.at_s[-1] < 30
    kinds = Counter(zip(even.task.tolist(), even.latency_ms.tolist(), even.utility.tolist(), strict=True))
    assert kinds.keys() == {*TABLE_II}
    assert [count / len(even) for count in kinds.values()] == pytest.approx([1 / 6] * 6, abs=0.02)
    by_second = np.bincount(even.at_s.astype(int), minlength=30)
    assert by_second.max() > 2 * by_second.min()
    again = loads.fluctuating(200.0, 30.0, 1)
    assert np.array_equal(even.at_s, again.at_s) and np.array_equal(even.utility, again.utility)
    bursts = np.bincount(loads.bursty(100.0, 300.0, 1).at_s.astype(int), minlength=300)
    assert (bursts < bursts.mean()).mean() > 0.6


def test_requests_carry_the_parameters_of_their_type() -> None:
    tasks, latency_ms, utility = ["CIFAR100", "EuroSAT", "CIFAR100"], [600.0, 1000.0, 600.0], [1.0, 0.01, 1.0]
    at_s, length = np.array([0.0, 0.5, 1.0]), np.ones(3, np.int64)
    columns = {"latency_ms": np.array(latency_ms), "utility": np.array(utility), "task": np.array(tasks)}
    trace = Trace(at_s, length, **columns)
    requests = loads.planned(trace, 32)
    assert requests[0].parameters == {"task": "CIFAR100", "latency_ms": 600.0, "utility": 1.0}
    assert requests[1].parameters == {"task": "EuroSAT", "latency_ms": 1000.0, "utility": 0.01}
    assert requests[0].parameters is requests[2].parameters and requests[0].inputs is requests[1].inputs
    accuracy = loads.accuracies(trace, TASKS, (-4, 0))
    assert accuracy.tolist() == pytest.approx(np.array([[0.6, 0.7], [0.89, 0.99], [0.6, 0.7]]))


def answer(gamma: int, batch: int, outcome: str) -> bytes:
    message = service_pb2.ModelInferResponse()
    for name, content in (
        ("GAMMA", np.array([gamma], np.int32).tobytes()),
        ("BATCH_SIZE", np.array([batch], np.int32).tobytes()),
        ("OUTCOME", len(outcome).to_bytes(4, "little") + outcome.encode()),
    ):
        message.outputs.add(name=name)
        message.raw_output_contents.append(content)
    return bytes(message.SerializeToString())


def test_answers_are_read() -> None:
    assert cells.read(answer(-15, 7, "in_time")) == (-15, 7, True)
    assert cells.read(answer(0, 0, "evicted")) == (NEVER_RUN, 0, False)
    assert cells.read(answer(2, 3, "late")) == (2, 3, False)
    assert cells.read(None) == (NEVER_RUN, 0, False)


def images(in_time: list[bool]) -> Run[Images]:
    gamma = np.array([0, -4, NEVER_RUN, 0][: len(in_time)])
    return Run(
        Images(
            utility=np.array([1.0, 0.5, 0.2, 0.3])[: len(in_time)],
            accuracy=np.where(gamma == NEVER_RUN, 0.0, 0.8),
            gamma=gamma,
            batch=np.array([1, 2, 0, 2])[: len(in_time)],
            in_time=np.array(in_time),
            failed=0,
        ),
        0.0,
        0.0,
    )


def test_utility_and_the_papers_types_of_a_cell() -> None:
    shown = cells.figures(images([True, True, False, False]))
    assert shown["utility"] == pytest.approx(0.8 * 1.5 / 2.0)
    types = [shown[name] for name in ("right", "wrong", "late", "evicted")]
    assert types == pytest.approx([0.4, 0.1, 0.25, 0.25]) and sum(types) == pytest.approx(1.0)
    assert shown["batch"] == 1.5 and shown["gamma"] == -1.3


def test_ratios_are_over_each_scheme_and_name_the_best_fixed_one() -> None:
    results, load = Cells(cells.figures), "1.2 times capacity"
    for _ in range(2):
        results.keep(load, "ours", images([True, True, False, True]))
        results.keep(load, systems.PETS.name, images([True, False, False, False]))
        results.keep(load, "gamma -4", images([True, True, False, False]))
    ratios = {row["over"]: row["ratio"] for row in cells.ratios(results)}
    assert ratios == pytest.approx({"gamma 0 (PetS)": 1.8, "gamma -4, the best fixed one": 1.2})


def test_vit_base_is_scaled_to_its_capacity(tmp_path: Path) -> None:
    profiles = [
        {"gamma": gamma, "latency_ms": {"1": 10.0 + gamma / 10, "16": 80.0 + gamma}} for gamma in vit_base.GAMMAS
    ]
    (tmp_path / "profile.json").write_text(json.dumps({"profiles": profiles}))
    model = vit_base.model(tmp_path / "profile.json")
    best = max(count / ms for count, ms in model.profiles[0].latency_ms.items()) * 1e3
    assert best == pytest.approx(vit_base.CAPACITY_PER_S)
    assert model.profiles[-20].latency_ms[16] / model.profiles[0].latency_ms[16] == pytest.approx(60 / 80)
    sizes, tasks = vit_base.sizes(model)
    assert sizes[-1].latency_ms[16] < sizes[0].latency_ms[16] < sizes[1].latency_ms[16]
    assert all(one.accuracy[-1] < one.accuracy[0] < one.accuracy[1] <= 1 for one in tasks)


def test_schemes_are_models_of_their_own() -> None:
    assert systems.fixed(0) is systems.PETS
    schemes = [systems.OURS, systems.PAPER, *map(systems.fixed, (-15, 15, 0))]
    slugs = {scheme.slug for scheme in schemes}
    assert len(slugs) == len(schemes) and all(slug.replace("_", "").isalnum() for slug in slugs)
