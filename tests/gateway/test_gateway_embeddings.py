"""POST /v1/embeddings, through OpenAI's own client."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import openai
import pytest

from tests.gateway.conftest import HTTP
from tests.gateway.fake_triton import FakeTriton


def test_one_text_and_several(client: openai.OpenAI) -> None:
    # The client asks for base64 unless told otherwise.
    one = client.embeddings.create(model="encode", input="abc")
    assert one.data[0].embedding == [3.0, 4.0, 5.0, 6.0] and one.model == "encode"
    several = client.embeddings.create(model="encode", input=["a", "bbbb"], encoding_format="float")
    assert [item.embedding[0] for item in several.data] == [1.0, 4.0]
    assert [item.index for item in several.data] == [0, 1]
    assert several.usage.prompt_tokens == several.usage.total_tokens == 5, "what the model counts"


def test_base64_holds_the_same_numbers(url: str) -> None:
    def raw(encoding: str) -> Any:
        body = {"model": "encode", "input": ["é"], "encoding_format": encoding}
        return HTTP.post(f"{url}/v1/embeddings", json=body).json()["data"][0]["embedding"]

    packed = np.frombuffer(base64.b64decode(raw("base64")), "<f4")
    assert packed.tolist() == raw("float") == [2.0, 3.0, 4.0, 5.0]


def test_tokens_are_taken_as_they_are(client: openai.OpenAI, triton: FakeTriton) -> None:
    found = client.embeddings.create(model="encode", input=[[5, 6, 7], [8]])
    (call,) = triton.calls
    assert call.inputs["INPUT_IDS"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert call.inputs["ATTENTION_MASK"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert (found.usage.prompt_tokens, found.usage.total_tokens) == (4, 4)
    client.embeddings.create(model="encode", input=[5, 6])
    assert triton.calls[-1].inputs["INPUT_IDS"].tolist() == [[5, 6]]


def test_tokens_are_padded_within_one_call_only(client: openai.OpenAI, triton: FakeTriton) -> None:
    client.embeddings.create(model="encode", input=[[5] * 500] + [[6]] * 7)
    assert sorted(call.inputs["INPUT_IDS"].shape for call in triton.calls) == [(4, 1), (4, 500)]
    with pytest.raises(openai.BadRequestError, match=r"input\[1\]: got '513 tokens'; 1 to 512") as caught:
        client.embeddings.create(model="encode", input=[[6], [5] * 513])
    assert caught.value.param == "input[1]" and len(triton.calls) == 2


def test_many_inputs_are_split_and_joined(client: openai.OpenAI, triton: FakeTriton) -> None:
    texts = ["x" * (1 + number % 50) for number in range(2048)]
    found = client.embeddings.create(model="encode", input=texts)
    assert [item.embedding[0] for item in found.data] == [float(len(text)) for text in texts]
    assert found.usage.prompt_tokens == sum(map(len, texts))
    assert len(triton.calls) == 512 and max(len(call.inputs["TEXT"]) for call in triton.calls) == 4
    with pytest.raises(openai.BadRequestError, match="input: got '2049 items'; at most 2048"):
        client.embeddings.create(model="encode", input=[*texts, "x"])


def test_a_row_that_is_refused_has_the_number_that_it_has_in_the_request(
    client: openai.OpenAI, triton: FakeTriton
) -> None:
    from shapeshift.errors import ModelError

    triton.failure = ModelError("row 1: TEXT: got '600 tokens'; at most 512", "INVALID_ARG")
    with pytest.raises(openai.BadRequestError, match="row [159]: input: got '600 tokens'; at most 512") as caught:
        client.embeddings.create(model="encode", input=["x"] * 9)
    assert (caught.value.param, caught.value.code) == ("input", "context_length_exceeded")


def test_dimensions_are_those_that_the_model_allows(client: openai.OpenAI, triton: FakeTriton) -> None:
    assert len(client.embeddings.create(model="encode", input="a", dimensions=4).data[0].embedding) == 4
    with pytest.raises(openai.BadRequestError, match="dimensions: got 2; one of 4, which encode was trained for"):
        client.embeddings.create(model="encode", input="a", dimensions=2)


def test_parameters_reach_the_model(client: openai.OpenAI, triton: FakeTriton) -> None:
    extra = {"prompt_name": "query", "truncate": True, "latency_ms": 50, "utility": 0.5, "slo_class": "a"}
    headers = {"X-Request-Id": "mine"}
    raw = client.embeddings.with_raw_response.create(model="encode", input="a", extra_body=extra, extra_headers=headers)
    assert triton.calls[0].parameters == extra and triton.calls[0].request_id == "mine"
    assert raw.headers["x-request-id"] == "mine"


@pytest.mark.parametrize(
    ("more", "param", "code"),
    [
        ({"input": ""}, "input[0]", "invalid_value"),
        ({"input": []}, "input", "invalid_value"),
        ({"input": ["a", ""]}, "input[1]", "invalid_value"),
        ({"input": ["a", [1, 2]]}, "input[1]", "invalid_value"),
        ({"input": [[1, 2], "a"]}, "input[1]", "invalid_value"),
        ({"input": [1, "a"]}, "input[1]", "invalid_value"),
        ({"input": [[]]}, "input[0]", "invalid_value"),
        ({"input": [-1]}, "input[0]", "invalid_value"),
        ({"input": {"a": 1}}, "input", "invalid_value"),
        ({"input": "a", "dimensions": 0}, "dimensions", "invalid_value"),
        ({"input": "a", "dimensions": "4"}, "dimensions", "invalid_value"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "invalid_value"),
        ({"input": "a", "colour": 1}, "colour", "unknown_parameter"),
        ({}, "input", "missing_parameter"),
    ],
)
def test_bad_input_is_named(url: str, more: dict[str, Any], param: str, code: str) -> None:
    answer = HTTP.post(f"{url}/v1/embeddings", json={"model": "encode", **more})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code), error
    assert error["type"] == "invalid_request_error"
