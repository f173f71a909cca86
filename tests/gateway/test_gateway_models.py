"""What is served, by which names, and on which of several servers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx2
import openai
import pytest

from shapeshift.errors import ModelDiedError, ModelError, ModelGoneError
from shapeshift.gateway.catalogue import Catalogue
from shapeshift.gateway.exposition import merged
from shapeshift.gateway.upstream import Upstream
from shapeshift.triton import metrics
from tests.gateway.fake_triton import FRONTS, FakeTriton
from tests.waiting import wait_for


def test_fronts_and_their_adapters_are_listed(client: openai.OpenAI) -> None:
    listed = {model.id: model for model in client.models.list()}
    # An adapter has its own name only where no front and no other adapter has it.
    assert sorted(listed) == sorted(
        ["classify_image", "classify_raw", "classify_text", "cross", "encode", "generate", "generate_lora"]
        + ["generate_lora:encode", "generate_lora:shout", "shout", "score", "topics"]
    )
    assert listed["encode"].to_dict().items() >= {"kind": "embedding", "max_model_len": 512}.items()
    assert listed["shout"].to_dict()["parent"] == "generate_lora"
    assert client.models.retrieve("generate_lora:shout").id == "generate_lora:shout"
    with pytest.raises(openai.NotFoundError, match="'absent' is not served"):
        client.models.retrieve("absent")


def test_another_kind_of_model_is_named(client: openai.OpenAI) -> None:
    with pytest.raises(
        openai.BadRequestError, match="cross is for reranking and text_classification; models for this request: encode"
    ) as caught:
        client.embeddings.create(model="cross", input="a")
    assert (caught.value.param, caught.value.code) == ("model", "model_not_supported")
    with pytest.raises(openai.NotFoundError, match="'enkode' is not served; did you mean encode") as unknown:
        client.embeddings.create(model="enkode", input="a")
    assert (unknown.value.param, unknown.value.code) == ("model", "model_not_found")


def test_a_front_that_is_new_is_found_at_once(start_gateway: Callable[..., str]) -> None:
    triton = FakeTriton(dict(FRONTS))
    url = start_gateway(triton, refresh_s=3600)
    triton.fronts["later"] = FRONTS["encode"]

    def found() -> bool:
        return httpx2.post(f"{url}/v1/embeddings", json={"model": "later", "input": "a"}).status_code == 200

    wait_for(found, timeout_s=20, pause_s=0.2)


def test_one_look_answers_all_who_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask() -> list[Any]:
        catalogue = Catalogue(Upstream([triton]), refresh_s=3600)
        asked = (catalogue.find("absent", ("embedding",)) for _ in range(100))
        return await asyncio.gather(*asked, return_exceptions=True)

    triton, looks = FakeTriton(), []

    async def models(timeout_s: float) -> list[str]:
        looks.append(timeout_s)
        await asyncio.sleep(0.01)
        return ["encode"]

    monkeypatch.setattr(triton, "models", models)
    assert {error.code for error in asyncio.run(ask())} == {"model_not_found"}
    assert len(looks) == 1


@pytest.mark.parametrize("model", ["cross", "cross:adapter"])
def test_a_model_that_has_left_just_now_is_not_unknown(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    """The sidecar unloads a front whose process has died before it loads it again: clients are to come back."""
    triton = FakeTriton(dict(FRONTS))

    async def ask() -> list[Any]:
        catalogue = Catalogue(Upstream([triton]), refresh_s=3600)
        errors: list[Any] = []
        await catalogue.refresh()
        front = triton.fronts.pop("cross")
        for _ in range(2):
            await catalogue.refresh()
            errors += await asyncio.gather(catalogue.find(model, ("reranking",)), return_exceptions=True)
        triton.fronts["cross"] = front
        await catalogue.refresh()
        assert (await catalogue.find("cross", ("reranking",))).front.name == "cross"
        del triton.fronts["cross"]
        await catalogue.refresh()
        monkeypatch.setattr("shapeshift.gateway.catalogue._RELOADS_S", 0.0)
        await catalogue.refresh()
        return [*errors, *await asyncio.gather(catalogue.find(model, ("reranking",)), return_exceptions=True)]

    *gone, unknown = asyncio.run(ask())
    assert [str(error) for error in gone] == [f"model: '{model}' is not loaded at present; retry later"] * 2
    assert all(isinstance(error, ModelGoneError) for error in gone)
    assert unknown.status == 404 and unknown.code == "model_not_found"


def test_a_client_that_goes_away_waits_for_no_look(
    start_gateway: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    triton = FakeTriton()
    url = start_gateway(triton, refresh_s=3600)
    looks: list[str] = []

    async def models(timeout_s: float) -> list[str]:
        looks.append("begun")
        try:
            await asyncio.sleep(30)
        finally:
            looks.append("ended")
        return []

    wait_for(lambda: embed(url).status_code == 200)
    monkeypatch.setattr(triton, "models", models)
    monkeypatch.setattr("shapeshift.gateway.catalogue._LOOK_AGAIN_S", 0.0)
    with pytest.raises(httpx2.ReadTimeout):
        httpx2.post(f"{url}/v1/embeddings", json={"model": "absent", "input": "a"}, timeout=0.3)
    wait_for(lambda: looks == ["begun", "ended"], timeout_s=10)


# Several servers.


def embed(url: str) -> Any:
    return httpx2.post(f"{url}/v1/embeddings", json={"model": "encode", "input": "a"}, timeout=20)


def test_a_server_that_is_gone_costs_no_request(start_gateway: Callable[..., str]) -> None:
    one, two = FakeTriton(url="one:1"), FakeTriton(url="two:1")
    url = start_gateway(one, two, refresh_s=3600)
    assert embed(url).status_code == 200
    one.gone = True
    assert [embed(url).status_code for _ in range(10)] == [200] * 10
    assert httpx2.get(f"{url}/health").json() == {"status": "ok", "servers": 2, "live": 1}
    two.gone = True
    refused = embed(url)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert refused.json()["error"]["code"] == "unavailable"
    for ask in (httpx2.get, httpx2.head):
        assert ask(f"{url}/health").status_code == 503


@pytest.mark.parametrize(("failure", "others"), [(ModelDiedError("x"), 1), (ModelError("full", "UNAVAILABLE"), 0)])
def test_only_a_model_that_is_gone_is_asked_for_elsewhere(
    start_gateway: Callable[..., str], failure: Exception, others: int
) -> None:
    one, two = FakeTriton(url="one:1"), FakeTriton(url="two:1")
    url = start_gateway(one, two)
    assert embed(url).status_code == 200
    one.failure = failure
    one.calls.clear()
    two.calls.clear()
    answer = embed(url)
    assert len(one.calls) == 1 and len(two.calls) == others
    assert answer.status_code == (200 if others else 429)


def test_no_server_has_answered_yet(start_gateway: Callable[..., str]) -> None:
    triton = FakeTriton()
    triton.gone = True
    url = start_gateway(triton)
    assert embed(url).status_code == 503
    triton.gone = False


def test_metrics_are_passed_on(start_gateway: Callable[..., str]) -> None:
    url = start_gateway(FakeTriton(), metrics=("http://127.0.0.1:9/metrics",))
    embed(url)
    page = httpx2.get(f"{url}/metrics").text
    assert 'shapeshift_gateway_answers_total{status="200"} 1' in page
    assert "shapeshift_gateway_requests_running 1" in page
    assert "# no metrics at http://127.0.0.1:9/metrics" in page


@pytest.mark.parametrize("path", ["/health", "/metrics"])
def test_probes_answer_head(url: str, path: str) -> None:
    whole, head = httpx2.get(f"{url}{path}"), httpx2.head(f"{url}{path}")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == whole.headers["content-type"]


def test_pages_of_several_servers_become_one() -> None:
    page = '# HELP a_s Time\n# TYPE a_s histogram\na_s_bucket{le="1"} 2\na_s_count 2\n# TYPE b gauge\nb{} 3\n'
    found = merged({"one:1": page, "two:2": page, "three:3": "# no metrics\n"})
    assert found.splitlines() == [
        *("# HELP a_s Time", "# TYPE a_s histogram"),
        *('a_s_bucket{server="one:1",le="1"} 2', 'a_s_count{server="one:1"} 2'),
        *('a_s_bucket{server="two:2",le="1"} 2', 'a_s_count{server="two:2"} 2'),
        *("# TYPE b gauge", 'b{server="one:1",} 3', 'b{server="two:2",} 3', "# no metrics"),
    ]
    assert metrics.parse(found)["b", frozenset({("server", "two:2")})] == 3


def test_the_pages_are_merged(start_gateway: Callable[..., str]) -> None:
    gone = ("http://127.0.0.1:9/metrics", "http://127.0.0.1:10/metrics")
    page = httpx2.get(f"{start_gateway(FakeTriton(), metrics=gone)}/metrics").text
    assert page.count("# no metrics at http://127.0.0.1:") == 2


def test_the_documentation_lists_every_body(url: str) -> None:
    described = httpx2.get(f"{url}/openapi.json").json()
    assert httpx2.get(f"{url}/docs").status_code == 200
    for path, methods in described["paths"].items():
        for method in methods:
            if method == "post":
                schema = methods[method]["requestBody"]["content"]["application/json"]["schema"]
                named = {one["$ref"].rpartition("/")[2] for one in schema.get("anyOf", [schema])}
                assert named <= described["components"]["schemas"].keys(), path
