"""The fuzz run against a real server, and what must hold after it."""

from __future__ import annotations

import http.client
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests import precision
from tests.fuzz import encode
from tests.sampling import few

if TYPE_CHECKING:
    from shapeshift.triton.embedded.server import TritonServer

# With 2,000 cases each kind is drawn at least 30 times.
IN_EVERY_RUN, LONG = 2_000, 10_000
SEED = 20_240


def test_cases_come_from_the_seed() -> None:
    made = list(encode.cases(1, 300))
    assert made == list(encode.cases(1, 300))
    assert made != list(encode.cases(2, 300))


def test_every_kind_of_case_is_drawn_often() -> None:
    drawn = Counter(case.kind for case in encode.cases(SEED, IN_EVERY_RUN))
    assert len(drawn) == len(encode._HTTP) + len(encode._GRPC)
    assert min(drawn.values()) >= 30


@pytest.mark.server
@pytest.mark.timeout(300)
@pytest.mark.parametrize("count", few((IN_EVERY_RUN, LONG), (IN_EVERY_RUN,)))
def test_malformed_requests_are_refused_and_leave_no_trace(
    encode_server: TritonServer, flushed: Callable[..., Callable[..., float]], count: int
) -> None:
    vector = good_vector(encode_server)
    stubs = stub_pids(encode_server)
    before = flushed()
    outcome = encode.run(encode_server.http_url, encode_server.grpc_url, count, SEED)
    after = flushed()
    assert outcome.sent == count, outcome.table()
    assert not outcome.served, outcome.served[:3]
    assert not outcome.unanswered and not outcome.surplus, outcome.table()

    encode_server.require_running()
    assert [status(encode_server, path) for path in ("/v2/health/live", "/v2/models/encode/ready")] == [200, 200]
    assert stub_pids(encode_server) == stubs and stubs
    assert all(Path(f"/proc/{pid}").exists() for pid in stubs)
    assert "could not be sent" not in encode_server.settings.log.read_text()
    least = precision.least_cosine_of_two(encode_server.settings.repositories[0], "encode")
    assert float(good_vector(encode_server) @ vector) >= least

    assert after("shapeshift_requests_waiting") == after("shapeshift_requests_running") == 0
    refused = after("shapeshift_requests_total", code="INVALID_ARG") - before(
        "shapeshift_requests_total", code="INVALID_ARG"
    )
    assert 0 < refused < count
    for code in ("OK", "INTERNAL", "UNAVAILABLE"):
        labels = {"code": code}
        assert after("shapeshift_requests_total", **labels) == before("shapeshift_requests_total", **labels), code


def status(server: TritonServer, path: str) -> int:
    """What the server answers to a plain GET."""
    connection = http.client.HTTPConnection(server.http_url, timeout=30)
    connection.request("GET", path)
    found = connection.getresponse().status
    connection.close()
    return found


def good_vector(server: TritonServer) -> np.ndarray:
    """The embedding of a well-formed request."""
    tensor = {"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "data": ["still here"]}
    connection = http.client.HTTPConnection(server.http_url, timeout=30)
    connection.request("POST", "/v2/models/encode/infer", json.dumps({"inputs": [tensor]}))
    answer = connection.getresponse()
    body = json.loads(answer.read())
    connection.close()
    assert answer.status == 200, body
    vector = np.array(body["outputs"][0]["data"])
    assert vector.shape == (384,) and np.linalg.norm(vector) == pytest.approx(1, abs=1e-4)
    return vector


def stub_pids(server: TritonServer) -> set[int]:
    """The stub processes of the server that run now."""
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                line = (folder / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if "triton_python_backend_stub" in line and parent == server.pid:
                found.add(int(folder.name))
    return found
