"""A front over emulated engines in this process, with a fake of Triton's side; a router over fake workers."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import json_format

from shapeshift.engines.execution.engine_set import EngineSet
from shapeshift.engines.execution.request import TextRequest
from shapeshift.engines.interfaces import Array, Ids
from shapeshift.engines.providers.emulated import EmulatedEngine
from shapeshift.errors import EngineError, ModelDiedError, ModelGoneError
from shapeshift.polymorph.front import TextFront
from shapeshift.polymorph.policy.dispatch import Rules
from shapeshift.polymorph.policy.dispatcher import Dispatcher
from shapeshift.polymorph.router import router as router_module
from shapeshift.polymorph.router.assignment import DispatchedQueues, SharedQueue
from shapeshift.polymorph.router.bls_transport import BlsTransport
from shapeshift.polymorph.router.membership import Pace
from shapeshift.polymorph.router.transport import Transport, WorkerInfo, WrongBinError
from shapeshift.polymorph.service_times import ServiceTimes
from shapeshift.polymorph.settings import PolymorphSettings, worker_name
from shapeshift.polymorph.worker import TextWorker
from shapeshift.serving import model_args
from shapeshift.serving.bounds import SloClasses, classes_of
from shapeshift.triton import model_config
from tests.fakes import PbUtils, as_served, logger


class Gate:
    """Wraps the engines: can hold calls back, and make them fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.open.set()
        self.entered = threading.Semaphore(0)
        self.packs: list[int] = []
        self.fail: Exception | None = None
        compute = EmulatedEngine.run

        def run(engine: EmulatedEngine, inputs: Mapping[str, Array]) -> dict[str, Array]:
            self.packs.append(int(inputs["SEGMENTS"].max()))
            self.entered.release()
            assert self.open.wait(120)
            if self.fail is not None:
                raise self.fail
            return compute(engine, inputs)

        monkeypatch.setattr(EmulatedEngine, "run", run)
        # A call that no request makes.
        monkeypatch.setattr(EngineSet, "warm_up", lambda engines: None)

    def hold(self) -> None:
        """Let no call end from now on."""
        self.open.clear()

    def wait_held(self) -> None:
        """Wait for a call to arrive that no earlier `wait_held` has seen."""
        assert self.entered.acquire(timeout=30)

    def release(self) -> None:
        """Let every call end."""
        self.open.set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


def args_of(folder: Path, **parameters: object) -> dict[str, str]:
    """The `args` of `initialize` for the generated model in `folder`, with other parameters if given."""
    config = model_config.read(folder / "config.pbtxt")
    for name, value in parameters.items():
        model_config.set_parameter(config, name, str(value))
    return {
        "model_config": json.dumps(json_format.MessageToDict(config, preserving_proto_field_name=True)),
        "model_name": folder.name,
        "model_repository": str(folder),
        "model_version": "1",
        "model_instance_name": f"{folder.name}_0",
        "model_instance_kind": "CPU",
        "model_instance_device_id": "0",
    }


@pytest.fixture
def front_args(
    tmp_path: Path, add_front: Callable[..., Path], build_fronts: Callable[[Path, Path], Path]
) -> Callable[..., dict[str, str]]:
    """A function that builds a front model with emulated engines; returns the `args` of `initialize`."""

    def make(**parameters: object) -> dict[str, str]:
        stated = {"engine_threads": 1, "bins": "16,64", **parameters}
        add_front(tmp_path / "model_repository", "front", **stated)
        return args_of(build_fronts(tmp_path / "model_repository", tmp_path / "build") / "front")

    return make


@pytest.fixture
def pb_utils() -> PbUtils:
    return PbUtils()


@pytest.fixture
def make_worker(
    front_args: Callable[..., dict[str, str]], pb_utils: PbUtils, tmp_path: Path
) -> Iterator[Callable[..., TextWorker]]:
    """A function that starts worker `number` of a front that was built, with other parameters if given.

    A process makes a metric family once: a worker beside a front needs Triton's side for itself.
    """
    started: list[TextWorker] = []

    def make(number: int = 0, own: PbUtils | None = None, **parameters: object) -> TextWorker:
        folder = tmp_path / "build" / "repository" / worker_name("front", number)
        started.append(TextWorker(own or pb_utils, model_args.read(args_of(folder, **parameters))))
        return started[-1]

    yield make
    for worker in started:
        worker.close()


@pytest.fixture
def make_front(front_args: Callable[..., dict[str, str]], pb_utils: PbUtils) -> Iterator[Callable[..., TextFront]]:
    """A function that starts a front; every one is closed when the test ends."""
    started: list[TextFront] = []

    def make(**parameters: object) -> TextFront:
        started.append(as_served(TextFront(pb_utils, model_args.read(front_args(**parameters)))))
        return started[-1]

    yield make
    for front in started:
        front.close()


class FakeWorker:
    """One worker process and what it does with a call.

    manner: good, stuck (holds calls until `free` or a restart), sick (its process has died), or failing (its
    engine fails). ready: whether the model is loaded. before: called with the texts of each call, first of all.
    """

    def __init__(self, bin_edge: int) -> None:
        self.bin = bin_edge
        self.generation = 0
        self.ready = True
        self.manner = "good"
        self.texts: list[int] = []
        self.before: Callable[[Sequence[Ids]], object] = len
        self.held = 0
        self._free = threading.Event()

    def stick(self) -> None:
        """Hold calls from now on."""
        if self._free.is_set():
            self._free = threading.Event()
        self.manner = "stuck"

    def free(self) -> None:
        """Answer the calls that are held, and further ones."""
        self.manner = "good"
        self._free.set()

    def restart(self, bin_edge: int | None = None) -> None:
        """Replace the process; the calls of the old one end with it."""
        self.generation += 1
        self.bin = self.bin if bin_edge is None else bin_edge
        self.ready = True
        self.free()

    def call(self, texts: Sequence[Ids]) -> tuple[dict[str, Array], WorkerInfo]:
        """As `WorkerClient.call`: each text's first id and its length, and the state."""
        self.before(texts)
        info = WorkerInfo(self.bin, self.generation, 1)
        if not self.ready:
            raise ModelGoneError("the model is not ready")
        if self.manner == "stuck":
            self.held += 1
            assert self._free.wait(120)
        if self.manner == "sick" or self.generation != info.generation:
            raise ModelDiedError("the process is not healthy")
        if self.manner == "failing" and texts:
            raise EngineError("out of luck")
        if sum(map(len, texts)) > (info.bin or 512):
            raise WrongBinError("too long")
        self.texts += [int(ids[0]) for ids in texts]
        vectors = np.array([[ids[0], len(ids)] for ids in texts]).reshape(len(texts), 2)
        return {"EMBEDDING": vectors}, info


class FakeWorkers(dict[str, FakeWorker]):
    """Replaces `WorkerClient`."""

    def call(self, worker: str, texts: Sequence[Ids]) -> tuple[dict[str, Array], WorkerInfo]:
        return self[worker].call(texts)


class Asked:
    """A request of texts of the given lengths to a router, and how it ended."""

    _numbers = itertools.count(1)

    def __init__(self, router: router_module.Router, *lengths: int, **options: object) -> None:
        self.numbers = [next(self._numbers) for _ in lengths]
        self._lengths = lengths
        self._ended: list[TextRequest] = []
        self._done = threading.Event()
        texts = [np.full(length, number) for length, number in zip(lengths, self.numbers, strict=True)]
        self._request = TextRequest(texts, self._note, **options)  # type: ignore[arg-type]
        router.submit(self._request)

    @property
    def answered(self) -> bool:
        return self._done.is_set()

    def error(self) -> Exception | None:
        """Wait for the end; the error, or None if every text got what belongs to it."""
        assert self._done.wait(120), "the request was not answered"
        assert len(self._ended) == 1
        if self._request.error is None:
            wanted = [[number, length] for number, length in zip(self.numbers, self._lengths, strict=True)]
            assert self._request.outputs["EMBEDDING"].tolist() == wanted
        return self._request.error

    def _note(self, request: TextRequest) -> None:
        self._ended.append(request)
        self._done.set()


class Router(router_module.Router):
    """A router over fake workers."""

    workers: FakeWorkers
    lines: list[str]
    assignment: SharedQueue | DispatchedQueues
    transport: BlsTransport

    def ask(self, *lengths: int, **options: object) -> Asked:
        """Submit one request."""
        return Asked(self, *lengths, **options)

    def wait(self, condition: Callable[[], bool]) -> None:
        """Wait until it holds."""
        deadline = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < deadline, (self.lines[-10:], self.waiting, self.running)
            time.sleep(0.002)

    def joined(self, *names: str) -> bool:
        """Whether the workers that get texts are these."""
        return {name for name, worker in self.members.workers.items() if worker.joined} == set(names)

    def timeouts(self, name: str) -> int:
        """In a row."""
        return self.members.workers[name].timeouts

    def check_rest(self) -> None:
        """Wait until the router has nothing to do, and check that nothing is left over."""
        pending = self.members.pending
        self.wait(lambda: self.waiting == self.running == 0 and not self.members.calls())
        self.wait(lambda: self.transport.pool.abandoned() == 0)
        with self._lock:
            assert pending.rows == 0 and not pending.all() and not self.assignment.waiting()
            pending.check_integrity()
            for name in self.members.workers:
                assert self.assignment.outstanding(name) == 0
            if isinstance(self.assignment, DispatchedQueues):
                dispatcher = self.assignment.dispatcher
                assert isinstance(dispatcher, Dispatcher)
                dispatcher.check_integrity()
                counts = {name: count for queue in dispatcher._queues for name, count in queue.outstanding.items()}
                assert counts == self.assignment._foreign


EDGES = (16, 64, 512)


@pytest.fixture
def no_probes() -> Callable[[Router], None]:
    """A function after which a router probes no worker, and no probe is in flight."""

    def quieten(router: Router) -> None:
        router.pace = replace(router.pace, min_pause_s=1e6, max_pause_s=1e6)

        def rests() -> bool:
            with router._lock:
                return not any(worker.probe_due or worker.calls for worker in router.members.workers.values())

        router.wait(rests)

    return quieten


@pytest.fixture
def make_router() -> Iterator[Callable[..., Router]]:
    """A function that starts a router over fake workers with the given bins, `a`, `b`, ...; every one is closed
    when the test ends. timeout_s: after which a call is abandoned; reaching: adds workers to those of the given bins
    and returns what reaches them too; max_abandoned: calls of a worker; other keywords are settings.
    """
    started: list[Router] = []

    def make(
        *bins: int,
        timeout_s: float = 60.0,
        wait: bool = True,
        reaching: Callable[[FakeWorkers, Transport], Transport] = lambda workers, own: own,
        max_abandoned: int = 200,
        **parameters: object,
    ) -> Router:
        pace = Pace(watch_s=0.005, probe_s=0.02, min_pause_s=0.02, max_pause_s=0.05, least_limit_s=timeout_s)
        workers = FakeWorkers({chr(ord("a") + number): FakeWorker(edge) for number, edge in enumerate(bins)})
        settings = PolymorphSettings(**parameters)  # type: ignore[arg-type]
        times = ServiceTimes(
            {edge: [1.0] * 513 for edge in EDGES}, [1.0] * 513, {edge: [1.0] * 513 for edge in (0, *EDGES)}
        )

        def limits(edge: int) -> tuple[int, int]:
            return edge or 100, 4

        classes = SloClasses(classes_of(settings.slo_classes))
        assignment: SharedQueue | DispatchedQueues = SharedQueue(limits, times.of_row, classes)
        if any(bins):
            assignment = DispatchedQueues(
                Dispatcher(EDGES, [1.0, 2.0, 4.0], Rules()), EDGES, [8, 4, 2], limits, times.of_row, classes
            )
        lines: list[str] = []
        transport = BlsTransport(workers.call, list(workers), 0.0, max_abandoned, max(timeout_s, 0.1))
        router = Router(reaching(workers, transport), assignment, times, settings, logger(lines), pace)
        router.workers, router.lines, router.assignment, router.transport = workers, lines, assignment, transport
        started.append(router)
        if wait:
            router.wait(lambda: router.joined(*workers))
        return router

    yield make
    for router in started:
        for worker in router.workers.values():
            worker.free()
        router.close()
