"""Malformed requests to every front, drawn by hypothesis from what the fronts declare, beside valid load.

`make test-long` sends 100,000 over gRPC, and a third as many over HTTP and to the generate extension; SHAPESHIFT_FUZZ=N
sends N over gRPC.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from shapeshift.triton import metrics
from tests.fuzz import declarations, malformed, wire
from tests.fuzz.declarations import Declaration
from tests.fuzz.draw import SEED, drawn
from tests.fuzz.test_fuzz_encode import stub_pids
from tests.fuzz.valid_load import ValidLoad
from tests.fuzz.values import VALUES
from tests.fuzz.wire import CODED, TRITONS, Outcome, Wire

if TYPE_CHECKING:
    from shapeshift.triton.embedded.server import TritonServer

PROJECT = Path(__file__).resolve().parents[2]
REPOSITORY = PROJECT / "build" / "repository"
FRONTS = (
    *("encode", "classify_text", "classify_image"),
    *("generate", "generate_unary", "generate_lora", "generate_lora_unary"),
)
LEVELS = ("classify_text_small", "classify_text_large")
COUNT = int(os.environ.get("SHAPESHIFT_FUZZ", "100000"))
AT_ONCE = 20
COUNTS = {"grpc": COUNT, "http": COUNT // 3, "generate": COUNT // 3}
_ANSWERED = "shapeshift_requests_total"


@pytest.fixture(scope="module")
def fronts() -> list[Declaration]:
    if not all((REPOSITORY / name).is_dir() for name in FRONTS):
        pytest.skip(f"{REPOSITORY} lacks models: run `make engines`")
    return [declarations.read(REPOSITORY, name) for name in FRONTS]


@pytest.fixture(scope="module")
def server(
    make_server: Callable[..., TritonServer], fronts: list[Declaration], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    with make_server((REPOSITORY,), (*FRONTS, *LEVELS), tmp_path_factory.mktemp("fuzz") / "run") as running:
        yield running.wait_ready(timeout_s=300)


@pytest.mark.long
def test_requests_come_from_the_seed_and_have_every_fault(fronts: list[Declaration]) -> None:
    for front in fronts:
        # NaN is not equal to itself.
        assert repr(drawn(malformed.requests(front), 40)) == repr(drawn(malformed.requests(front), 40))
        made = drawn(malformed.requests(front), 400)
        faults = {request.fault for request in made}
        valued = {f"value of {one.name}" for one in front.inputs if one.name in VALUES}
        usual = {"datatype", "unknown input", "input twice", "input missing", "unknown output", "parameter", "version"}
        assert faults >= {*usual, *valued, "content", "shape: rank"}, front.name
        assert all(request.fault and request != front.valid for request in made)


def test_every_body_is_malformed_or_names_what_is_unknown(fronts: list[Declaration]) -> None:
    front = next(front for front in fronts if front.name == "generate_unary")
    made = drawn(malformed.bodies(front), 300)
    assert {"parameter", "unknown key", "cut short", "bytes", "value of top_p"} <= {fault for fault, _ in made}


@pytest.mark.long
@pytest.mark.server
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("protocol", COUNTS)
def test_malformed_requests_are_refused_with_a_code(
    server: TritonServer, fronts: list[Declaration], protocol: str
) -> None:
    stubs = stub_pids(server)
    failed: list[str] = []
    seen: Counter[str] = Counter()
    loop = asyncio.new_event_loop()
    connections = loop.run_until_complete(Wire(server.grpc_url, server.http_url).__aenter__())
    with ValidLoad(server.grpc_url, fronts) as load:

        @seed(SEED)
        @settings(
            max_examples=-(-COUNTS[protocol] // AT_ONCE),
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(st.lists(_cases(fronts, protocol), min_size=AT_ONCE, max_size=AT_ONCE))
        def send(cases: list[tuple[str, Callable[[Wire], Any]]]) -> None:
            outcomes: list[Outcome] = loop.run_until_complete(
                wire.all_at_once([call(connections) for _, call in cases])
            )
            server.require_running()
            for (said, _), outcome in zip(cases, outcomes, strict=True):
                seen[outcome.kind] += 1
                if outcome.kind not in (CODED, TRITONS) and len(failed) < 200:
                    failed.append(f"{outcome.kind}: {said}: {outcome.text[:300]}")

        send()
    loop.run_until_complete(connections.__aexit__())
    loop.close()
    print(f"{protocol}: {dict(seen)}; beside them right: {dict(load.right)}, wrong: {len(load.wrong)}")
    assert not failed, "\n".join(failed)
    assert sum(seen.values()) >= COUNTS[protocol]
    assert not load.wrong and all(load.right[front.name] for front in fronts if not front.streams), load.wrong[:20]
    server.require_running()
    assert stub_pids(server) == stubs
    assert internal_errors(server) == {}


def internal_errors(server: TritonServer) -> dict[str, float]:
    """By front, how many requests it has answered with INTERNAL; what it counts is exported within a second."""
    time.sleep(2.0)
    samples = metrics.scrape(server.metrics_url)
    wanted = {("code", "INTERNAL")}
    found = {dict(own)["model"]: value for (name, own), value in samples.items() if name == _ANSWERED and wanted <= own}
    assert found.keys() >= set(FRONTS)
    return {model: value for model, value in found.items() if value}


def _cases(fronts: list[Declaration], protocol: str) -> SearchStrategy[tuple[str, Callable[[Wire], Any]]]:
    """What to say of a request, and how to send it."""
    if protocol == "generate":
        return st.one_of(*(_bodies(front) for front in fronts if front.name.startswith("generate")))
    # Over HTTP a front that streams has only the generate extension.
    return st.one_of(*(_requests(front, protocol) for front in fronts if protocol == "grpc" or not front.streams))


def _requests(front: Declaration, protocol: str) -> SearchStrategy[tuple[str, Callable[[Wire], Any]]]:
    def send(request: declarations.Request) -> Callable[[Wire], Any]:
        if protocol == "grpc":
            return lambda connections: connections.over_grpc(request, front.streams)
        return lambda connections: connections.over_http(wire.infer_path(request), wire.infer_body(request))

    return malformed.requests(front).map(lambda request: (str(request), send(request)))


def _bodies(front: Declaration) -> SearchStrategy[tuple[str, Callable[[Wire], Any]]]:
    path = f"/v2/models/{front.name}/{'generate_stream' if front.streams else 'generate'}"
    return malformed.bodies(front).map(
        lambda made: (f"{path} {made[0]} {made[1]!r}", lambda connections: connections.over_http(path, made[1]))
    )
