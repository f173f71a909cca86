"""Who may open the page, and what it says of the server above all panels."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import pytest

from shapeshift.cli.running import live as command
from shapeshift.errors import InvalidInputError
from shapeshift.live.access import COOKIE, KEY_VARIABLE, MOST_BODY, Guard
from shapeshift.live.app import dead_models, drawn, state_of
from shapeshift.live.source import Source
from tests.live.servers import MetricsServer, view

LOCAL = {"host": "127.0.0.1:8090"}


class Answer:
    def __init__(self, sent: list[MutableMapping[str, Any]]) -> None:
        self.status = sent[0].get("status", sent[0]["type"])
        self.headers = {name.decode(): value.decode() for name, value in sent[0].get("headers", ())}
        self.body = b"".join(message.get("body", b"") for message in sent).decode()


def ask(
    key: str, headers: dict[str, str], kind: str = "http", method: str = "GET", path: str = "/", body: str = ""
) -> Answer:
    """What a request gets; 200 and "page": it was let through."""
    sent: list[MutableMapping[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"page"})

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.request", "body": body.encode(), "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": kind, "method": method, "path": path, "headers": raw}
    asyncio.run(Guard(app, key)(scope, receive, send))
    return Answer(sent)


@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_without_a_key_this_machine_alone_is_served(kind: str) -> None:
    assert ask("", LOCAL, kind).body == "page"
    assert ask("", {"host": "localhost:8090"}, kind).body == "page"
    for host in ("example.org:8090", "10.0.0.5:8090", "", "[::1"):
        assert ask("", {"host": host}, kind).status in (403, "websocket.close")


@pytest.mark.parametrize("kind", ["http", "websocket"])
@pytest.mark.parametrize("key", ["", "secret"])
def test_the_pages_of_other_sites_may_not_use_it(kind: str, key: str) -> None:
    headers = {**LOCAL, "origin": "https://example.org"}
    assert ask(key, headers, kind).status in (403, "websocket.close")
    assert ask("", {**LOCAL, "origin": "http://127.0.0.1:8090"}, kind).body == "page"


def test_a_key_is_asked_for_once() -> None:
    public = {"host": "example.org:8090"}
    asked = ask("secret", public)
    assert asked.status == 401 and 'action="/key"' in asked.body and "page" not in asked.body.partition("<form")[0][-9:]
    assert ask("secret", public, "websocket").status == "websocket.close"
    assert ask("secret", public, method="POST", path="/key", body="key=wrong").status == 401
    right = ask("secret", public, method="POST", path="/key", body="key=secret")
    assert (right.status, right.headers["location"]) == (303, "/")
    assert "HttpOnly" in right.headers["set-cookie"] and "secret" not in right.headers["set-cookie"]
    cookie = {"cookie": right.headers["set-cookie"].partition(";")[0]}
    assert ask("secret", {**public, **cookie}).body == "page"
    assert ask("secret", {**public, **cookie}, "websocket").body == "page"
    assert ask("other", {**public, **cookie}).status == 401, "another key, another cookie"


def test_the_key_s_cookie_is_found_among_others() -> None:
    right = ask("secret", LOCAL, method="POST", path="/key", body="key=secret").headers["set-cookie"].partition(";")[0]
    for cookies in ('prefs={"dark":true}; ' + right, f"{right}; a", f"{COOKIE}=é; {right}", f"=;;{right}"):
        assert ask("secret", {**LOCAL, "cookie": cookies}).status == 200, cookies
    for cookies in (f"{COOKIE}=é", f"{COOKIE}=", f"x{right}", COOKIE):
        assert ask("secret", {**LOCAL, "cookie": cookies}).status == 401, cookies


def test_an_origin_that_is_none_is_foreign() -> None:
    assert ask("", {**LOCAL, "origin": "http://[::1"}).status == 403


def test_no_page_may_show_it_in_a_frame() -> None:
    for answer in (ask("", LOCAL), ask("secret", LOCAL), ask("", {"host": "example.org"})):
        assert answer.headers["content-security-policy"] == "frame-ancestors 'none'"


def upload(body: int, headers: dict[str, str]) -> tuple[int, int]:
    """The status of an upload of so many bytes, and how many of them the app has got."""
    sent: list[MutableMapping[str, Any]] = []
    got, left = 0, body

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal got
        while (message := await receive())["type"] == "http.request":
            got += len(message["body"])
            if not message["more_body"]:
                await send({"type": "http.response.start", "status": 200, "headers": []})
                return
        await send({"type": "http.response.start", "status": 400, "headers": []})
        raise ConnectionError("the client has gone")

    async def receive() -> MutableMapping[str, Any]:
        nonlocal left
        chunk, left = min(left, 1 << 20), left - min(left, 1 << 20)
        return {"type": "http.request", "body": b"a" * chunk, "more_body": left > 0}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    raw = [(name.encode(), value.encode()) for name, value in {**LOCAL, **headers}.items()]
    scope = {"type": "http", "method": "POST", "path": "/upload", "headers": raw}
    asyncio.run(Guard(app, "")(scope, receive, send))
    return Answer(sent).status, got


def test_a_body_that_is_too_long_is_refused() -> None:
    assert upload(MOST_BODY, {"content-length": str(MOST_BODY)}) == (200, MOST_BODY)
    assert upload(MOST_BODY + 1, {"content-length": str(MOST_BODY + 1)}) == (413, 0)
    # One that does not say how long it is, or says it wrongly.
    for headers in ({}, {"content-length": "1"}):
        status, got = upload(MOST_BODY + 1, headers)
        assert status == 413 and got <= MOST_BODY


def test_the_command_refuses_other_machines_without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    with pytest.raises(InvalidInputError, match=KEY_VARIABLE):
        command.run(parser.parse_args(["--host", "0.0.0.0"]))


# Above the panels.


def test_the_page_says_that_the_server_does_not_answer(tmp_path: Path) -> None:
    server = MetricsServer()
    source = Source(lambda: server.addresses(tmp_path))
    server.close()
    source.look()
    assert "no answer" in state_of(source) and "goes on asking" in state_of(source)


def test_the_page_names_the_models_that_do_not_serve() -> None:
    front = {"name": "e", "models": [{"name": "e", "state": "serving"}, {"name": "e2", "state": "silent"}]}
    status = {"fronts": [front], "models": [{"name": "x", "state": "dead"}]}
    assert dead_models(view({}, {}, status=status)) == {"e2": "silent", "x": "dead"}
    # One that is being reloaded is not in the status.
    assert dead_models(view({}, {}, status=status, silent=["gone"]))["gone"] == "no heartbeat"
    # What the sidecar moves, and what somebody has unloaded, does not fail.
    status |= {"workers": [{"name": "e_w00"}], "unloaded": ["old"]}
    assert dead_models(view({}, {}, status=status, silent=["e_w00", "gone", "old"])).keys() == {"e2", "x", "gone"}
    assert dead_models(None) == {}


def test_a_panel_that_cannot_be_drawn_says_so() -> None:
    def draw(view: Any, model: str) -> str:
        raise KeyError("a <field> of another version")

    assert "cannot be drawn" in drawn(draw, view({}, {}), "m") and "&lt;field&gt;" in drawn(draw, view({}, {}), "m")
