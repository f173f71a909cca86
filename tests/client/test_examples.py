from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from client import encode_grpc, encode_http

CLIENT = Path(__file__).resolve().parents[2] / "client"
AWKWARD = 'a "quoted" \\ text\nof two lines\tand é'


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_grpc_encodes_more_texts_than_one_batch_holds(server: Any) -> None:
    with tritonclient.grpc.InferenceServerClient(server.url) as client:
        vectors = encode_grpc.encode(client, ["text"] * 100)
    assert vectors.shape == (100, 384)
    assert [request.inputs[0].shape[0] for request in server.received] == [64, 36]
    assert server.received[0].parameters["truncate"].bool_param


def test_grpc_encodes_ids_padded_with_0(server: Any) -> None:
    with tritonclient.grpc.InferenceServerClient(server.url) as client:
        assert encode_grpc.encode_ids(client, [[101, 5, 6, 102], [101, 102]]).shape == (2, 384)
    contents = [np.frombuffer(raw, dtype=np.int64).tolist() for raw in server.received[0].raw_input_contents]
    assert contents == [[101, 5, 6, 102, 101, 102, 0, 0], [1, 1, 1, 1, 1, 1, 0, 0]]
    assert [one.name for one in server.received[0].inputs] == ["INPUT_IDS", "ATTENTION_MASK"]


def test_grpc_retries_only_when_unavailable(server: Any) -> None:
    unavailable = grpc.StatusCode.UNAVAILABLE
    with tritonclient.grpc.InferenceServerClient(server.url) as client:
        server.failures.append(unavailable)
        assert encode_grpc.encode(client, ["text"]).shape == (1, 384)
        assert len(server.received) == 2
        server.failures.append(grpc.StatusCode.INVALID_ARGUMENT)
        with pytest.raises(InferenceServerException, match="INVALID_ARGUMENT"):
            encode_grpc.encode(client, ["text"])
        assert len(server.received) == 3
        server.failures.extend([unavailable] * 9)
        with pytest.raises(InferenceServerException, match="UNAVAILABLE"):
            encode_grpc.encode(client, ["text"])
        assert len(server.received) == 3 + encode_grpc.ATTEMPTS


def test_http_retries_only_when_unavailable(http_server: Any) -> None:
    with encode_http.connect(http_server.url) as client:
        http_server.failures.append(503)
        assert encode_http.encode(client, ["text"] * 2).shape == (2, 384)
        assert len(http_server.bodies) == 2
        assert http_server.bodies[0]["parameters"]["truncate"] is True
        http_server.failures.append(400)
        with pytest.raises(InferenceServerException, match="400"):
            encode_http.encode(client, ["text"])
        assert len(http_server.bodies) == 3
        http_server.failures.extend([503] * 9)
        with pytest.raises(InferenceServerException, match="503"):
            encode_http.encode(client, ["text"])
        assert len(http_server.bodies) == 3 + encode_http.ATTEMPTS


def test_the_python_examples_start_as_files(server: Any, http_server: Any) -> None:
    for name, url in (("encode_grpc.py", server.url), ("encode_http.py", http_server.url)):
        done = run(sys.executable, str(CLIENT / name), "--url", url, "some text", "another")
        assert done.returncode == 0, done.stderr
        assert "'another': 384 numbers" in done.stdout


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl_sends_json_and_retries_when_unavailable(http_server: Any) -> None:
    script = str(CLIENT / "encode.sh")
    http_server.failures.append(503)
    done = run("bash", script, AWKWARD, f"http://{http_server.url}")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["outputs"][0]["shape"] == [1, 384]
    assert len(http_server.bodies) == 2
    assert http_server.paths == ["/v2/models/encode/infer"] * 2
    assert http_server.bodies[1]["inputs"][0]["data"] == [AWKWARD]
    assert http_server.bodies[1]["parameters"] == {"truncate": True}

    http_server.failures.append(400)
    done = run("bash", script, "text", f"http://{http_server.url}")
    assert done.returncode == 1
    assert "HTTP 400" in done.stderr
    assert "fake failure 400" in done.stderr
    assert len(http_server.bodies) == 3
