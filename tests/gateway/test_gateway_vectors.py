"""Every vector that clients ask for: types, sparse ones, those of tokens, and scores by them."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
from huggingface_hub import InferenceClient

from tests.gateway.conftest import HTTP, StartGateway
from tests.gateway.fake_triton import FakeTriton
from tests.waiting import wait_for

COMMON = {"max_tokens": 64, "max_batch_size": 2}
VECTORS = ["EMBEDDING", "SPARSE_INDICES", "SPARSE_VALUES", "TOKEN_EMBEDDING", "NUM_TOKENS"]
FRONTS: dict[str, dict[str, Any]] = {
    "bge": {
        "kind": "embedding",
        "also": ["sparse_embedding", "token_embedding"],
        "outputs": VECTORS,
        "dimensions": [2],
        "prompts": {"query": "find: "},
        "pooling": "lasttoken",
        "checkpoint": "BAAI/bge-m3",
        "precision": "bf16",
        **COMMON,
    },
    "any_width": {"kind": "embedding", "outputs": ["EMBEDDING"], "dimensions": "any", **COMMON},
    "colbert": {"kind": "token_embedding", "outputs": ["TOKEN_EMBEDDING"], **COMMON},
    "ner": {
        "kind": "token_classification",
        "outputs": ["TOKEN_LOGITS", "ENTITIES", "NUM_TOKENS"],
        "labels": ["O", "PER"],
        **COMMON,
    },
    "cross": {
        "kind": "reranking",
        "outputs": ["LOGITS"],
        "activation": "sigmoid",
        "pairs": True,
        "only_pairs": True,
        "labels": ["score"],
        **COMMON,
    },
}


@pytest.fixture(scope="module")
def triton() -> FakeTriton:
    return FakeTriton(FRONTS)


def sent(url: str, path: str, **body: Any) -> Any:
    answer = HTTP.post(f"{url}{path}", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(url: str, path: str, **body: Any) -> tuple[str | None, str, str]:
    answer = HTTP.post(f"{url}{path}", json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400, answer.text
    return error["param"], error["code"], error["message"]


def data(answer: Any, name: str) -> list[Any]:
    return [one[name] for one in answer["data"]]


def test_types_are_those_of_sentence_transformers() -> None:
    from sentence_transformers.util import quantize_embeddings

    from shapeshift.gateway.apis.pooling.vectors import of_type

    vectors = np.random.default_rng(3).normal(size=(9, 64)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    most = np.full(64, 6 / 8, np.float32)
    for kind in ("int8", "uint8", "binary", "ubinary"):
        expected: Any = quantize_embeddings(vectors, kind, ranges=np.stack([-most, most]))
        got = of_type(vectors, kind, "embedding_types")
        assert isinstance(got, np.ndarray) and got.dtype == expected.dtype
        # A number may lie on the border of two steps.
        assert np.abs(got.astype(int) - expected.astype(int)).max() <= int(kind.endswith("int8"))
        assert (got == expected).mean() > 0.99
    steps = of_type(5 * vectors, "int8", "embedding_types")
    assert isinstance(steps, np.ndarray)
    cosines = (steps * vectors).sum(1) / np.linalg.norm(steps.astype(float), axis=1)
    assert cosines.min() > 0.998, "whatever the lengths of the vectors"


def test_vectors_of_several_types(url: str) -> None:
    body = {"model": "bge", "input": ["abc", "a"]}
    plain = data(sent(url, "/v1/embeddings", **body), "embedding")
    both = data(sent(url, "/v1/embeddings", **body, embedding_types=["float", "int8", "base64"]), "embedding")
    assert [one["float"] for one in both] == plain
    assert all(isinstance(number, int) for number in both[0]["int8"]) and both[0]["int8"] != both[1]["int8"]
    assert np.frombuffer(base64.b64decode(both[0]["base64"]), "<f4").tolist() == plain[0]
    one = data(sent(url, "/v1/embeddings", **body, embedding_types=["uint8"]), "embedding")
    packed = data(sent(url, "/v1/embeddings", **body, embedding_types=["uint8"], encoding_format="base64"), "embedding")
    assert [[*base64.b64decode(row)] for row in packed] == one
    assert refused(url, "/v1/embeddings", **body, embedding_types=["int4"])[:2] == (
        "embedding_types[0]",
        "invalid_value",
    )
    param, _, text = refused(url, "/v1/embeddings", **body, embedding_types=["binary"])
    assert param == "embedding_types" and text.endswith("whose width is a multiple of 8; this one is 4")


def test_vectors_are_cut_where_the_model_says_so(url: str) -> None:
    cut = data(sent(url, "/v1/embeddings", model="bge", input="abc", dimensions=2), "embedding")[0]
    np.testing.assert_allclose(cut, [0.6, 0.8], rtol=1e-6)
    assert len(data(sent(url, "/v1/embeddings", model="any_width", input="abc", dimensions=3), "embedding")[0]) == 3
    assert len(sent(url, "/embed", model="bge", inputs="abc", dimensions=2)[0]) == 2
    for model, asked, allowed in (("bge", 3, "one of 2, 4, which bge was"), ("any_width", 5, "1 to 4, the numbers")):
        param, code, text = refused(url, "/v1/embeddings", model=model, input="abc", dimensions=asked)
        assert (param, code) == ("dimensions", "invalid_value") and allowed in text
    param, _, text = refused(url, "/v2/embed", model="bge", texts=["abc"], output_dimension=3)
    assert param == "output_dimension" and "got 3; one of 2, 4" in text


def test_cohere_has_vectors_by_type_and_purpose(url: str, triton: FakeTriton) -> None:
    body = {"model": "bge", "texts": ["abc", "a"], "input_type": "search_query"}
    answer = sent(url, "/v2/embed", **body, embedding_types=["float", "uint8"], max_tokens=9)
    assert answer["embeddings"]["float"] == [[3, 4, 5, 6], [1, 2, 3, 4]] and answer["texts"] == ["abc", "a"]
    assert len(answer["embeddings"]["uint8"][1]) == 4 and answer["response_type"] == "embeddings_by_type"
    assert answer["meta"]["billed_units"] == {"input_tokens": 4}
    assert triton.calls[-1].parameters == {"truncate": True, "prompt_name": "query", "truncate_prompt_tokens": 9}
    assert refused(url, "/v2/embed", **body, truncate="START")[:2] == ("truncate", "unsupported_parameter")
    assert refused(url, "/v2/embed", **{**body, "texts": ["a", ""]})[0] == "texts[1]"
    assert refused(url, "/v2/embed", **body, images=["data:image/png;base64,AA=="])[0] == "images"


def test_sparse_vectors_are_pairs_of_index_and_value(url: str, triton: FakeTriton) -> None:
    rows = sent(url, "/embed_sparse", inputs=["abc", "a", "ab"], prompt_name="query", truncate=True)
    assert rows[1] == [{"index": 1, "value": 0.5}]
    assert [[one["index"] for one in row] for row in rows] == [[1, 2, 3], [1], [1, 2]]
    assert triton.calls[-1].parameters == {"truncate": True, "prompt_name": "query"}
    param, code, text = refused(url, "/embed_sparse", model="any_width", inputs="a")
    assert (param, code) == ("model", "model_not_supported")
    assert text == "model: any_width is for embedding; models for this request: bge"


def test_vectors_of_tokens_end_with_the_text(url: str) -> None:
    rows = sent(url, "/embed_all", model="colbert", inputs=["abc", "ab", "abcdef"])
    assert [len(row) for row in rows] == [2, 1, 5] and len(rows[0][0]) == 3
    pooled = sent(url, "/v1/pooling", model="colbert", input=["abc", "ab", "abcdef"])
    assert data(pooled, "data") == rows and pooled["object"] == "list" and pooled["id"].startswith("pool-")


def test_pooling_gives_whatever_a_model_computes(url: str) -> None:
    assert data(sent(url, "/pooling", model="bge", input="abc"), "data") == [[3, 4, 5, 6]]
    tokens = data(sent(url, "/v1/pooling", model="bge", input="abc", task="token_embed"), "data")
    packed = data(
        sent(url, "/v1/pooling", model="bge", input="abc", task="token_embed", encoding_format="base64"), "data"
    )
    assert np.frombuffer(base64.b64decode(packed[0]), "<f4").tolist() == np.ravel(tokens[0]).tolist()
    scores = data(sent(url, "/v1/pooling", model="ner", input=["ab", "abc", "a"]), "data")
    assert [len(row) for row in scores] == [2, 3, 1] and scores[0][0][0] == pytest.approx(1 / (1 + np.exp(-1)))
    raw = data(sent(url, "/v1/pooling", model="ner", input="ab", use_activation=False), "data")
    assert raw == [[[1, 0], [2, 0]]]
    param, code, text = refused(url, "/v1/pooling", model="bge", input="abc", task="token_classify")
    assert (param, code) == ("task", "model_not_supported")
    assert text == "task: got 'token_classify'; bge has embed, token_embed"
    assert refused(url, "/v1/pooling", model="bge", input="abc", task="mean")[:2] == ("task", "invalid_value")
    assert refused(url, "/v1/pooling", model="colbert", input="abc", dimensions=2)[0] == "dimensions"


def test_scores_of_pairs(url: str) -> None:
    def scores(model: str, **body: Any) -> list[float]:
        return data(sent(url, "/v1/score", model=model, **body), "score")

    one = {"queries": "abcd", "documents": ["ab", "abc", "abcdef"]}
    a, b = np.array([3.0, 4, 5, 6]), np.array([1.0, 2, 3, 4])
    cosine = float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
    assert scores("bge", text_1="abc", text_2="a") == pytest.approx([cosine])
    assert scores("bge", queries=["abc", "a"], documents=["a", "abc"]) == pytest.approx([cosine, cosine])
    rows = sent(url, "/embed_all", model="colbert", inputs=["abcd", *one["documents"]])
    query, *documents = [np.array(row) for row in rows]
    late = [float((query @ document.T).max(1).sum()) for document in documents]
    assert len({*late}) == 3
    assert scores("colbert", **one) == pytest.approx(late, rel=1e-5)
    assert scores("bge", **one, score_type="sparse") == [1.25, 3.5, 7.5]
    assert scores("cross", queries="q", documents=["abcde", "ab"]) == pytest.approx([0.5, 1 / (1 + np.exp(3))])
    assert scores("cross", queries="q", documents=["abcde", "ab"], use_activation=False) == [0, -3]
    ranked = sent(url, "/v1/rerank", model="colbert", query="abcd", documents=one["documents"])["results"]
    assert [row["index"] for row in ranked] == [int(place) for place in np.argsort(-np.array(late))]
    assert ranked[0]["relevance_score"] == pytest.approx(max(late), rel=1e-5)


def test_scores_that_cannot_be_are_refused(url: str) -> None:
    param, code, text = refused(url, "/v1/score", model="any_width", text_1="a", text_2="b", score_type="sparse")
    assert (param, code) == ("score_type", "model_not_supported")
    assert text == "score_type: got 'sparse'; any_width has bi-encoder"
    param, _, text = refused(url, "/v1/score", model="bge", queries=["a", "b"], documents=["a", "b", "c"])
    assert param == "queries" and "got '2 for 3 documents'; one query, or as many as documents" in text
    assert refused(url, "/v1/score", model="bge", text_1="a", text_2=[])[0] == "text_1"
    assert refused(url, "/v1/score", model="bge", text_1="a", documents="b")[:2] == ("text_1", "invalid_value")
    assert refused(url, "/v1/score", model="bge", text_1="a")[:2] == ("text_2", "missing_parameter")
    assert refused(url, "/v1/score", model="bge")[:2] == ("queries", "invalid_value")
    assert refused(url, "/v1/score", model="bge", text_1="a", text_2=["b", ""])[0] == "text_2[1]"
    assert refused(url, "/v1/rerank", model="ner", query="a", documents=["b"])[0] == "model"


def test_entities_by_the_hubs_own_client(url: str, triton: FakeTriton, start_gateway: StartGateway) -> None:
    assert sent(url, "/predict", model="ner", inputs=["ab", "abc"], aggregation_strategy="max") == [
        [{"end": 2}],
        [{"end": 3}],
    ]
    assert triton.calls[-1].parameters == {"aggregation_strategy": "max"}
    assert sent(url, "/predict", model="ner", inputs="abcd") == [{"end": 4}]
    assert refused(url, "/predict", model="ner", inputs="a", aggregation_strategy="most")[0] == "aggregation_strategy"
    # The only model for this route.
    alone = FakeTriton({"ner": FRONTS["ner"]})
    where = start_gateway(alone)
    wait_for(lambda: HTTP.get(f"{where}/v1/models").json()["data"], pause_s=0.05)
    client = InferenceClient(model=f"{where}/predict", timeout=20)
    entities = client.token_classification("abcd", aggregation_strategy="simple")
    assert entities[0].end == 4 and alone.calls[-1].parameters == {"aggregation_strategy": "simple"}


def test_info_is_that_of_tei(url: str) -> None:
    said = HTTP.get(f"{url}/info", params={"model": "bge"}).json()
    assert said["model_id"] == "BAAI/bge-m3" and said["model_dtype"] == "bfloat16"
    assert said["model_type"] == {"embedding": {"pooling": "last_token"}}
    assert (said["max_input_length"], said["max_client_batch_size"]) == (64, 2048)
    ranks = HTTP.get(f"{url}/info", params={"model": "cross"}).json()
    assert ranks["model_type"] == {"reranker": {"id2label": {"0": "score"}, "label2id": {"score": 0}}}
    assert HTTP.get(f"{url}/info", params={"model": "none"}).status_code == 404
    assert HTTP.get(f"{url}/info").json()["error"]["param"] == "model", "there are several"
