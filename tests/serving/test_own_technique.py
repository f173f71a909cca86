"""A technique that is not the project's, one class and one policy, in a real Triton."""

from __future__ import annotations

import hashlib
import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton

from shapeshift.triton.embedded.server import TritonServer
from tests.docs.docs_pages import PROJECT

BACKENDS = Path(__file__).parent / "backends"
CONFIG = """backend: "shortest_first"
input [{ name: "TEXT" data_type: TYPE_STRING dims: [1] }]
output [{ name: "DIGEST" data_type: TYPE_STRING dims: [1] }]
instance_group [{ kind: KIND_CPU }]
"""


@pytest.fixture(scope="module")
def client(
    make_server: Callable[..., TritonServer], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[triton.InferenceServerClient]:
    folder = tmp_path_factory.mktemp("own")
    (folder / "repository" / "digest" / "1").mkdir(parents=True)
    (folder / "repository" / "digest" / "config.pbtxt").write_text(CONFIG)
    with make_server([folder / "repository"], ["digest"], folder / "run", BACKENDS) as server:
        server.wait_ready()
        yield triton.InferenceServerClient(server.grpc_url)


def ask(client: triton.InferenceServerClient, text: str, then: Callable[[str, Any, Any], None]) -> Any:
    tensor = triton.InferInput("TEXT", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([text.encode()], dtype=object))
    return client.async_infer("digest", [tensor], callback=lambda result, error: then(text, result, error))


@pytest.mark.server
def test_the_policy_decides_who_is_served_next(client: triton.InferenceServerClient) -> None:
    ended: queue.Queue[tuple[str, Any, Any]] = queue.Queue()
    texts = ["a" * length for length in range(80, 0, -4)]
    for text in texts:
        ask(client, text, lambda *answer: ended.put(answer))
    answers = [ended.get(timeout=120) for _ in texts]
    for text, result, error in answers:
        assert error is None, error
        digest = hashlib.pbkdf2_hmac("sha256", text.encode(), b"", 10_000 * len(text)).hex()
        assert result.as_numpy("DIGEST").item().decode() == digest
    # The first ones were served before the others came.
    lengths = [len(text) for text, _, _ in answers[len(answers) // 2 :]]
    assert lengths == sorted(lengths) != sorted(lengths, reverse=True)


@pytest.mark.server
def test_what_every_front_does_it_does_too(client: triton.InferenceServerClient) -> None:
    """Refusals of parameters and cancellations come with the class."""
    tensor = triton.InferInput("TEXT", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([b"a"], dtype=object))
    with pytest.raises(triton.InferenceServerException, match="parameter latency: .*did you mean latency_ms"):
        client.infer("digest", [tensor], parameters={"latency": 1.0})
    ended: queue.Queue[tuple[str, Any, Any]] = queue.Queue()
    ask(client, "e" * 400, lambda *answer: ended.put(answer))
    ask(client, "f" * 401, lambda *answer: ended.put(answer)).cancel()
    assert {text[0]: str(error) for text, _, error in (ended.get(timeout=120) for _ in range(2))}["f"].startswith(
        "[StatusCode.CANCELLED]"
    )


def test_the_page_shows_this_technique() -> None:
    page = (PROJECT / "docs" / "own_technique.md").read_text()
    source = (BACKENDS / "shortest_first" / "model.py").read_text()
    assert source in page and CONFIG in page
    assert len([line for line in source.splitlines() if line]) < 60
