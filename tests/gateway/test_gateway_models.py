"""What is served, by which names, and on which of several servers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx2
import openai
import pytest

from shapeshift.errors import ModelDiedError, ModelError, ModelGoneError
from shapeshift.gateway.catalogue import Catalogue
from shapeshift.gateway.upstream import Upstream
from shapeshift.triton import metrics
from tests.gateway.conftest import HTTP
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
        return HTTP.post(f"{url}/v1/embeddings", json={"model": "later", "input": "a"}).status_code == 200

    wait_for(found, timeout_s=20, pause_s=0.2)


class SlowTriton(FakeTriton):
    """Takes `look_s` to list its models. looks: what became of each listing."""

    def __init__(self, look_s: float) -> None:
        super().__init__()
        self.look_s = look_s
        self.looks: list[str] = []

    async def models(self, timeout_s: float) -> list[str]:
        self.looks.append("begun")
        try:
            await asyncio.sleep(self.look_s)
        finally:
            self.looks.append("ended")
        return await super().models(timeout_s)


def test_one_look_answers_all_who_wait_for_it() -> None:
    async def ask() -> list[Any]:
        catalogue = Catalogue(Upstream([triton]))
        requests = (catalogue.find("absent", ("embedding",)) for _ in range(100))
        return await asyncio.gather(*requests, return_exceptions=True)

    triton = SlowTriton(look_s=0.01)
    assert {error.code for error in asyncio.run(ask())} == {"model_not_found"}
    assert triton.looks == ["begun", "ended"]


@pytest.mark.parametrize("model", ["cross", "cross:adapter"])
def test_a_model_that_has_left_just_now_is_not_unknown(model: str) -> None:
    """The sidecar unloads a front whose process has died before it loads it again: clients are to come back."""

    async def ask(reloads_s: float) -> list[Any]:
        triton = FakeTriton(dict(FRONTS))
        catalogue = Catalogue(Upstream([triton]), reloads_s)
        errors: list[Any] = []
        await catalogue.refresh()
        front = triton.fronts.pop("cross")
        for _ in range(2):
            await catalogue.refresh()
            errors += await asyncio.gather(catalogue.find(model, ("reranking",)), return_exceptions=True)
        triton.fronts["cross"] = front
        await catalogue.refresh()
        assert (await catalogue.find("cross", ("reranking",))).front.name == "cross"
        return errors

    gone = asyncio.run(ask(reloads_s=30.0))
    *_, unknown = asyncio.run(ask(reloads_s=0.0))
    assert [str(error) for error in gone] == [f"model: '{model}' is not loaded at present; retry later"] * 2
    assert all(isinstance(error, ModelGoneError) for error in gone)
    assert unknown.status == 404 and unknown.code == "model_not_found"


def test_a_client_that_goes_away_waits_for_no_look(start_gateway: Callable[..., str]) -> None:
    triton = SlowTriton(look_s=0.0)
    url = start_gateway(triton, refresh_s=3600)
    wait_for(lambda: embed(url).status_code == 200)
    triton.look_s = 30.0
    triton.looks.clear()

    def is_looking() -> bool:
        with contextlib.suppress(httpx2.ReadTimeout):
            HTTP.post(f"{url}/v1/embeddings", json={"model": "absent", "input": "a"}, timeout=0.3)
        return triton.looks != []

    # A name that is unknown has the servers asked again once a second.
    wait_for(is_looking, timeout_s=20, pause_s=0.2)
    wait_for(lambda: triton.looks == ["begun", "ended"], timeout_s=10)


# Several servers.


def embed(url: str) -> Any:
    return HTTP.post(f"{url}/v1/embeddings", json={"model": "encode", "input": "a"})


def test_a_server_that_is_gone_costs_no_request(start_gateway: Callable[..., str]) -> None:
    one, two = FakeTriton(url="one:1"), FakeTriton(url="two:1")
    url = start_gateway(one, two, refresh_s=3600)
    assert embed(url).status_code == 200
    one.gone = True
    assert [embed(url).status_code for _ in range(10)] == [200] * 10
    assert HTTP.get(f"{url}/health").json() == {"status": "ok", "servers": 2, "live": 1}
    two.gone = True
    refused = embed(url)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert refused.json()["error"]["code"] == "unavailable"
    for ask in (HTTP.get, HTTP.head):
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
    page = HTTP.get(f"{url}/metrics").text
    assert 'shapeshift_gateway_answers_total{status="200"} 1' in page
    assert "shapeshift_gateway_requests_running 1" in page
    assert "# no metrics at http://127.0.0.1:9/metrics" in page


@pytest.mark.parametrize("path", ["/health", "/metrics"])
def test_probes_answer_head(url: str, path: str) -> None:
    whole, head = HTTP.get(f"{url}{path}"), HTTP.head(f"{url}{path}")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == whole.headers["content-type"]


@pytest.fixture
def pages() -> Iterator[list[str]]:
    """The addresses of two servers of a metrics page, and of none."""
    page = b'# HELP a_s Time\n# TYPE a_s histogram\na_s_bucket{le="1"} 2\na_s_count 2\n# TYPE b gauge\nb{} 3\n'

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, *_: object) -> None: ...

    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), Page)) for _ in range(2)]
        for server in servers:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            stack.callback(server.shutdown)
        yield [*(f"127.0.0.1:{server.server_port}" for server in servers), "127.0.0.1:9"]


def test_pages_of_several_servers_become_one(start_gateway: Callable[..., str], pages: list[str]) -> None:
    one, two, none = pages
    url = start_gateway(FakeTriton(), metrics=tuple(f"http://{address}/metrics" for address in pages))
    lines = [line for line in HTTP.get(f"{url}/metrics").text.splitlines() if "shapeshift_gateway" not in line]
    assert lines[:-1] == [
        *("# HELP a_s Time", "# TYPE a_s histogram"),
        *(f'a_s_bucket{{server="{one}",le="1"}} 2', f'a_s_count{{server="{one}"}} 2'),
        *(f'a_s_bucket{{server="{two}",le="1"}} 2', f'a_s_count{{server="{two}"}} 2'),
        *("# TYPE b gauge", f'b{{server="{one}",}} 3', f'b{{server="{two}",}} 3'),
    ]
    assert lines[-1].startswith(f"# no metrics at http://{none}/metrics")
    assert metrics.parse("\n".join(lines))["b", frozenset({("server", two)})] == 3


def test_the_documentation_lists_every_body(url: str) -> None:
    described = HTTP.get(f"{url}/openapi.json").json()
    assert HTTP.get(f"{url}/docs").status_code == 200
    for path, methods in described["paths"].items():
        for method in methods:
            if method == "post":
                schema = methods[method]["requestBody"]["content"]["application/json"]["schema"]
                for one in schema.get("anyOf", [schema]):
                    body = described["components"]["schemas"][one["$ref"].rpartition("/")[2]]
                    assert body["properties"] and body["additionalProperties"] is False, path
