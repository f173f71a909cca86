"""Requests and tokens a minute of each key, and what the metrics say of who used what."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from shapeshift.errors import InvalidInputError
from shapeshift.gateway.http import api_keys
from shapeshift.gateway.settings import GatewaySettings
from tests.gateway.conftest import HTTP
from tests.gateway.fake_triton import FakeTriton

Start = Callable[..., str]
ASK: dict[str, Any] = {"model": "generate", "prompt": "one two three"}
TALK: Any = [{"role": "user", "content": "one two three"}]


def keyed(file: Path, **limits: str) -> dict[str, str]:
    """Keys by name, in a file with these limits."""
    keys = {name: api_keys.add(file, name) for name in limits}
    lines = [f"{line} {limits[line.split()[0]]}".strip() for line in file.read_text().splitlines()]
    file.write_text("\n".join(lines))
    return keys


def post(url: str, key: str, body: dict[str, Any] = ASK, route: str = "/v1/completions") -> httpx2.Response:
    return HTTP.post(f"{url}{route}", json=body, headers={"Authorization": f"Bearer {key}"})


def said(answer: httpx2.Response) -> dict[str, str]:
    return {name[12:]: value for name, value in answer.headers.items() if name.startswith("x-ratelimit-")}


def test_requests_beyond_the_limit_of_their_key_are_refused(start_gateway: Start, tmp_path: Path) -> None:
    keys = keyed(tmp_path / "keys", few="requests_per_minute=2", many="")
    url = start_gateway(FakeTriton(), api_keys=tmp_path / "keys")
    first, second, third = (post(url, keys["few"]) for _ in range(3))
    assert (first.status_code, second.status_code, third.status_code) == (200, 200, 429)
    assert [said(one)["remaining-requests"] for one in (first, second, third)] == ["1", "0", "0"]
    assert said(third)["limit-requests"] == "2" and "limit-tokens" not in said(third)
    assert 1 <= int(third.headers["retry-after"]) <= 60
    assert 0 < float(said(third)["reset-requests"].removesuffix("s")) <= 60
    error = third.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("requests", "rate_limit_exceeded", None)
    assert "key few may use 2 requests a minute" in error["message"]
    # Looking is free, and another key has its own limit.
    assert HTTP.get(f"{url}/v1/models", headers={"x-api-key": keys["few"]}).status_code == 200
    assert [post(url, keys["many"]).status_code for _ in range(4)] == [200] * 4
    assert said(post(url, keys["many"])) == {}


def test_the_clients_know_the_refusal(start_gateway: Start, tmp_path: Path) -> None:
    keys = keyed(tmp_path / "keys", ana="")
    url = start_gateway(FakeTriton(), api_keys=tmp_path / "keys", requests_per_minute=1)
    with openai.OpenAI(base_url=f"{url}/v1", api_key=keys["ana"], max_retries=0) as client:
        raw = client.completions.with_raw_response.create(**ASK)
        assert raw.headers["x-ratelimit-limit-requests"] == "1"
        with pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(**ASK)
        assert refused.value.code == "rate_limit_exceeded"
    with anthropic.Anthropic(base_url=url, api_key=keys["ana"], max_retries=0) as other:
        with pytest.raises(anthropic.RateLimitError) as limited:
            other.messages.create(model="generate", messages=TALK, max_tokens=5)
        assert limited.value.body["error"]["type"] == "rate_limit_error"
        headers = limited.value.response.headers
        assert int(headers["retry-after"]) >= 1 and said(limited.value.response) == {}
        left = {name[20:]: value for name, value in headers.items() if name.startswith("anthropic-ratelimit-")}
        reset = datetime.fromisoformat(left.pop("requests-reset"))
        assert left == {"requests-limit": "1", "requests-remaining": "0"}
        assert -2 < (reset - datetime.now(UTC)).total_seconds() <= 61
        assert limited.value.request_id == headers["x-request-id"] == limited.value.body["request_id"]


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_beyond_the_limit_are_owed(start_gateway: Start, tmp_path: Path, stream: bool) -> None:
    keys = keyed(tmp_path / "keys", ana="tokens_per_minute=20 requests_per_minute=100", bob="")
    url = start_gateway(FakeTriton(), api_keys=tmp_path / "keys", tokens_per_minute=4)
    short, long = {**ASK, "stream": stream}, {**ASK, "prompt": " ".join("abcdefghijklmnopqrst"), "max_tokens": 20}
    assert post(url, keys["ana"], short).status_code == 200
    answer = post(url, keys["ana"], {**long, "stream": stream})
    assert answer.status_code == 200, "6 of 20 tokens were used"
    refused = post(url, keys["ana"], short)
    assert (refused.status_code, refused.json()["error"]["type"]) == (429, "tokens")
    assert said(refused)["remaining-tokens"] == "0" and said(refused)["remaining-requests"] == "98"
    # 26 tokens are owed beyond 20 a minute.
    assert 60 < int(refused.headers["retry-after"]) <= 140
    assert post(url, keys["bob"], short).status_code == 200, "a key has its own count, and the usual limit"
    assert post(url, keys["bob"], short).status_code == 429


def test_tokens_of_embeddings_count(start_gateway: Start, tmp_path: Path) -> None:
    keys = keyed(tmp_path / "keys", ana="tokens_per_minute=3")
    url = start_gateway(FakeTriton(), api_keys=tmp_path / "keys")
    body = {"model": "encode", "input": ["abcd", "efgh"]}
    answers = [post(url, keys["ana"], body, "/v1/embeddings") for _ in range(2)]
    assert [one.status_code for one in answers] == [200, 429]


def test_a_limit_that_is_none_leaves_its_line_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys"
    keys = keyed(file, ana="requests_per_minute=0", bob="token_per_minute=3", cid="tokens_per_minute=5", dan="")
    made = api_keys.ApiKeys(file, usual=api_keys.Key("", 7))
    assert [made.find(key) for key in keys.values()] == [
        None,
        None,
        api_keys.Key("cid", 7, 5),
        api_keys.Key("dan", 7),
    ]
    assert made.num_broken == 2 and "line 1 of" in caplog.text


@pytest.mark.parametrize("field", ["requests_per_minute", "tokens_per_minute"])
def test_limits_are_checked(tmp_path: Path, field: str) -> None:
    none: dict[str, Any] = {field: 0}
    few: dict[str, Any] = {field: 5}
    with pytest.raises(InvalidInputError, match=f"^{field}: got 0; 1 to "):
        GatewaySettings(api_keys=tmp_path, **none)
    with pytest.raises(InvalidInputError, match=f"^{field}: got 5; only together with api_keys"):
        GatewaySettings(**few)


def values(page: str) -> dict[str, float]:
    return {name: float(value) for name, value in re.findall(r"^shapeshift_gateway_(\S+) (\S+)$", page, re.MULTILINE)}


def test_metrics_say_who_used_what(start_gateway: Start, tmp_path: Path) -> None:
    keys = keyed(tmp_path / "keys", ana="requests_per_minute=3")
    url = start_gateway(FakeTriton(), api_keys=tmp_path / "keys")
    for body in (ASK, {**ASK, "stream": True}, {"model": "encode", "input": "abcd"}, ASK):
        post(url, keys["ana"], body, "/v1/embeddings" if "input" in body else "/v1/completions")
    HTTP.get(f"{url}/health")
    found = values(HTTP.get(f"{url}/metrics", headers={"x-api-key": keys["ana"]}).text)
    assert found['prompt_tokens_total{key="ana",model="generate"}'] == 6
    assert found['generation_tokens_total{key="ana",model="generate"}'] == 6
    assert found['prompt_tokens_total{key="ana",model="encode"}'] == 4
    assert found['rate_limited_total{key="ana",limit="requests"}'] == 1
    assert found['answers_total{status="200"}'] == 4 and found['answers_total{status="429"}'] == 1
    assert found['request_latency_ms_count{model="generate"}'] == 2
    assert not [name for name in found if 'model=""' in name]
    # Of the stream alone: its first text, and the two behind it.
    assert found['first_token_ms_count{model="generate"}'] == 1
    assert found['between_tokens_ms_count{model="generate"}'] == 2
    assert found["requests_running"] == 1, "this one"
    assert not [name for name in found if "_created" in name]
