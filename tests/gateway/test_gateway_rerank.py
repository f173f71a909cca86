"""Rerank, classify, and the routes of text-embeddings-inference."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shapeshift.errors import ModelError
from tests.gateway.conftest import HTTP
from tests.gateway.fake_triton import FRONTS, FakeTriton

PNG = "data:image/png;base64," + base64.b64encode(b"\x89PNG a picture").decode()


def post(url: str, path: str, **body: Any) -> Any:
    answer = HTTP.post(f"{url}{path}", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def sigmoid(value: float) -> float:
    return float(1 / (1 + np.exp(-value)))


# Rerank. The cross-encoder's logit is the length of a document, less 5.


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_documents_are_ordered(url: str, triton: FakeTriton, path: str) -> None:
    documents = ["abc", {"text": "abcdefg"}, "abcdef", "a", "ab"]
    found = post(url, path, model="cross", query="q", documents=documents, top_n=2, truncate=True)
    assert [(one["index"], one["document"]["text"]) for one in found["results"]] == [(1, "abcdefg"), (2, "abcdef")]
    assert [one["relevance_score"] for one in found["results"]] == pytest.approx([sigmoid(2), sigmoid(1)])
    assert [len(call.inputs["TEXT_PAIR"]) for call in triton.calls] == [4, 1]
    assert triton.calls[0].inputs["TEXT"].tolist() == [[b"q"]] * 4
    assert triton.calls[0].parameters == {"truncate": True} and found["usage"] == {"total_tokens": 3 + 7 + 6 + 1 + 2}
    bare = post(url, path, model="cross", query="q", documents=["a"], return_documents=False)
    assert bare["results"] == [{"index": 0, "relevance_score": pytest.approx(sigmoid(-4))}]


def test_an_embedding_model_reranks_by_cosine(url: str) -> None:
    found = post(url, "/v1/rerank", model="encode", query="aaaa", documents=["a", "aaaa"])
    assert [one["index"] for one in found["results"]] == [1, 0]
    assert found["results"][0]["relevance_score"] == pytest.approx(1.0) and found["usage"] == {"total_tokens": 9}


@pytest.mark.parametrize(
    ("more", "param", "code"),
    [
        ({"documents": []}, "documents", "invalid_value"),
        ({"documents": [""]}, "documents[0]", "invalid_value"),
        ({"documents": ["a", 3]}, "documents", "invalid_value"),
        ({"documents": ["a"], "query": ""}, "query", "invalid_value"),
        ({"documents": ["a"], "top_n": 0}, "top_n", "invalid_value"),
        ({"documents": ["a"], "model": "generate"}, "model", "model_not_supported"),
        ({"documents": ["a"], "max_tokens_per_doc": 5}, "max_tokens_per_doc", "unsupported_parameter"),
    ],
)
def test_bad_rerank_is_named(url: str, more: dict[str, Any], param: str, code: str) -> None:
    answer = HTTP.post(f"{url}/v1/rerank", json={"model": "cross", "query": "q", **more})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code), error


# Classify. A text is "long" from 6 characters.


def test_texts_are_classified(url: str, triton: FakeTriton) -> None:
    found = post(url, "/v1/classify", model="classify_text", input=["ab", "abcdefgh"], level=1, min_accuracy=0.5)
    assert [(one["index"], one["label"], one["num_classes"]) for one in found["data"]] == [
        (0, "short", 2),
        (1, "long", 2),
    ]
    assert found["data"][1]["probs"] == pytest.approx([1 - sigmoid(3), sigmoid(3)], abs=1e-6)
    assert found["data"][1]["confidence"] == pytest.approx(sigmoid(3), abs=1e-6)
    assert triton.calls[0].parameters == {"level": 1, "min_accuracy": 0.5}
    assert found["usage"] == {"prompt_tokens": 10, "total_tokens": 10, "completion_tokens": 0}
    assert post(url, "/v1/classify", model="classify_text", input="ab")["data"][0]["label"] == "short"


def test_logits_become_probabilities(url: str) -> None:
    found = post(url, "/v1/classify", model="classify_raw", input="abcdefgh")["data"][0]
    assert found["label"] == "long" and found["probs"] == pytest.approx([1 - sigmoid(3), sigmoid(3)], abs=1e-6)


@pytest.mark.parametrize(
    ("model", "scores"),
    [
        ("topics", lambda size: [0.5, sigmoid(size - 5)]),
        ("score", lambda size: [size - 5.0]),
        ("classify_raw", lambda size: [1 - sigmoid(size - 5), sigmoid(size - 5)]),
    ],
)
def test_scores_are_what_the_front_states(url: str, model: str, scores: Callable[[int], list[float]]) -> None:
    texts = ["ab", "abcdefgh", "abcde", "a", "abc"]
    found = post(url, "/v1/classify", model=model, input=texts)["data"]
    assert [one["probs"] for one in found] == [pytest.approx(scores(len(text))) for text in texts]
    (one,) = post(url, "/v1/classify", model=model, input="abc")["data"]
    named = post(url, "/predict", model=model, inputs="abc")
    assert [row["score"] for row in named] == pytest.approx(sorted(one["probs"], reverse=True))
    assert named[0]["label"] == one["label"]


def test_rows_may_be_texts_and_pairs(url: str, triton: FakeTriton) -> None:
    rows = [["abc", "d"], ["ab"], ["a", "bcdefg"]]
    found = post(url, "/v1/classify", model="score", input=rows)["data"]
    assert [one["probs"] for one in found] == [[-4.0], [-3.0], [1.0]]
    assert [{name: len(column) for name, column in call.inputs.items()} for call in triton.calls] == [
        {"TEXT": 1},
        {"TEXT": 2, "TEXT_PAIR": 2},
    ]
    predicted = post(url, "/predict", model="score", inputs=rows)
    assert predicted == [[{"label": "score", "score": score}] for score in (-4.0, -3.0, 1.0)]
    triton.failure = ModelError("row 1: TEXT: got '600 tokens'; at most 512", "INVALID_ARG")
    error = HTTP.post(f"{url}/predict", json={"model": "score", "inputs": [["a", "b"], ["a"], ["c", "d"], ["e"]]})
    assert error.json()["error"]["message"].startswith("row 3: inputs: got '600 tokens'")


@pytest.mark.parametrize(
    ("model", "rows", "named"),
    [
        ("cross", ["a"], r"input\[0\]: got '1 texts'; 2, which cross"),
        ("cross", [["a", "b"], ["c"]], r"input\[1\]: got '1 texts'; 2, which cross"),
        ("classify_raw", [["a", "b"]], r"input\[0\]: got '2 texts'; 1, which classify_raw"),
        ("topics", [["a"], []], r"input\[1\]: got '0 texts'; 1 or 2, which topics"),
        ("topics", [["a"], ["b", ""]], r"input\[1\]: got ''; a text that is not empty"),
    ],
)
def test_rows_that_a_model_was_not_made_for_are_refused(url: str, model: str, rows: list[Any], named: str) -> None:
    answer = HTTP.post(f"{url}/v1/classify", json={"model": model, "input": rows})
    assert answer.status_code == 400 and re.match(named, answer.json()["error"]["message"]), answer.text


def test_a_front_that_does_not_say_what_its_logits_mean_is_refused(start_gateway: Callable[..., str]) -> None:
    front = {name: value for name, value in FRONTS["classify_raw"].items() if name != "activation"}
    answer = HTTP.post(f"{start_gateway(FakeTriton({'old': front}))}/predict", json={"inputs": "a"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "model_not_supported"), answer.text


def test_images_are_classified(url: str, triton: FakeTriton) -> None:
    found = post(url, "/v1/classify", model="classify_image", input=PNG, task="cifar10", latency_ms=100)
    assert found["data"][0]["label"] == "cat" and found["data"][0]["outcome"] == "in_time"
    assert triton.calls[0].inputs["IMAGE"].tolist() == [[b"\x89PNG a picture"]]
    assert triton.calls[0].parameters == {"task": "cifar10", "latency_ms": 100.0}


@pytest.mark.parametrize(
    "image",
    [
        "https://example.org/a.png",
        "data:image/gif;base64,AAAA",
        "data:image/png;base64,",
        "data:image/png;base64,&&",
        "x",
    ],
)
def test_bad_images_are_named(url: str, image: str) -> None:
    answer = HTTP.post(f"{url}/v1/classify", json={"model": "classify_image", "input": [PNG, image]})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "input[1]", "invalid_value"), error


# TEI.


def test_tei_embeds(url: str) -> None:
    (found,) = post(url, "/embed", inputs="abc")
    assert np.linalg.norm(found) == pytest.approx(1.0)
    assert post(url, "/embed", inputs=["abc", "a"], normalize=False) == [[3, 4, 5, 6], [1, 2, 3, 4]]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/embed", {"inputs": [[1], [2] * 600]}, "inputs[1]"),
        ("/embed", {"inputs": ["a", [1]]}, "inputs[1]"),
        ("/embed", {"inputs": ["a", ""]}, "inputs[1]"),
        ("/embed", {"inputs": []}, "inputs"),
        ("/predict", {"model": "topics", "inputs": [["a"], ["b", ""]]}, "inputs[1]"),
        ("/predict", {"model": "cross", "inputs": [["a", "b"], ["c"]]}, "inputs[1]"),
    ],
)
def test_an_input_of_teis_is_named_as_it_was_sent(url: str, path: str, body: dict[str, Any], param: str) -> None:
    answer = HTTP.post(f"{url}{path}", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param) and error["message"].startswith(f"{param}: got ")


def test_tei_reranks(url: str) -> None:
    found = post(url, "/rerank", query="q", texts=["a", "abcdefg"], raw_scores=True, return_text=True)
    assert found == [{"index": 1, "score": 2.0, "text": "abcdefg"}, {"index": 0, "score": -4.0, "text": "a"}]
    assert post(url, "/rerank", query="q", texts=["abcdefg"]) == [{"index": 0, "score": pytest.approx(sigmoid(2))}]
    stated = post(url, "/rerank", model="score", query="q", texts=["abcdefg"])
    assert stated == [{"index": 0, "score": 2.0}]
    best = post(url, "/rerank", query="q", texts=["a", "documents"], raw_scores=True, top_n=1)
    assert best == [{"index": 1, "score": 4.0}]


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ('{"model": "cross", "query": "q", "documents": [3]}', "documents", "invalid_value"),
        ('{"model": "cross", "query": "q", "documents": ["a"], "texts": ["a"]}', "texts", "unknown_parameter"),
        ('{"model": "cross", "query": "q"}', "texts", "missing_parameter"),
        ('{"documents": ' + "[" * 10_000 + "]" * 10_000 + "}", None, "invalid_json"),
        ('{"documents"', None, "invalid_json"),
        ('["documents"]', None, "invalid_type"),
    ],
)
def test_bad_rerank_in_either_shape_is_named(url: str, body: str, param: str | None, code: str) -> None:
    answer = HTTP.post(f"{url}/rerank", content=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code), error


def test_tei_predicts(url: str) -> None:
    model = {"model": "classify_text"}
    one = post(url, "/predict", inputs="abcdefgh", **model)
    assert one == [
        {"label": "long", "score": pytest.approx(sigmoid(3), abs=1e-6)},
        {"label": "short", "score": pytest.approx(1 - sigmoid(3), abs=1e-6)},
    ]
    several = post(url, "/predict", inputs=[["ab"], ["abcdefgh"]], **model)
    assert [row[0]["label"] for row in several] == ["short", "long"]
    raw = post(url, "/predict", inputs="abcdefgh", model="classify_raw", raw_scores=True)
    assert raw == [{"label": "long", "score": 3.0}, {"label": "short", "score": 0.0}]


def test_tei_names_no_model_where_there_is_one(url: str) -> None:
    answer = HTTP.post(f"{url}/predict", json={"inputs": "a"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "model: name one of classify_raw, classify_text, cross, score, topics"
    pair = HTTP.post(f"{url}/predict", json={"inputs": ["a", "b"], "model": "classify_text"})
    assert "inputs[0]: got '2 texts'; 1, which classify_text classifies" in pair.json()["error"]["message"]
