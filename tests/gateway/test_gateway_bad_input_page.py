"""The table of bad input in docs/gateway.md: each row is sent, and gets what the row says."""

from __future__ import annotations

import base64
import json
import re
import socket
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from shapeshift.errors import InvalidInputError, ModelError
from shapeshift.gateway.http import api_keys
from shapeshift.token_adapt.image_decoding import decode
from shapeshift.token_adapt.model.manifest import Preprocessing
from tests.docs.docs_pages import PROJECT, section
from tests.gateway.conftest import HTTP
from tests.gateway.fake_triton import FRONTS, FakeTriton
from tests.waiting import wait_for

PAGE = PROJECT / "docs" / "gateway.md"
EMBED = {"model": "encode", "input": "a"}
CHAT = {"model": "generate", "messages": [{"role": "user", "content": "a"}]}
TOOL = {"type": "function", "function": {"name": "f"}}
RESULT = {"role": "tool", "tool_call_id": "a", "content": "b"}
IMAGE = {"model": "classify_image"}
PNG = "data:image/png;base64,"
LOOP = "{% for a in range(90000) %}{% for b in range(90000) %}x{% endfor %}{% endfor %}"


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


BOMB = b"\x89PNG\r\n\x1a\n" + b"".join(
    (
        chunk(b"IHDR", struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)),
        chunk(b"IDAT", zlib.compress(bytes(1 << 18))),
    )
)
# Of each row: the route and the bodies that are sent to a gateway without keys, its servers as they are.
PLAIN: dict[str, tuple[str, list[Any]]] = {
    "an unknown model": ("embeddings", [{**EMBED, "model": "nobody"}]),
    "a model of another kind": ("embeddings", [{**EMBED, "model": "generate"}]),
    "a field of OpenAI's that is not served": ("chat/completions", [{**CHAT, "audio": {}}]),
    "2,049 inputs": ("embeddings", [{**EMBED, "input": ["a"] * 2049}]),
    "0 tokens to generate in a chat": ("chat/completions", [{**CHAT, "max_tokens": 0}]),
    "10^9 tokens to generate": ("chat/completions", [{**CHAT, "max_tokens": 10**9}]),
    "10^10 tokens to generate (beyond 32 bits)": ("chat/completions", [{**CHAT, "max_tokens": 10**10}]),
    "tools for a model without a form of calls": ("chat/completions", [{**CHAT, "tools": [TOOL]}]),
    "a tool named twice": ("chat/completions", [{**CHAT, "tools": [TOOL, TOOL]}]),
    "the result of no call": ("chat/completions", [{**CHAT, "messages": [RESULT]}]),
    "a budget of 10 tokens to think, for a model that does not": (
        "chat/completions",
        [{**CHAT, "thinking_token_budget": 10}],
    ),
    "a task of pooling that the model lacks": ("pooling", [{**EMBED, "task": "token_embed"}]),
    "an image for a model of texts": ("embeddings", [{**EMBED, "input": [{"image": PNG + "AAAA"}]}]),
    "an image of another host's URL": ("classify", [{**IMAGE, "input": "https://example.org/a.png"}]),
}


def rows() -> dict[str, tuple[int, str, list[str | None]]]:
    """Of each row, the status, the code, and the param of each body."""
    lines = [line.split("|")[1:-1] for line in section(PAGE, "Errors").splitlines() if line.startswith("|")]
    head = next(place for place, line in enumerate(lines) if line[0].strip() == "bad input")
    found = {}
    for name, status, code, param in ([cell.strip() for cell in line] for line in lines[head + 2 :]):
        named = re.findall(r"`([^`]+)`", param) or ["audio" if "not served" in name else "x"] * ("its name" in param)
        found[name] = (int(status), code.strip("`"), [*named] or [None])
    return found


def answered(url: str, route: str, body: Any, **headers: str) -> tuple[int, str, str | None]:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = HTTP.post(f"{url}/v1/{route}", content=content, headers=headers)
    if answer.status_code == 200:
        return 200, "", None
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]


def expected(name: str) -> list[tuple[int, str, str | None]]:
    status, code, params = rows()[name]
    return [(status, "" if status == 200 else code, param) for param in params]


@pytest.mark.parametrize("name", PLAIN)
def test_bodies(url: str, name: str) -> None:
    route, sent = PLAIN[name]
    assert [answered(url, route, body) for body in sent] == expected(name)


def test_a_text_that_is_too_long(url: str, triton: FakeTriton) -> None:
    triton.failure = ModelError("row 0: TEXT: got '600 tokens'; at most 512", "INVALID_ARG")
    assert [answered(url, "embeddings", EMBED)] == expected("a text with more tokens than the model reads")


def test_an_image_bomb(url: str, triton: FakeTriton) -> None:
    with pytest.raises(InvalidInputError) as refused:
        decode(BOMB, Preprocessing(224), 1_000_000, row=0)
    assert len(BOMB) < 1024
    triton.failure = ModelError(str(refused.value), "INVALID_ARG")
    sent = {**IMAGE, "input": PNG + base64.b64encode(BOMB).decode()}
    assert [answered(url, "classify", sent)] == expected("an image bomb (60,000 x 60,000 pixels in 1 KiB)")


def test_a_template_that_loops(start_gateway: Callable[..., str]) -> None:
    url = start_gateway(FakeTriton({"generate": {**FRONTS["generate"], "chat_template": LOOP}}))
    wait_for(lambda: HTTP.get(f"{url}/v1/models").json()["data"], pause_s=0.05)
    assert [answered(url, "chat/completions", CHAT)] == expected("a chat template that loops")


def test_keys(start_gateway: Callable[..., str], tmp_path: Path) -> None:
    key = api_keys.add(tmp_path / "keys", "ana")
    url = start_gateway(FakeTriton(), api_keys=tmp_path / "keys")
    wrong = (401, "invalid_api_key", None)
    assert answered(url, "embeddings", EMBED) == wrong
    assert answered(url, "embeddings", EMBED, Authorization="Bearer no") == wrong
    two = [("Authorization", f"Bearer {key}")] * 2
    answer = HTTP.post(f"{url}/v1/embeddings", json=EMBED, headers=two)
    assert (answer.status_code, answer.json()["error"]["code"], None) == wrong


def test_bodies_that_are_not_read_to_their_end(start_gateway: Callable[..., str]) -> None:
    url = start_gateway(FakeTriton(), body_timeout_s=0.2, max_body_bytes=1000)
    large = {**EMBED, "input": "a" * 1000}
    assert answered(url, "embeddings", large) == (413, "body_too_large", None)
    host = urlsplit(url)
    with socket.create_connection((host.hostname, host.port), timeout=20) as connection:
        connection.sendall(b"POST /v1/embeddings HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
        head, _, body = connection.makefile("rb").read().partition(b"\r\n\r\n")
    error = json.loads(body)["error"]
    assert (int(head.split()[1]), error["code"], error["param"]) == (408, "timeout", None)


def test_every_row_is_sent() -> None:
    source = Path(__file__).read_text()
    assert [name for name in rows() if name not in PLAIN and f'"{name}"' not in source] == []
    assert PLAIN.keys() <= rows().keys()
