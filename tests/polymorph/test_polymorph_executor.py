"""Fronts of every placement over the same engines: answers do not depend on the placement."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shapeshift.engines import manifest
from shapeshift.engines.execution.engine_set import EngineSet
from shapeshift.engines.execution.executor import EngineExecutor
from shapeshift.engines.manifest import EngineEntry, Latency
from shapeshift.errors import EngineError, InvalidInputError, ModelDiedError, ModelGoneError, ShapeshiftError
from shapeshift.polymorph.front import TextFront
from shapeshift.polymorph.policy.algorithms import DISPATCHERS
from shapeshift.polymorph.router import placement
from shapeshift.polymorph.router.bls_transport import WorkerClient
from shapeshift.polymorph.router.membership import Pace
from shapeshift.polymorph.router.placement import capacities, open_router, pack_limits
from shapeshift.polymorph.router.router import Router
from shapeshift.polymorph.router.transport import WorkerInfo, WrongBinError
from shapeshift.polymorph.service_times import ServiceTimes
from shapeshift.polymorph.settings import PlacementSettings, PolymorphSettings
from shapeshift.polymorph.worker import TextWorker
from shapeshift.serving import model_args
from shapeshift.serving import pb_utils as triton
from tests.fakes import (
    InferenceResponse,
    PbUtils,
    Request,
    Tensor,
    TritonError,
    TritonModelException,
    ids_request,
    logger,
)
from tests.waiting import wait_for

ROWS = [[[random.Random(own).randint(1, 30000)] * (1 + own * 7 % 130)] * (1 + own % 3) for own in range(60)]


class Server:
    """The server as a router sees it: passes requests to workers, each of which runs one at a time."""

    def __init__(self, pb_utils: PbUtils) -> None:
        self.workers: dict[str, TextWorker] = {}
        self.asked: set[str] = set()
        self._locks: dict[str, threading.Lock] = {}
        pb_utils.InferenceRequest = self._request

    def add(self, name: str, worker: TextWorker) -> None:
        self._locks[name] = threading.Lock()
        self.workers[name] = worker

    def _request(self, model_name: str, requested_output_names: Sequence[str], inputs: Sequence[Tensor]) -> Any:
        given: dict[str, Any] = {tensor.name(): tensor.as_numpy() for tensor in inputs}
        request = Request(requested_output_names, **given)

        self.asked.add(model_name)

        def answer() -> triton.InferenceResponse:
            if model_name not in self.workers:
                raise TritonModelException(f"Model '{model_name}' is not ready.")
            with self._locks[model_name]:
                return self.workers[model_name].execute([request])[0]

        request.exec = answer  # type: ignore[attr-defined]
        return request


@pytest.fixture
def server(pb_utils: PbUtils, monkeypatch: pytest.MonkeyPatch) -> Server:
    # A busy machine is not what is tried here.
    monkeypatch.setattr(placement, "Router", partial(Router, pace=Pace(least_limit_s=60.0, probe_s=0.05)))
    return Server(pb_utils)


def exported(pb_utils: PbUtils) -> set[tuple[str, str]]:
    """The series with a worker's name, and that."""
    return {(name, dict(labels).get("worker", "")) for name, labels in list(pb_utils.metrics)}


def vectors(front: TextFront) -> list[np.ndarray]:
    """What a front gives for all of ROWS."""
    requests = [ids_request(*rows) for rows in ROWS]
    front.execute(requests)
    return [request.vectors() for request in requests]


@pytest.mark.parametrize(
    ("placement", "bins", "parameters"),
    [
        ("resident", (0, 0), {}),
        *(("partitioned", (16, 64, 512), {"dispatch": own}) for own in DISPATCHERS),
        ("partitioned", (512, 0, 16), {"packing": False}),
    ],
)
def test_every_placement_gives_the_same_vectors(
    make_front: Callable[..., TextFront],
    make_worker: Callable[..., TextWorker],
    server: Server,
    placement: str,
    bins: tuple[int, ...],
    parameters: dict[str, object],
) -> None:
    fleet = {"placement": placement, "workers": len(bins), "max_workers": 4, "slo_ms": 100}
    front = make_front(**fleet, **parameters)
    for number, edge in enumerate(bins):
        server.add(f"front_w{number:02d}", make_worker(number, bin=edge))
    got = vectors(front)
    assert isinstance(front.executor, Router)
    wait_for(lambda: front.executor.waiting == front.executor.running == 0)
    wait_for(lambda: server.asked == {f"front_w{number:02d}" for number in range(4)})
    for own, wanted in zip(got, vectors(make_front()), strict=True):
        np.testing.assert_array_equal(own, wanted)


def test_inline_has_no_workers(make_front: Callable[..., TextFront], server: Server) -> None:
    front = make_front()
    vectors(front)
    assert isinstance(front.executor, EngineExecutor) and not server.asked


def test_a_front_whose_first_engine_fails_leaves_no_engine_thread(
    make_front: Callable[..., TextFront], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(engines: EngineSet) -> None:
        raise EngineError("broken")

    monkeypatch.setattr(EngineSet, "warm_up", fail)
    before = set(threading.enumerate())
    with pytest.raises(EngineError, match="broken"):
        make_front()
    assert not [one for one in set(threading.enumerate()) - before if one.name.startswith("engine-")]


@pytest.mark.parametrize(("kind", "threads"), [("CPU", 3), ("GPU", 1)])
def test_a_gpu_has_one_engine_thread(
    front_args: Callable[..., dict[str, str]], pb_utils: PbUtils, kind: str, threads: int
) -> None:
    front = TextFront(pb_utils, model_args.read(front_args(engine_threads=3) | {"model_instance_kind": kind}))
    try:
        executor = front.executor
        assert isinstance(executor, EngineExecutor)
        wait_for(lambda: executor.loaded)
        assert len(executor.threads) == threads
    finally:
        front.close()


def test_a_front_exports_its_workers(
    make_front: Callable[..., TextFront], make_worker: Callable[..., TextWorker], server: Server, pb_utils: PbUtils
) -> None:
    front = make_front(placement="resident", workers=2)
    server.add("front_w01", make_worker(1, PbUtils()))
    vectors(front)
    names = ("front_w00", "front_w01")
    # Exported once a second, in this order.
    wait_for(lambda: ("shapeshift_worker_timeouts", names[1]) in exported(pb_utils))
    wait_for(lambda: pb_utils.metric("shapeshift_worker_rows_total") == sum(map(len, ROWS)))
    assert pb_utils.metric("shapeshift_workers_joined", model="front") == 1
    for name in names:
        wait_for(lambda: pb_utils.metric("shapeshift_worker_outstanding", worker=name) == 0)  # noqa: B023
        assert pb_utils.metric("shapeshift_worker_timeouts", worker=name) == 0
    assert "front: front_w01: joined, bin any, generation 0" in pb_utils.Logger.lines


@pytest.mark.parametrize("settings", [{"placement": "auto", "max_workers": 2}, {"placement": "resident"}])
def test_a_placement_that_make_engines_has_not_set_is_refused(
    front_args: Callable[..., object], pb_utils: PbUtils, tmp_path: Path, settings: dict[str, Any]
) -> None:
    front_args()
    folder = tmp_path / "build" / "engines" / "front"
    with pytest.raises(InvalidInputError, match="placement, max_workers: got .*; set by `shapeshift engines`"):
        open_router(
            pb_utils,
            "f",
            manifest.load(folder),
            PolymorphSettings(**settings),
            PlacementSettings(),
            logger(),
        )


@pytest.mark.parametrize(
    ("in_fleet", "reached"),
    [
        (False, "server"),
        (True, "fleet"),
    ],
)
@pytest.mark.parametrize(("stated", "edges"), [("[]", [16, 64, 512]), ("[64, 512]", [64, 512])])
def test_workers_are_reached_where_they_are_and_hold_the_stated_bins(
    front_args: Callable[..., object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    in_fleet: bool,
    reached: str,
    stated: str,
    edges: list[int],
) -> None:
    front_args()
    folder = tmp_path / "build" / "engines" / "front"
    opened: list[tuple[Any, ...]] = []

    def opens(name: str) -> Callable[..., str]:
        return lambda pb_utils, front, workers, made, log: opened.append((front, *workers)) or name  # type: ignore[func-returns-value]

    names = ("server", "fleet")
    monkeypatch.setattr(placement, "TRANSPORTS", {name: opens(name) for name in names})
    monkeypatch.setattr(placement, "fleet_file", lambda: Path("fleet.toml") if in_fleet else None)
    monkeypatch.setattr(placement, "Router", lambda *given: given)
    own = PolymorphSettings(placement="partitioned", slo_ms=100.0, max_workers=3)
    made = manifest.load(folder)
    found: Any = open_router(PbUtils(), "f", made, own, PlacementSettings(stated), logger())
    transport, assignment, times, *_ = found
    assert transport == reached and opened == [("f", "f_w00", "f_w01", "f_w02")]
    assert isinstance(assignment, placement.DispatchedQueues) and isinstance(times, ServiceTimes)
    assert assignment._edges == edges


def test_a_static_engine_is_filled_and_the_dynamic_one_is_not(
    front_args: Callable[..., object], tmp_path: Path
) -> None:
    front_args()
    made = manifest.load(tmp_path / "build" / "engines" / "front")
    limits = pack_limits(made, PolymorphSettings(pack_tokens=100))
    assert [limits(edge) for edge in (16, 64, 512, 0)] == [(16, 4), (64, 16), (100, 16), (100, 16)]
    assert pack_limits(made, PolymorphSettings(pack_tokens=10**6))(0) == (512, 16)
    longer = EngineEntry("", 2048, 256, 0.0, 1.0, (Latency(2048, 1, 0.1, 0.1, 0.1),))
    longer_limits = pack_limits(replace(made, engines=(*made.engines, longer)), PolymorphSettings())
    assert longer_limits(0) == (2048, 256)
    assert longer_limits(512) == (512, 256), "the worker of a bin refuses longer packs"


def test_the_capacity_of_a_bin_is_the_texts_that_meet_the_objective() -> None:
    """One after another; at least one."""
    assert capacities(100.0, [2.0, 6.0, 300.0]) == [50.0, 16.0, 1.0]


@pytest.mark.parametrize("edges", ["[16, 16]", "[0, 4]", "[4, 2]", '["a"]', "4", "{", "[1.5]"])
def test_invalid_bin_edges_are_refused(edges: str) -> None:
    with pytest.raises(InvalidInputError, match="bin_edges: got .*; a JSON list of whole numbers, ascending"):
        PlacementSettings(bin_edges=edges).edges()


# What the server's errors mean.


class Answering:
    """A request with a given end."""

    def __init__(self, end: Callable[[], InferenceResponse]) -> None:
        self.exec = end


def client(end: Callable[[], InferenceResponse]) -> WorkerClient:
    pb_utils = PbUtils()
    pb_utils.InferenceRequest = lambda **_: Answering(end)
    return WorkerClient(pb_utils, ["EMBEDDING"])


@pytest.mark.parametrize(
    ("text", "code", "kind"),
    [
        ("Request for unknown model: 'w' is not found", TritonError.NOT_FOUND, ModelGoneError),
        ("Model 'w' is not ready", TritonError.UNAVAILABLE, ModelGoneError),
        ("Stub process 'w_0' is not healthy.", TritonError.INTERNAL, ModelDiedError),
        ("LENGTHS: 17 tokens in all; this worker takes 16", TritonError.UNSUPPORTED, WrongBinError),
        ("RuntimeError: out of luck", TritonError.INTERNAL, EngineError),
    ],
)
@pytest.mark.parametrize("raised", [False, True])
def test_what_an_error_means(text: str, code: int, kind: type[ShapeshiftError], raised: bool) -> None:
    def end() -> InferenceResponse:
        if raised:
            raise TritonModelException(text)
        return InferenceResponse(error=TritonError(text, code))

    with pytest.raises(ShapeshiftError) as caught:
        client(end).call("w", [np.ones(3, np.int64)])
    # What is raised carries no code.
    assert type(caught.value) is (EngineError if raised and kind is WrongBinError else kind)
    assert str(caught.value) == text


def test_an_answer_is_copied_and_counted() -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    answer = InferenceResponse([Tensor("STATE", np.array([64, 2, 99, 7, 8, 9])), Tensor("EMBEDDING", values)])
    caller = client(lambda: answer)
    found, state = caller.call("w", [np.ones(3, np.int64)] * 2)
    assert state == WorkerInfo(bin=64, generation=2, pid=99, call_us=7, busy_us=8, version=9)
    assert list(found) == ["EMBEDDING"]
    values[:] = 0
    assert found["EMBEDDING"].tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(EngineError, match="a number of texts that is not 3"):
        caller.call("w", [np.ones(3, np.int64)] * 3)
