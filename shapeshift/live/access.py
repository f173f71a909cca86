"""Who may open the page: this machine, or with a key whoever has it. Other sites' pages may not."""

from __future__ import annotations

import hashlib
import hmac
import html
from collections.abc import Awaitable, Callable, MutableMapping
from http.cookies import SimpleCookie
from typing import Any
from urllib.parse import parse_qs, urlsplit

from shapeshift.errors import InvalidInputError
from shapeshift.triton.settings import is_loopback

COOKIE = "shapeshift_live"
KEY_VARIABLE = "SHAPESHIFT_LIVE_KEY"
_MOST_FORM = 4096

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Guard:
    """ASGI: passes on what may be served by `app`, websockets too.

    key: asked for once by a form, and then kept in a cookie; empty: only names of the loopback address are served, so
    that no other site's name can be pointed at this page.
    """

    def __init__(self, app: App, key: str) -> None:
        self._app = app
        self._key = key
        self._cookie = hashlib.sha256(b"shapeshift live " + key.encode()).hexdigest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        host, origin = headers.get("host", ""), headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != host:
            await _refuse(scope, send, 403, "Another site's page may not use this one.")
        elif not self._key and not _is_local(host):
            await _refuse(scope, send, 403, f"Open this page as localhost, or set {KEY_VARIABLE}.")
        elif not self._key or self._has_cookie(headers.get("cookie", "")):
            await self._app(scope, receive, send)
        elif scope["type"] == "http" and scope["method"] == "POST" and scope["path"] == "/key":
            await self._log_in(receive, send)
        else:
            await _refuse(scope, send, 401, "This page asks for its key.", _FORM)

    def _has_cookie(self, cookies: str) -> bool:
        cookie = SimpleCookie(cookies).get(COOKIE)
        return cookie is not None and hmac.compare_digest(cookie.value, self._cookie)

    async def _log_in(self, receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more and len(body) <= _MOST_FORM:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        said = parse_qs(body[:_MOST_FORM].decode("latin-1")).get("key", [""])[0]
        if not hmac.compare_digest(said.encode(), self._key.encode()):
            await _answer(send, 401, _page("That is not the key.", _FORM), [])
            return
        cookie = f"{COOKIE}={self._cookie}; HttpOnly; SameSite=Strict; Path=/"
        await _answer(send, 303, "", [(b"location", b"/"), (b"set-cookie", cookie.encode())])


_FORM = (
    '<form method="post" action="/key"><label>Key <input name="key" type="password" autofocus></label>'
    " <button>Open</button></form>"
)


def _is_local(host: str) -> bool:
    try:
        return is_loopback(urlsplit(f"//{host}").hostname or "")
    except (ValueError, InvalidInputError):
        return False


def _page(text: str, form: str) -> str:
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>shapeshift live</title><p>{html.escape(text)}</p>{form}</html>"
    )


async def _refuse(scope: Scope, send: Send, status: int, text: str, form: str = "") -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
    else:
        await _answer(send, status, _page(text, form), [])


async def _answer(send: Send, status: int, text: str, headers: list[tuple[bytes, bytes]]) -> None:
    named = [(b"content-type", b"text/html; charset=utf-8"), (b"cache-control", b"no-store"), *headers]
    await send({"type": "http.response.start", "status": status, "headers": named})
    await send({"type": "http.response.body", "body": text.encode()})
