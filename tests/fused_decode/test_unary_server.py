"""`generate_unary` under the load, and the faults, that its callers meet on a real server."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as sync_client
import tritonclient.grpc.aio as grpc_client
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from shapeshift.build_engines.decode import DecodeFrontConfig, publish
from shapeshift.build_engines.paths import BuildPaths
from shapeshift.build_engines.repository import front_models
from shapeshift.triton import model_config
from shapeshift.triton.embedded.server import TritonServer
from tests.compiled import link_kernels
from tests.fused_decode.checkpoints import LONGEST, make_checkpoint
from tests.gauges import total
from tests.waiting import wait_for

pytestmark = pytest.mark.server

PROJECT = Path(__file__).resolve().parents[2]
MODELS = ("generate", "generate_unary")
# As decoupled BLS calls, 400 at once ended the forwarding process after 400 to 5,600 requests.
REQUESTS, AT_ONCE = 600, 200


@pytest.fixture(scope="module")
def server(
    make_server: Callable[..., TritonServer], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    root = tmp_path_factory.mktemp("unary")
    checkpoint = make_checkpoint(root / "checkpoints" / "small")
    link_kernels(root / "build")
    paths = BuildPaths(root, root / "build", root / "model_repository")
    for model in MODELS:
        config = model_config.read(PROJECT / "tests" / "model_repository" / model / "config.pbtxt")
        if model == "generate":
            for name, value in {"checkpoint": checkpoint, "max_length": LONGEST, "precision": "f32"}.items():
                model_config.set_parameter(config, name, str(value))
        (root / "model_repository" / model).mkdir(parents=True)
        model_config.write(config, root / "model_repository" / model / "config.pbtxt")
    for front in front_models(paths, set()):
        assert isinstance(front, DecodeFrontConfig)
        publish(front, paths, lambda step: None)
    with make_server((paths.generated,), MODELS, tmp_path_factory.mktemp("run")) as running:
        yield running.wait_ready()


def inputs(max_tokens: int) -> list[Any]:
    text = grpc_client.InferInput("text_input", [1], "BYTES")
    text.set_data_from_numpy(np.array([b"abc"], dtype=object))
    count = grpc_client.InferInput("max_tokens", [1], "INT32")
    count.set_data_from_numpy(np.array([max_tokens], np.int32))
    flag = grpc_client.InferInput("ignore_eos", [1], "BOOL")
    flag.set_data_from_numpy(np.array([True]))
    return [text, count, flag]


async def burst(url: str, count: int, at_once: int, max_tokens: int, timeout_s: float = 60.0) -> Counter[str]:
    """How so many requests ended."""
    client = grpc_client.InferenceServerClient(url)
    ended: Counter[str] = Counter()
    left = iter(range(count))

    async def work() -> None:
        for _ in left:
            try:
                await client.infer("generate_unary", inputs(max_tokens), client_timeout=timeout_s)
                ended["OK"] += 1
            except Exception as error:  # noqa: BLE001  each kind is counted
                ended[str(error)] += 1

    await asyncio.gather(*(work() for _ in range(at_once)))
    await client.close()
    return ended


def stub_of(server: TritonServer, model: str) -> int:
    """The process of a model of the server."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                line = (folder / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
                parent = re.search(r"^PPid:\s+(\d+)", (folder / "status").read_text(), re.MULTILINE)
            except OSError:
                continue
            if "python_backend_stub" in line and f"/{model}/1/" in line and parent and int(parent[1]) == server.pid:
                return int(folder.name)
    raise AssertionError(f"no process of {model}")


def test_beam_search_is_forwarded(server: TritonServer) -> None:
    """Its inputs, its rows and its errors, over gRPC."""
    client = sync_client.InferenceServerClient(server.grpc_url)
    given: dict[str, np.ndarray] = {
        "text_input": np.array([b"Return", b"Open"], dtype=object),
        "max_tokens": np.array([9], np.int32),
        "num_beams": np.array([4], np.int32),
        "num_return_sequences": np.array([3], np.int32),
        "early_stopping": np.array([b"never"], dtype=object),
        "length_penalty": np.array([0.5], np.float32),
    }

    def infer(model: str, **others: np.ndarray) -> sync_client.InferResult:
        tensors = []
        for name, values in (given | others).items():
            tensors.append(sync_client.InferInput(name, values.shape, np_to_triton_dtype(values.dtype)))
            tensors[-1].set_data_from_numpy(values)
        return client.infer(model, tensors, client_timeout=60)

    answer = infer("generate_unary")
    scores = answer.as_numpy("sequence_score").reshape(2, 3)
    assert (np.diff(scores) <= 0).all() and np.isfinite(scores).all()
    assert answer.as_numpy("choice_index").tolist() == list(range(6)) and len(answer.as_numpy("text_output")) == 6
    assert len({*answer.as_numpy("text_output")[:3].tolist()}) > 1
    with pytest.raises(InferenceServerException, match=r"num_return_sequences: got 5; at most num_beams \(4\)"):
        infer("generate_unary", num_return_sequences=np.array([5], np.int32))


def test_many_at_once_are_all_answered(server: TritonServer) -> None:
    before = stub_of(server, "generate_unary")
    ended = asyncio.run(burst(server.grpc_url, REQUESTS, AT_ONCE, max_tokens=1))
    assert ended == {"OK": REQUESTS}
    assert stub_of(server, "generate_unary") == before


@pytest.mark.kills
def test_requests_that_a_dead_process_held_are_answered(server: TritonServer) -> None:
    victim = stub_of(server, "generate")

    def kill_while_they_run() -> None:
        wait_for(lambda: total(server, "requests_running", model="generate") >= 8)
        os.kill(victim, signal.SIGKILL)

    killer = threading.Thread(target=kill_while_they_run)
    killer.start()
    begun = time.monotonic()
    # So many tokens take seconds on any machine, and less than the clients wait.
    ended = asyncio.run(burst(server.grpc_url, 40, 40, max_tokens=LONGEST - 100, timeout_s=170.0))
    took = time.monotonic() - begun
    killer.join()
    assert "OK" not in ended and sum(ended.values()) == 40
    assert {text for text in ended if "UNAVAILABLE" in text} == set(ended), ended
    assert took < 160, "no client waited for its own time-out"
