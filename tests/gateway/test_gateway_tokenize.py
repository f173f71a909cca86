"""POST /tokenize and /detokenize, in the shapes of vLLM and of text-embeddings-inference."""

from __future__ import annotations

from typing import Any

import pytest

from shapeshift.errors import ModelError
from tests.gateway.conftest import HTTP
from tests.gateway.fake_triton import FRONTS, TEMPLATE, FakeTriton

ASK = [{"role": "user", "content": "one two"}]
ASKS = TEMPLATE.replace("<assistant>", "{% if add_generation_prompt %}<assistant>{% endif %}")


@pytest.fixture(scope="module")
def triton() -> FakeTriton:
    return FakeTriton({**FRONTS, "generate": {**FRONTS["generate"], "chat_template": ASKS}})


def post(url: str, body: dict[str, Any], route: str = "tokenize") -> Any:
    answer = HTTP.post(f"{url}/{route}", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refusal(url: str, body: dict[str, Any], route: str = "tokenize") -> tuple[int, str, str]:
    answer = HTTP.post(f"{url}/{route}", json=body)
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]


def test_a_prompt_becomes_tokens_without_a_token_being_generated(url: str, triton: FakeTriton) -> None:
    found = post(url, {"model": "generate", "prompt": "one two"})
    assert found == {"count": 4, "max_model_len": 64, "tokens": [1, 10, 11, 2], "token_strs": None}
    assert [call.outputs for call in triton.calls] == [("TOKENS",)]
    bare = post(url, {"model": "generate", "prompt": "one two", "add_special_tokens": False, "return_token_strs": True})
    assert (bare["tokens"], bare["token_strs"]) == ([10, 11], ["one", "two"])


@pytest.mark.parametrize(("adds", "prompt"), [(True, "<user>one two\n<assistant>"), (False, "<user>one two\n")])
def test_a_conversation_becomes_tokens_by_the_template(url: str, triton: FakeTriton, adds: bool, prompt: str) -> None:
    found = post(url, {"model": "generate", "messages": ASK, "add_generation_prompt": adds})
    assert triton.calls[-1].inputs["text_input"].tolist() == [prompt.encode()]
    assert found["tokens"] == [*range(10, 10 + len(prompt.split()))], "the template has its own special tokens"
    special = post(url, {"model": "generate", "messages": ASK, "add_special_tokens": True})
    assert special["tokens"][0] == 1


def test_a_conversation_that_goes_on_ends_with_its_last_message(url: str, triton: FakeTriton) -> None:
    messages = [*ASK, {"role": "assistant", "content": "three "}]
    post(url, {"model": "generate", "messages": messages, "continue_final_message": True})
    assert triton.calls[-1].inputs["text_input"].tolist() == [b"<user>one two\n<assistant>three "]


def test_tokens_become_text(url: str, triton: FakeTriton) -> None:
    assert post(url, {"model": "generate", "tokens": [7, 8]}, "detokenize") == {"prompt": "7 8"}
    assert triton.calls[-1].outputs == ("TOKENS",)


@pytest.mark.parametrize("model", ["encode", "generate"])
def test_texts_become_tokens_as_in_tei(url: str, triton: FakeTriton, model: str) -> None:
    inputs = ["é two", *["a"] * 6]
    found = post(url, {"model": model, "inputs": inputs})
    assert len(found) == 7 and [len(one) for one in found] == [4, *[3] * 6]
    assert found[0] == [
        {"id": 1, "text": "[CLS]", "special": True, "start": None, "stop": None},
        {"id": 10, "text": "é", "special": False, "start": 0, "stop": 1},
        {"id": 11, "text": "two", "special": False, "start": 2, "stop": 5},
        {"id": 2, "text": "[SEP]", "special": True, "start": None, "stop": None},
    ]
    # A front takes so many rows at once.
    assert len(triton.calls) == (2 if model == "encode" else 1)
    (bare,) = post(url, {"model": model, "inputs": "one", "add_special_tokens": False})
    assert [token["id"] for token in bare] == [10]


def test_a_prompt_of_an_embedding_model_is_named(url: str, triton: FakeTriton) -> None:
    post(url, {"model": "encode", "inputs": "one", "prompt_name": "query"})
    assert triton.calls[-1].parameters == {"prompt_name": "query"}


def test_no_texts_have_no_tokens(url: str) -> None:
    assert post(url, {"model": "encode", "inputs": []}) == []


REFUSED: dict[str, tuple[str, dict[str, Any], tuple[int, str, str | None]]] = {
    "no text": ("tokenize", {"model": "generate"}, (400, "invalid_type", None)),
    "two texts": ("tokenize", {"model": "generate", "prompt": "a", "messages": ASK}, (400, "invalid_type", None)),
    "an empty prompt": ("tokenize", {"model": "generate", "prompt": ""}, (400, "invalid_value", "prompt")),
    "an empty text": ("tokenize", {"model": "encode", "inputs": [*"abcdef", ""]}, (400, "invalid_value", "inputs[6]")),
    "a number": ("tokenize", {"model": "encode", "inputs": [1]}, (400, "invalid_value", "inputs")),
    "an image model": ("tokenize", {"model": "classify_image", "prompt": "a"}, (400, "model_not_supported", "model")),
    "a model without tokens": (
        "tokenize",
        {"model": "classify_raw", "inputs": "a"},
        (400, "model_not_supported", "model"),
    ),
    "a template of its own": (
        "tokenize",
        {"model": "generate", "messages": ASK, "chat_template": "x"},
        (400, "unsupported_parameter", "chat_template"),
    ),
    "no template": ("tokenize", {"model": "generate_lora", "messages": ASK}, (400, "model_not_supported", "model")),
    "an unknown field": ("tokenize", {"model": "generate", "promt": "a"}, (400, "unknown_parameter", "promt")),
    "no tokens": ("detokenize", {"model": "generate", "tokens": []}, (400, "invalid_value", "tokens")),
    "no model that generates": (
        "detokenize",
        {"model": "encode", "tokens": [1]},
        (400, "model_not_supported", "model"),
    ),
    "which of two": ("tokenize", {"prompt": "a"}, (400, "model_not_found", "model")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_by_name(url: str, case: str) -> None:
    route, body, refused = REFUSED[case]
    assert refusal(url, body, route) == refused


@pytest.mark.parametrize(
    ("body", "said", "param"),
    [
        ({"messages": ASK}, "text_input: got '9 bytes'; at most 5 bytes", "messages"),
        ({"prompt": "abc"}, "text_input: got '9 bytes'; at most 5 bytes", "prompt"),
        ({"inputs": ["abc"]}, "row 0: TEXT: got '9 bytes'; at most 5 bytes", "inputs"),
    ],
)
def test_what_a_front_refuses_names_the_field_of_the_request(
    url: str, triton: FakeTriton, body: dict[str, Any], said: str, param: str
) -> None:
    triton.failure = ModelError(said, "INVALID_ARG")
    assert refusal(url, {"model": "generate", **body}) == (400, "invalid_value", param)
