"""A front whose workers Triton's own backends would serve, partly on other nodes: gRPC servers in this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import grpc
import numpy as np
import pytest

from shapeshift.engines.execution.request import TextRequest
from shapeshift.polymorph.router import bls_transport, membership, placement
from shapeshift.polymorph.router.membership import Pace
from shapeshift.polymorph.router.placement import open_router
from shapeshift.polymorph.router.router import Router
from shapeshift.polymorph.settings import PlacementSettings, PolymorphSettings
from shapeshift.serving.front import FLEET_FILE_VARIABLE, NODE_VARIABLE
from shapeshift.triton import async_client
from tests import waiting
from tests.fakes import PbUtils, logger
from tests.fleet import fleet_files
from tests.fleet.fake_node import FakeNode, Refusal, Tensors
from tests.polymorph import engine_models
from tests.polymorph.engine_models import EngineModel, wanted

WORKER = "front_w00"


class RemoteNode:
    """A node with one worker. go_on: while it is not set, texts are not answered; most: calls at once so far."""

    def __init__(self) -> None:
        self._pb_utils = PbUtils()
        self.go_on = threading.Event()
        self.go_on.set()
        self.slow_s = 0.0
        self.running = self.most = self.texts = 0
        self.server = FakeNode({WORKER, "front"}, self._infer)

    def serve(self, edge: int, version: int | None = None) -> None:
        """Let the worker have this bin from now on. version: that of its engine, by default that of the front's."""
        version = engine_models.version(edge) if version is None else version
        self._pb_utils.models = {f"{WORKER}/{version}": EngineModel(self._pb_utils, edge)}
        self.server.versions = {WORKER: [version]}

    def restart(self) -> None:
        self.server = FakeNode(self.server.models, self._infer, self.server.port)

    def _infer(self, name: str, inputs: Tensors) -> Tensors:
        if name not in self._pb_utils.models:
            raise Refusal(grpc.StatusCode.UNAVAILABLE, f"Request for unknown model: '{name}' is not at ready state")
        self.running += 1
        self.most = max(self.most, self.running)
        if inputs["INPUT_IDS"].any():
            self.texts += 1
            assert self.go_on.wait(120)
            time.sleep(self.slow_s)
        tensors = [self._pb_utils.Tensor(key, np.array(values)) for key, values in inputs.items()]
        model, version = name.split("/")
        request = self._pb_utils.InferenceRequest(
            model_name=model, inputs=tensors, requested_output_names=["EMBEDDING"], model_version=int(version)
        )
        answer = request.exec()
        self.running -= 1
        return {tensor.name(): tensor.as_numpy() for tensor in answer.output_tensors()}


class Site:
    """A front of the node `here`, whose own worker has the shortest bin, and two more nodes with the longest."""

    def __init__(self, file: Path) -> None:
        self.nodes = {"x": RemoteNode(), "y": RemoteNode()}
        self.lines: list[str] = []
        self._file = file
        pb_utils = PbUtils()
        pb_utils.models[f"{WORKER}/{engine_models.version(16)}"] = EngineModel(pb_utils, 16)
        for node in self.nodes.values():
            node.serve(64)
        self.state("x", "y")
        own = PolymorphSettings(
            placement="partitioned", worker_backend="triton", workers=1, max_workers=1, slo_ms=100.0
        )
        edges, made = PlacementSettings(bin_edges="[16, 32, 64]"), engine_models.made()
        self.router = open_router(pb_utils, "front", made, own, edges, logger(self.lines))

    def state(self, *names: str) -> None:
        """Which nodes are in the fleet."""
        at = {name: self.nodes[name].server.address for name in names} | {"here": "127.0.0.1:1"}
        fleet_files.write(self._file, {name: (one, f"http://{one}/metrics") for name, one in at.items()})

    def joined(self) -> dict[str, int]:
        """The workers that get texts, and their bins."""
        found = self.router.members.workers.values()
        return {worker.name: worker.info.bin for worker in found if worker.joined and worker.info}

    def wait_joined(self, **bins: int) -> None:
        """By node."""
        wanted = {f"{node}/{WORKER}" if node != "here" else WORKER: edge for node, edge in bins.items()}
        waiting.wait_for(lambda: self.joined() == wanted, timeout_s=30, pause_s=0.01)

    def begin(self, *lengths: int) -> Callable[[], TextRequest]:
        """Submit one request; what is returned waits for its end and checks that it was answered."""
        ended = threading.Event()
        texts = [np.arange(2, length + 2, dtype=np.int64) for length in lengths]
        request = TextRequest(texts, lambda _: ended.set())
        self.router.submit(request)

        def end() -> TextRequest:
            assert ended.wait(120)
            assert request.error is None
            assert request.outputs["EMBEDDING"].tolist() == [wanted(range(2, length + 2)) for length in lengths]
            return request

        return end

    def begin_until_it_has_one(self, node: RemoteNode) -> list[Callable[[], TextRequest]]:
        """Submit requests until the node computes a text: which worker is the nearest depends on the machine's load."""
        before, begun = node.texts, []

        def has_one() -> bool:
            begun.append(self.begin(50))
            return node.texts > before

        waiting.wait_for(has_one, timeout_s=30, pause_s=0.002)
        return begun

    def ask(self, *lengths: int) -> None:
        self.begin(*lengths)()

    def close(self) -> None:
        for node in self.nodes.values():
            node.go_on.set()
        self.router.close()
        for node in self.nodes.values():
            node.server.close()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    file = tmp_path / "fleet.toml"
    monkeypatch.setenv(FLEET_FILE_VARIABLE, str(file))
    monkeypatch.setenv(NODE_VARIABLE, "here")
    monkeypatch.setattr(bls_transport, "_SETTLED_S", 0.0)
    monkeypatch.setattr(async_client, "_RECONNECT_MS", 50)
    monkeypatch.setattr(placement, "Router", partial(Router, pace=Pace(max_pause_s=0.1)))
    made = Site(file)
    yield made
    made.close()


def test_workers_of_all_nodes_answer_each_with_its_bin(site: Site) -> None:
    site.wait_joined(here=16, x=64, y=64)
    site.ask(3)
    requests = [site.begin(3, 64, 16, 17, 40) for _ in range(30)]
    for end in requests:
        end()
    assert all(node.texts for node in site.nodes.values())
    assert max(node.most for node in site.nodes.values()) <= membership.MAX_IN_FLIGHT


def test_a_probe_tells_which_bin_a_worker_of_another_node_has_now(site: Site) -> None:
    site.wait_joined(here=16, x=64, y=64)
    for edge in (32, 16, 64):
        site.nodes["x"].serve(edge)
        site.ask(20, 50)
        site.wait_joined(here=16, x=edge, y=64)
    site.nodes["x"].server.models = {"front"}
    site.nodes["x"].server.versions = {}
    site.wait_joined(here=16, y=64)


def test_a_node_that_dies_costs_no_request_and_is_found_again(site: Site) -> None:
    site.wait_joined(here=16, x=64, y=64)
    dying = site.nodes["x"]
    dying.go_on.clear()
    requests = site.begin_until_it_has_one(dying)
    closing = threading.Thread(target=dying.server.close)
    closing.start()
    for end in requests:
        end()
    dying.go_on.set()
    closing.join()
    site.wait_joined(here=16, y=64)
    dying.restart()
    dying.serve(64)
    site.wait_joined(here=16, x=64, y=64)


def test_a_late_call_is_cancelled_on_its_node_and_retried_elsewhere(site: Site) -> None:
    site.wait_joined(here=16, x=64, y=64)
    late = site.nodes["x"]
    late.go_on.clear()
    for end in site.begin_until_it_has_one(late):
        end()
    waiting.wait_for(lambda: late.server.cut_off >= 1, timeout_s=30)
    values = {metric.name: metric for metric in site.router.metrics()}
    assert values["shapeshift_timeouts_total"].value >= 1  # type: ignore[union-attr]
    assert any(line.startswith(f"x/{WORKER}: left, it did not answer in time") for line in site.lines)
    late.go_on.set()
    site.wait_joined(here=16, x=64, y=64)


def test_what_a_worker_takes_beyond_the_profile_counts_as_its_delay(site: Site) -> None:
    site.wait_joined(here=16, x=64, y=64)
    site.nodes["x"].slow_s = 0.1

    def delayed() -> bool:
        for end in [site.begin(50) for _ in range(6)]:
            end()
        return site.router.members.workers[f"x/{WORKER}"].delay_ms > 30

    waiting.wait_for(delayed, timeout_s=30)


@pytest.mark.parametrize("version", [1, engine_models.version(64) + 10**6])
def test_a_worker_with_other_engines_is_never_used_and_its_node_is_named(site: Site, version: int) -> None:
    site.wait_joined(here=16, x=64, y=64)
    # While calls run, which is when nobody probes it.
    requests = [site.begin(50, 40) for _ in range(20)]
    site.nodes["x"].serve(64, version)
    before = site.nodes["x"].texts
    for end in [*requests, *(site.begin(50) for _ in range(10))]:
        end()
    site.wait_joined(here=16, y=64)
    assert site.nodes["x"].texts - before <= membership.MAX_IN_FLIGHT, "those that had begun"
    text = f"x/{WORKER}: not used: its engines are not those of this front"
    waiting.wait_for(lambda: any(line.startswith(text) for line in site.lines))
    site.nodes["x"].serve(64)
    site.wait_joined(here=16, x=64, y=64)


def test_a_node_that_fails_every_call_gets_no_more_texts(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.wait_joined(here=16, x=64, y=64)

    def fail(name: str, inputs: Tensors) -> Sequence[object]:
        raise Refusal(grpc.StatusCode.INTERNAL, "out of memory")

    monkeypatch.setattr(site.nodes["x"].server, "_infer", fail)
    for _ in range(20):
        site.ask(50)
    monkeypatch.undo()
    site.wait_joined(here=16, x=64, y=64)
