"""Who may open the page: this machine, or with a key whoever has it. Other sites' pages may not."""

from __future__ import annotations

import hashlib
import hmac
import html
from urllib.parse import parse_qs, urlsplit

from starlette.requests import HTTPConnection, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shapeshift.errors import InvalidInputError
from shapeshift.triton.settings import is_loopback

COOKIE = "shapeshift_live"
KEY_VARIABLE = "SHAPESHIFT_LIVE_KEY"
MOST_BODY = 8 << 20
"""Bytes of a request: more than the largest image that a panel takes."""
_MOST_FORM = 4096
_FORM = (
    '<form method="post" action="/key"><label>Key <input name="key" type="password" autofocus></label>'
    " <button>Open</button></form>"
)


class Guard:
    """ASGI: passes on what may be served by `app`, websockets too.

    key: asked for once by a form, and then kept in a cookie; empty: only names of the loopback address are served, so
    that no other site's name can be pointed at this page. Bodies of more than `MOST_BODY` bytes are refused, and no
    other page may show this one in a frame.
    """

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key
        self._cookie = hashlib.sha256(b"shapeshift live " + key.encode()).hexdigest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        connection, send = HTTPConnection(scope), _unframed(send)
        origin, host = connection.headers.get("origin"), connection.headers.get("host", "")
        cookie = connection.cookies.get(COOKIE, "")
        if origin is not None and not _is_origin(origin, host):
            answer = _page(403, "Another site's page may not use this one.")
        elif not self._key and not _is_local(host):
            answer = _page(403, f"Open this page as localhost, or set {KEY_VARIABLE}.")
        elif not self._key or hmac.compare_digest(cookie.encode(), self._cookie.encode()):
            await self._pass_on(scope, receive, send, connection.headers.get("content-length", ""))
            return
        elif scope["type"] == "http" and scope["method"] == "POST" and scope["path"] == "/key":
            answer = await self._log_in(Request(scope, receive))
        else:
            answer = _page(401, "This page asks for its key.", _FORM)
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await answer(scope, receive, send)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send, length: str) -> None:
        if scope["type"] == "websocket":
            await self._app(scope, receive, send)
            return
        size, begun = int(length) if length.isdecimal() else 0, False

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            return message if size <= MOST_BODY else {"type": "http.disconnect"}

        async def answer(message: Message) -> None:
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
            await _page(413, f"At most {MOST_BODY >> 20} MiB.")(scope, receive, send)

    async def _log_in(self, request: Request) -> Response:
        body = b""
        async for piece in request.stream():
            body += piece
            if len(body) > _MOST_FORM:
                break
        said = parse_qs(body[:_MOST_FORM].decode("latin-1")).get("key", [""])[0]
        if not hmac.compare_digest(said.encode(), self._key.encode()):
            return _page(401, "That is not the key.", _FORM)
        answer = RedirectResponse("/", 303)
        answer.set_cookie(COOKIE, self._cookie, httponly=True, samesite="strict")
        return answer


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


def _page(status: int, text: str, form: str = "") -> Response:
    page = (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>shapeshift live</title><p>{html.escape(text)}</p>{form}</html>"
    )
    return HTMLResponse(page, status, {"cache-control": "no-store"})


def _unframed(send: Send) -> Send:
    """`send` for answers that no page may show in a frame."""

    async def unframed(message: Message) -> None:
        if message["type"] == "http.response.start":
            policy = (b"content-security-policy", b"frame-ancestors 'none'")
            message = {**message, "headers": [*message.get("headers", ()), policy]}
        await send(message)

    return unframed
