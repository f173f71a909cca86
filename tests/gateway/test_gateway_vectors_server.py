"""Small random models of three kinds in a real Triton: their outputs by its client, and by the gateway."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tritonclient.grpc as triton

from shapeshift.cli.main import main
from tests.compiled import link_kernels
from tests.engines.families import save_model, save_modules
from tests.engines.test_engines_vectors import save_splade, save_token_heads
from tests.gateway.conftest import HTTP
from tests.gateway.served import gateway, serving

if TYPE_CHECKING:
    from shapeshift.triton.embedded.server import TritonServer

pytestmark = pytest.mark.server
TEXTS = ["w5 w6 w5 w7 w6 w8", "w1 w50"]


@pytest.fixture(scope="module")
def server(
    make_server: Callable[..., TritonServer], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    folder = tmp_path_factory.mktemp("vectors")
    save_token_heads(save_modules(save_model(folder / "m3", "xlm-roberta"), pooling="cls"))
    save_splade(folder / "splade", "bert")
    save_model(folder / "ner", "bert", "AutoModelForTokenClassification", num_labels=3)
    link_kernels(folder / "build")
    at = ["--repository", str(folder / "models"), "--build", str(folder / "build")]
    for name in ("m3", "splade", "ner"):
        assert main(["add", str(folder / name), *at]) == 0
        config = folder / "models" / name / "config.pbtxt"
        config.write_text(
            config.read_text().replace('"max_bins" value { string_value: "4"', '"bins" value { string_value: "none"')
        )
    assert main(["engines", *at]) == 0
    with serving(make_server, ("m3", "splade", "ner"), folder / "run", folder / "build" / "repository") as started:
        yield started


def outputs(server: TritonServer, model: str, *names: str, **parameters: Any) -> list[np.ndarray]:
    text = triton.InferInput("TEXT", [2, 1], "BYTES")
    text.set_data_from_numpy(np.array([[one] for one in TEXTS], dtype=object))
    asked = [triton.InferRequestedOutput(name) for name in names]
    with triton.InferenceServerClient(server.grpc_url) as client:
        result = client.infer(model, [text], outputs=asked, client_timeout=60, parameters=parameters or None)
    return [np.asarray(result.as_numpy(name)) for name in names]


def test_outputs_are_fields_of_tritons_client(server: TritonServer, free_ports: Callable[[int], list[int]]) -> None:
    for model in ("m3", "splade"):
        indices, values = outputs(server, model, "SPARSE_INDICES", "SPARSE_VALUES")
        assert indices.shape == values.shape and ((indices >= 0) == (values > 0)).all() and (values > 0).any()
    dense, tokens = outputs(server, "m3", "EMBEDDING", "TOKEN_EMBEDDING")
    assert dense.shape == (2, 16) and tokens.shape == (2, 8, 12)
    (rows,) = outputs(server, "ner", "ENTITIES", aggregation_strategy="first")
    entities = [json.loads(row) for row in rows[:, 0]]
    with gateway(server, free_ports(1)[0], 3) as url:

        def sent(path: str, **body: Any) -> Any:
            answer = HTTP.post(f"{url}{path}", json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()

        assert sent("/predict", model="ner", inputs=TEXTS, aggregation_strategy="first") == entities
        sparse = sent("/embed_sparse", model="splade", inputs=TEXTS)
        assert [one["index"] for one in sparse[0]] == indices[0][indices[0] >= 0].tolist()
        pooled = sent("/v1/pooling", model="m3", input=TEXTS, task="token_embed")["data"]
        assert [len(one["data"]) for one in pooled] == [7, 3]
        ranked = sent("/v1/rerank", model="m3", query=TEXTS[0], documents=TEXTS, score_type="late-interaction")
        assert ranked["results"][0]["index"] == 0
        assert ranked["results"][0]["relevance_score"] == pytest.approx(7, abs=0.1), "each of 7 vectors finds itself"
        typed = sent("/v2/embed", model="m3", texts=TEXTS, embedding_types=["binary", "int8"])["embeddings"]
        assert [len(row) for row in (*typed["binary"], *typed["int8"])] == [2, 2, 16, 16]
