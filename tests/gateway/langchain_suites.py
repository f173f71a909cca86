"""langchain-tests' suites of models over clients of langchain, against a gateway: run by pytest of their environment.

    GATEWAY=http://localhost:8080 build/peers/clients/bin/python -m pytest --noconftest -c /dev/null \
        -o asyncio_mode=auto -o asyncio_default_test_loop_scope=session tests/gateway/langchain_suites.py

CHAT names the model of conversations, whose template has tools; EMBEDDER that of embeddings.
"""

from __future__ import annotations

import os
from typing import Any

from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from langchain_tests.integration_tests import ChatModelIntegrationTests, EmbeddingsIntegrationTests

URL = os.environ["GATEWAY"]
OPENAI: dict[str, Any] = {"base_url": f"{URL}/v1", "api_key": "none", "max_retries": 0}
# A small model repeats itself: what it says ends soon.
CHAT: dict[str, Any] = {"model": os.environ.get("CHAT", "chat"), "temperature": 0, "max_tokens": 128, "timeout": 120}


class TestEmbeddings(EmbeddingsIntegrationTests):  # type: ignore[misc]
    """/v1/embeddings."""

    embeddings_class = OpenAIEmbeddings
    embedding_model_params = {
        **OPENAI,
        "model": os.environ.get("EMBEDDER", "encode"),
        "check_embedding_ctx_length": False,
    }


class TestChat(ChatModelIntegrationTests):  # type: ignore[misc]
    """/v1/chat/completions."""

    chat_model_class = ChatOpenAI
    chat_model_params = {**OPENAI, **CHAT, "stream_usage": True, "frequency_penalty": 0.5}
    model_override_value = CHAT["model"]
    supports_json_mode = True
    supports_anthropic_inputs = True


class TestResponses(TestChat):
    """/v1/responses."""

    chat_model_params = {**OPENAI, **CHAT, "use_responses_api": True}


class TestMessages(ChatModelIntegrationTests):  # type: ignore[misc]
    """/v1/messages."""

    chat_model_class = ChatAnthropic
    chat_model_params = {**CHAT, "base_url": URL, "api_key": "none", "max_retries": 0}
    model_override_value = CHAT["model"]
    supports_anthropic_inputs = True
