"""Who may open the page: this machine, or with a key whoever has it. Other sites' pages may not."""

from __future__ import annotations

import hashlib
import hmac
import html
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qs, urlsplit

from shapeshift.errors import InvalidInputError
from shapeshift.triton.settings import is_loopback

COOKIE = "shapeshift_live"
KEY_VARIABLE = "SHAPESHIFT_LIVE_KEY"
MOST_BODY = 8 << 20
"""Bytes of a request: more than the largest image that a panel takes."""
_MOST_FORM = 4096

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Guard:
    """ASGI: passes on what may be served by `app`, websockets too.

    key: asked for once by a form, and then kept in a cookie; empty: only names of the loopback address are served, so
    that no other site's name can be pointed at this page. Bodies of more than `MOST_BODY` bytes are refused, and no
    other page may show this one in a frame.
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
        host, send = headers.get("host", ""), _unframed(send)
        if "origin" in headers and not _is_origin(headers["origin"], host):
            await _refuse(scope, send, 403, "Another site's page may not use this one.")
        elif not self._key and not _is_local(host):
            await _refuse(scope, send, 403, f"Open this page as localhost, or set {KEY_VARIABLE}.")
        elif not self._key or self._has_cookie(headers.get("cookie", "")):
            await self._pass_on(scope, receive, send, headers.get("content-length", ""))
        elif scope["type"] == "http" and scope["method"] == "POST" and scope["path"] == "/key":
            await self._log_in(receive, send)
        else:
            await _refuse(scope, send, 401, "This page asks for its key.", _FORM)

    def _has_cookie(self, cookies: str) -> bool:
        pairs = (cookie.strip().partition("=") for cookie in cookies.split(";"))
        values = [value.encode() for name, _, value in pairs if name == COOKIE]
        return any(hmac.compare_digest(value, self._cookie.encode()) for value in values)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send, length: str) -> None:
        if scope["type"] == "websocket":
            await self._app(scope, receive, send)
            return
        size, begun = int(length) if length.isdecimal() else 0, False

        async def counted() -> MutableMapping[str, Any]:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            return message if size <= MOST_BODY else {"type": "http.disconnect"}

        async def answer(message: MutableMapping[str, Any]) -> None:
            nonlocal begun
            # What is said of a body that ended too early is of no use.
            if begun or size <= MOST_BODY:
                begun = True
                await send(message)

        if size <= MOST_BODY:
            size = 0
            try:
                await self._app(scope, counted, answer)
            except Exception:
                if size <= MOST_BODY:
                    raise
        if size > MOST_BODY and not begun:
            await _refuse(scope, send, 413, f"At most {MOST_BODY >> 20} MiB.")

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


def _is_origin(origin: str, host: str) -> bool:
    try:
        return urlsplit(origin).netloc == host
    except ValueError:
        return False


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


def _unframed(send: Send) -> Send:
    """`send` for answers that no page may show in a frame."""

    async def unframed(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            policy = (b"content-security-policy", b"frame-ancestors 'none'")
            message = {**message, "headers": [*message.get("headers", ()), policy]}
        await send(message)

    return unframed


async def _refuse(scope: Scope, send: Send, status: int, text: str, form: str = "") -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
    else:
        await _answer(send, status, _page(text, form), [])


async def _answer(send: Send, status: int, text: str, headers: list[tuple[bytes, bytes]]) -> None:
    named = [(b"content-type", b"text/html; charset=utf-8"), (b"cache-control", b"no-store"), *headers]
    await send({"type": "http.response.start", "status": status, "headers": named})
    await send({"type": "http.response.body", "body": text.encode()})
