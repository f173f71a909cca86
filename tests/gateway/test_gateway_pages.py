"""The pages for people: / and /docs."""

from __future__ import annotations

import html
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urljoin, urlsplit

from shapeshift.gateway.http import api_keys
from tests.gateway.conftest import HTTP
from tests.gateway.fake_triton import FRONTS, FakeTriton
from tests.waiting import wait_for


def page_of(url: str) -> str:
    """The page, once the gateway has looked at its servers."""
    wait_for(lambda: HTTP.get(f"{url}/v1/models").json()["data"], pause_s=0.05)
    return HTTP.get(f"{url}/").text


def examples(page: str) -> list[list[str]]:
    """The words of each command on the page."""
    return [shlex.split(html.unescape(one)) for one in re.findall(r"<pre>(.*?)</pre>", page, re.DOTALL)]


def references(page: str) -> list[str]:
    """What a browser loads, or a reader may follow."""
    return re.findall(r"""(?:src|href)=["']([^"']*)["']""", page)


def test_the_page_has_every_model_with_an_example_that_works(url: str) -> None:
    page = page_of(url)
    fronts = {name: one for name, one in FRONTS.items() if one.get("stream", name) == name}
    assert re.findall(r"<h2>(.*?)</h2>\n<p>(.*?)</p>", page) == [
        (name, fronts[name]["kind"]) for name in sorted(fronts)
    ]
    assert "adapters: shout, encode" in page
    commands = examples(page)
    assert len(commands) == len(fronts)
    for curl, silent, address, option, body in commands:
        assert (curl, silent, option) == ("curl", "-s", "-d")
        assert HTTP.post(address, content=body).status_code == 200, body
    assert "chat/completions" in page and "v1/completions" in page


def test_the_page_needs_nothing_from_elsewhere(url: str) -> None:
    page = page_of(url)
    links = references(page)
    assert links == ["docs", "openapi.json", "v1/models", "health", "metrics"]
    assert all(HTTP.get(urljoin(f"{url}/", one)).status_code == 200 for one in links)
    assert "<script" not in page and "@import" not in page
    head = HTTP.head(f"{url}/")
    assert (head.status_code, head.headers["content-type"]) == (200, "text/html; charset=utf-8")


def test_names_are_text_and_not_markup(start_gateway: Callable[..., str]) -> None:
    url = start_gateway(FakeTriton({"it's <b>": {"kind": "embedding", "outputs": ["EMBEDDING"], "embedding_size": 4}}))
    page = page_of(url)
    assert "<b>" not in page
    ((*_, address, _, body),) = examples(page)
    assert HTTP.post(address, content=body).json()["model"] == "it's <b>"


def test_a_kind_without_a_route_and_a_gateway_without_models(start_gateway: Callable[..., str]) -> None:
    assert "No model is served yet" in HTTP.get(start_gateway(FakeTriton({}))).text
    page = page_of(start_gateway(FakeTriton({"tags": {"kind": "another"}})))
    assert "<h2>tags</h2>" in page and examples(page) == []


def test_with_keys_the_page_and_its_examples_need_one(start_gateway: Callable[..., str], tmp_path: Path) -> None:
    key = {"Authorization": f"Bearer {api_keys.add(tmp_path / 'keys', 'ana')}"}
    url = start_gateway(FakeTriton(), api_keys=tmp_path / "keys")
    wait_for(lambda: HTTP.get(f"{url}/v1/models", headers=key).json()["data"], pause_s=0.05)
    assert HTTP.get(f"{url}/").status_code == 401
    for *_, option, header, _, _ in examples(HTTP.get(f"{url}/", headers=key).text):
        assert (option, header) == ("-H", "Authorization: Bearer $KEY")


def test_the_documentation_loads_nothing_from_elsewhere(url: str) -> None:
    page = HTTP.get(f"{url}/docs").text
    loaded = references(page)
    assert len(loaded) == 3 and all(urlsplit(one).netloc == "" for one in loaded)
    files = [HTTP.get(f"{url}{one}") for one in loaded]
    assert [one.status_code for one in files] == [200] * 3
    # The public validator is a page's badge unless it is switched off.
    assert '"validatorUrl": null' in page and "'/openapi.json'" in page
    # Swagger UI reads OpenAPI 3.1 from its version 5 on.
    assert HTTP.get(f"{url}/openapi.json").json()["openapi"].startswith("3.1.")
    (script,) = (one.text for one in files if "javascript" in one.headers["content-type"])
    assert re.search(r'PACKAGE_VERSION:"5\.', script)
