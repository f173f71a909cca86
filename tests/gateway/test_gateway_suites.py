"""llm-comply, a suite that holds answers against the published schemas, over a Triton in this process."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.gateway.fake_triton import FRONTS, FakeTriton
from tests.gateway.test_gateway_turns import TEMPLATES

# All for one reason: no images in prompts.
MISSES = {"openai-chat": "chat-image-input", "open-responses": "image-input", "anthropic": "anth-image-input"}
# The suite skips these for a model of this name.
SKIPPED = {"chat-reasoning-summary", "reasoning-summary", "anth-thinking-display"}


@pytest.fixture(scope="module")
def triton() -> FakeTriton:
    hermes = {**FRONTS["generate"], "stream": "hermes", "chat_template": TEMPLATES["hermes"], "max_tokens": 4096}
    return FakeTriton({"hermes": hermes})


@pytest.mark.parametrize("api", MISSES)
def test_a_public_suite_of_conformance(api: str, url: str) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "llm_comply.cli", "--json", "--format", api]
    command += ["--base-url", f"{url}/v1", "--api-key", "none", "--model", "hermes"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    results = json.loads(done.stdout)["results"]
    status_of = {one["id"]: one["status"] for one in results if one["id"] not in SKIPPED}
    assert {one for one, status in status_of.items() if status != "passed"} == {MISSES[api]}, results
    assert len(status_of) >= 8
