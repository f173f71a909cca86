"""Both towers of a small random CLIP in a real Triton: vectors and labels through the gateway are the library's."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import openai
import pytest
from PIL import Image

from shapeshift.cli.main import main
from shapeshift.triton import model_config
from tests.build_engines import two_towers
from tests.gateway.conftest import HTTP
from tests.gateway.served import gateway, serving

if TYPE_CHECKING:
    from shapeshift.triton.embedded.server import TritonServer

pytestmark = pytest.mark.server
LABELS = ["a cat", "w3 w4"]


@pytest.fixture(scope="module")
def served(
    make_server: Callable[..., TritonServer], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[TritonServer, Any]]:
    folder = tmp_path_factory.mktemp("towers")
    theirs = two_towers.write(folder / "clip", "clip")
    at = ["--repository", str(folder / "models"), "--build", str(folder / "build")]
    assert main(["add", str(folder / "clip"), *at]) == 0
    for name, changes in (("clip", {"use_gammas": "0"}), ("clip_text", {"bins": "none"})):
        file = folder / "models" / name / "config.pbtxt"
        config = model_config.read(file)
        for key, value in {"precision": "f32", **changes}.items():
            model_config.set_parameter(config, key, value)
        model_config.write(config, file)
    assert main(["engines", *at]) == 0
    with serving(make_server, ("clip", "clip_text"), folder / "run", folder / "build" / "repository") as started:
        inputs = two_towers.inputs_of(folder / "clip", "clip", LABELS)
        yield started, lambda pixels: theirs(pixel_values=two_towers.normal(pixels), **inputs)


def test_vectors_and_labels(served: tuple[TritonServer, Any], free_ports: Callable[[int], list[int]]) -> None:
    import torch

    server, library = served
    pixels = np.random.default_rng(2).integers(0, 256, (1, two_towers.SIDE, two_towers.SIDE, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels[0]).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    with torch.inference_mode():
        wanted = library(pixels)
    # A request that names no output gets those of its task.
    tensor = {"name": "PIXELS", "shape": pixels.shape, "datatype": "UINT8", "data": pixels.ravel().tolist()}
    plain = HTTP.post(f"http://{server.http_url}/v2/models/clip/infer", json={"inputs": [tensor]})
    assert {"EMBEDDING", "GAMMA"} <= {one["name"] for one in plain.json()["outputs"]}, plain.text
    (port,) = free_ports(1)
    with gateway(server, port, 2) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=60)
        answer = client.embeddings.create(model="clip", input=[*LABELS, url])
        vectors = np.array([one.embedding for one in answer.data])
        library_vectors = np.concatenate([wanted.text_embeds.numpy(), wanted.image_embeds.numpy()])
        assert ((vectors * library_vectors).sum(1) >= 0.9999).all()
        body = {"model": "clip", "input": [{"image": url}], "labels": LABELS}
        (one,) = HTTP.post(f"{address}/v1/classify", json=body).json()["data"]
        np.testing.assert_allclose(one["probs"], wanted.logits_per_image.softmax(1).numpy()[0], atol=1e-3)
        broken = "data:image/png;base64," + base64.b64encode(b"no image").decode()
        error = HTTP.post(f"{address}/v1/embeddings", json={"model": "clip", "input": ["a", broken]})
        assert error.status_code == 400 and error.json()["error"]["param"] == "input", error.text
        assert error.json()["error"]["message"].startswith("row 1: input: got '8 bytes of another format'")
