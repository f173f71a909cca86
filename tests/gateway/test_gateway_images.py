"""Images in requests for vectors, beside texts, and labels by their cosines."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import numpy as np
import openai
import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError

from shapeshift.triton.async_client import ModelCall, Tensors
from tests.gateway.conftest import HTTP
from tests.gateway.fake_triton import FakeTriton
from tests.gateway.test_gateway_vectors import refused, sent
from tests.waiting import wait_for

COMMON = {"max_batch_size": 2, "outputs": ["EMBEDDING", "GAMMA", "OUTCOME"], "kind": "image_embedding"}
FRONTS: dict[str, dict[str, Any]] = {
    "clip": {**COMMON, "text_model": "words", "similarity": [10.0, None], "tasks": ["embedding"]},
    "siglip": {**COMMON, "text_model": "words", "similarity": [10.0, -2.0], "tasks": ["embedding"]},
    "dino": {**COMMON, "tasks": ["embedding"]},
    "words": {"kind": "embedding", "outputs": ["EMBEDDING", "NUM_TOKENS"], "max_batch_size": 2, "max_tokens": 16},
}
URL = "data:image/png;base64,"


def picture(place: int) -> str:
    """A file whose vector is the axis `place`."""
    return base64.b64encode(b"picture %d" % place).decode()


def axis(place: int) -> list[float]:
    return np.eye(4, dtype=np.float32)[place].tolist()


class Towers(FakeTriton):
    """The vector of a file or a text is the axis that its last digit names. outcome: of every image."""

    outcome = b"in_time"

    async def infer(self, call: ModelCall) -> Tensors:
        self.calls.append(call)
        name = "IMAGE" if "IMAGE" in call.inputs else "TEXT"
        rows = [row.decode() for row in call.inputs[name].reshape(-1)]
        answers = {
            "EMBEDDING": np.array([axis(int(row[-1])) for row in rows], np.float32),
            "GAMMA": np.array([[-5 * int(row[-1])] for row in rows], np.int32),
            "OUTCOME": np.array([[self.outcome]] * len(rows), dtype=object),
            "NUM_TOKENS": np.array([[len(row.split())] for row in rows], np.int32),
        }
        return {name: answers[name] for name in call.outputs}


@pytest.fixture(scope="module")
def triton() -> FakeTriton:
    return Towers(FRONTS)


def test_texts_and_images_in_one_request(url: str, triton: FakeTriton) -> None:
    """In Jina's objects, as data URLs or base64, and in plain texts; in their order, however the calls are split."""
    inputs = [{"image": URL + picture(2)}, "text 1", {"text": "a text 3"}, URL + picture(0), {"image": picture(1)}]
    answer = sent(url, "/v1/embeddings", model="clip", input=inputs, latency_ms=500, truncate=True)
    assert [one["embedding"] for one in answer["data"]] == [axis(2), axis(1), axis(3), axis(0), axis(1)]
    assert [one.get("gamma") for one in answer["data"]] == [-10, None, None, 0, -5]
    assert answer["usage"]["prompt_tokens"] == 5
    sizes = {
        call.model: [len(next(iter(one.inputs.values()))) for one in triton.calls if one.model == call.model]
        for call in triton.calls
    }
    assert {name: sorted(counts) for name, counts in sizes.items()} == {"clip": [1, 2], "words": [2]}
    parameters = {call.model: dict(call.parameters) for call in triton.calls}
    assert parameters["clip"] == {"latency_ms": 500.0, "task": "embedding"}
    assert parameters["words"] == {"latency_ms": 500.0, "truncate": True}


def test_openais_client_sends_data_urls_and_infinitys_a_modality(client: openai.OpenAI, url: str) -> None:
    vectors = client.embeddings.create(model="dino", input=[URL + picture(1), URL + picture(3)]).data
    assert [one.embedding for one in vectors] == [axis(1), axis(3)]
    answer = sent(
        url, "/v1/embeddings", model="clip", input=URL + picture(1), modality="image", embedding_types=["int8"]
    )
    assert answer["data"][0]["embedding"] == [-1, 127, -1, -1] or len(answer["data"][0]["embedding"]) == 4
    # A front of texts has always read such a text.
    assert len(sent(url, "/v1/embeddings", model="words", input=URL + "1")["data"]) == 1


@pytest.mark.parametrize(
    ("model", "inputs", "param", "code", "said"),
    [
        ("words", [{"image": URL + picture(1)}], "input[0]", "model_not_supported", "words reads texts, no images"),
        ("dino", [URL + picture(1), "a text"], "input[1]", "model_not_supported", "dino reads images, no texts"),
        ("dino", [{"text": "a text"}], "input[0]", "model_not_supported", "dino reads images, no texts"),
        ("clip", ["a 1", {"image": "https://a.b/c.png"}], "input[1]", "invalid_value", "a data URL of a PNG or JPEG"),
        ("clip", [{"image": "file:///etc/passwd"}], "input[0]", "invalid_value", "a data URL of a PNG or JPEG"),
        ("clip", [{"image": URL + "&&"}], "input[0]", "invalid_value", "valid base64 after the comma"),
        ("clip", [{"image": "&&"}], "input[0]", "invalid_value", "or base64"),
        ("clip", [{"image": URL}], "input[0]", "invalid_value", "an image of 0 bytes"),
        ("clip", [{"image": "AA", "text": "b"}], "input[0]", "invalid_value", "either text or image"),
        ("clip", [{"sound": "AA"}], "input[0].sound", "unknown_parameter", "sound"),
        ("clip", ["a", ""], "input[1]", "invalid_value", "a text that is not empty"),
        ("clip", [1, 2], "input", "invalid_value", "texts or images, which clip reads"),
        ("clip", [], "input", "invalid_value", "none of them empty"),
    ],
)
def test_inputs_that_a_model_does_not_read(
    url: str, model: str, inputs: list[Any], param: str, code: str, said: str
) -> None:
    got = refused(url, "/v1/embeddings", model=model, input=inputs)
    assert got[:2] == (param, code) and said in got[2]


def test_an_image_that_the_model_did_not_compute_is_no_vector(url: str, triton: Towers) -> None:
    triton.outcome = b"evicted"
    try:
        answer = HTTP.post(f"{url}/v1/embeddings", json={"model": "clip", "input": ["a 1", URL + picture(1)]})
    finally:
        triton.outcome = b"in_time"
    assert answer.status_code == 429 and answer.json()["error"]["message"].startswith("input[1]: the image could not")


def test_labels_by_the_cosines_of_texts(url: str) -> None:
    body: dict[str, Any] = {"input": [URL + picture(2), {"image": picture(0)}], "labels": ["cat 1", "dog 2", "a 0"]}
    answer = sent(
        url, "/v1/classify", model="clip", **{**body, "input": [{"image": picture(2)}, {"image": picture(0)}]}
    )
    assert [one["label"] for one in answer["data"]] == ["dog 2", "a 0"]
    powers = np.exp([0.0, 10.0, 0.0])
    np.testing.assert_allclose(answer["data"][0]["probs"], powers / powers.sum(), rtol=1e-5)
    assert answer["data"][0]["gamma"] == -10 and answer["usage"]["prompt_tokens"] == 6
    each = sent(url, "/v1/classify", model="siglip", input=URL + picture(2), labels=["cat 1", "dog 2"])["data"][0]
    np.testing.assert_allclose(each["probs"], 1 / (1 + np.exp([2.0, -8.0])), rtol=1e-5)
    got = refused(url, "/v1/classify", model="dino", input=URL + picture(2), labels=["a 1"])
    assert got[:2] == ("labels", "model_not_supported") and "dino reads images, no texts" in got[2]
    assert refused(url, "/v1/classify", model="words", input="a 1", labels=["a 1"])[:2] == (
        "model",
        "model_not_supported",
    )
    assert refused(url, "/v1/classify", model="clip", input=URL + picture(2), labels=["a 1", ""])[0] == "labels[1]"
    assert refused(url, "/v1/classify", model="clip", input=URL + picture(2), labels=["a 1"] * 2049)[0] == "labels"


def test_the_hubs_client_finds_the_only_model(start_gateway: Callable[..., str]) -> None:
    url = start_gateway(Towers({name: FRONTS[name] for name in ("clip", "words")}))
    wait_for(lambda: HTTP.get(f"{url}/v1/models").json()["data"], pause_s=0.05)
    found = InferenceClient(model=f"{url}/predict").zero_shot_image_classification(
        b"picture 1", ["cat", "dog"], hypothesis_template="{} 1"
    )
    assert [one.label for one in found] == ["cat", "dog"] and found[0].score == pytest.approx(0.5)


def test_the_hubs_client_names_candidates(url: str, triton: FakeTriton) -> None:
    with pytest.raises(HfHubHTTPError, match="name one of clip, dino, siglip"):
        InferenceClient(model=f"{url}/predict").zero_shot_image_classification(b"picture 1", ["cat 0", "dog 1"])
    body: dict[str, Any] = {
        "inputs": picture(1),
        "parameters": {"candidate_labels": ["0", "1"], "hypothesis_template": "a {}"},
    }
    answer = sent(url, "/predict", model="clip", **body)
    assert [one["label"] for one in answer] == ["1", "0"] and answer[0]["score"] > 0.99
    assert [
        row.decode() for call in triton.calls if call.model == "words" for row in call.inputs["TEXT"].reshape(-1)
    ] == ["a 0", "a 1"]
    body["parameters"]["hypothesis_template"] = "no place"
    assert refused(url, "/predict", model="clip", **body)[0] == "parameters.hypothesis_template"
