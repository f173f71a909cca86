"""A configuration of a few lines, loaded by a real Triton without a build, and through model control."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest
import tritonclient.grpc as triton

from shapeshift.errors import EngineError
from shapeshift.triton import keys, model_config
from shapeshift.triton.control import ModelControl
from shapeshift.triton.embedded.server import TritonServer

pytestmark = pytest.mark.server
NAME = "ten_lines"


@pytest.fixture
def control(encode_server: TritonServer) -> Iterator[ModelControl]:
    """Model control of a server with a second model over the engines of `encode`, of name, backend and parameters."""
    first, second = encode_server.settings.repositories
    built = model_config.parameters(model_config.read(first / "encode" / "config.pbtxt"))
    folder = second / NAME
    (folder / "1").mkdir(parents=True, exist_ok=True)
    stated = {
        "checkpoint": "x",
        "placement": "inline",
        "engine_threads": "1",
        "engines": str((first / "encode" / built["engines"]).resolve()),
    }
    entries = [f'parameters {{ key: "{key}" value {{ string_value: "{text}" }} }}' for key, text in stated.items()]
    (folder / "config.pbtxt").write_text("\n".join([f'name: "{NAME}"', 'backend: "polymorph"', *entries]))
    key = keys.read_key(encode_server.settings.key_file)
    with ModelControl(encode_server.grpc_url, key) as opened:
        yield opened
        opened.unload(NAME)
        opened.wait_unloaded(NAME)


def embedding(server: TritonServer, model: str) -> np.ndarray:
    text = triton.InferInput("TEXT", [1, 1], "BYTES")
    text.set_data_from_numpy(np.array([["a text"]], dtype=object))
    with triton.InferenceServerClient(server.grpc_url) as client:
        return np.asarray(client.infer(model, [text], client_timeout=120).as_numpy("EMBEDDING"))


def test_a_short_configuration_is_completed_at_load(encode_server: TritonServer, control: ModelControl) -> None:
    control.load(NAME)
    with triton.InferenceServerClient(encode_server.grpc_url) as client:
        made, built = (client.get_model_metadata(name, as_json=True) for name in (NAME, "encode"))
    assert made["inputs"] == built["inputs"]
    # Only the build knows the hidden size.
    assert made["outputs"] == [
        {"name": "EMBEDDING", "datatype": "FP32", "shape": ["-1", "-1"]},
        {"name": "NUM_TOKENS", "datatype": "INT32", "shape": ["-1", "1"]},
        {"name": "TOKENS", "datatype": "BYTES", "shape": ["-1", "1"]},
        {"name": "DESCRIPTION", "datatype": "BYTES", "shape": ["-1", "1"]},
    ]
    assert control.config(NAME)["max_batch_size"] == 64
    # Vectors of length 1; two engines of one model agree to 0.996 in bf16 (docs/engines.md).
    assert float(np.sum(embedding(encode_server, NAME) * embedding(encode_server, "encode"))) >= 0.996


def test_a_short_configuration_is_completed_through_model_control(
    encode_server: TritonServer, control: ModelControl
) -> None:
    control.load(NAME)
    whole = control.config(NAME)
    short = {name: whole[name] for name in ("name", "backend", "parameters")}
    # Of an output, the name is enough.
    control.load(NAME, {**short, "max_batch_size": 2, "output": [{"name": "EMBEDDING"}]})
    assert control.config(NAME)["max_batch_size"] == 2
    assert control.config(NAME)["input"] == whole["input"] and control.config(NAME)["output"] == whole["output"]
    assert embedding(encode_server, NAME).shape == (1, 384)


def test_a_wrong_configuration_is_refused_with_the_reason(control: ModelControl) -> None:
    control.load(NAME)
    whole = control.config(NAME)
    wrong = json.loads(json.dumps(whole["input"]).replace("TYPE_STRING", "TYPE_INT64"))
    with pytest.raises(EngineError, match=r"input TEXT: got \['TYPE_INT64', 1\]; data_type: TYPE_STRING dims: \[ 1 \]"):
        control.load(NAME, {**whole, "input": wrong})
    assert control.is_ready(NAME), "the version that was loaded before keeps running"
