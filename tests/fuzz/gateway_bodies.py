"""Hypothesis strategies of bodies for the gateway's routes: each is one that a model answers, with faults."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

_FUNCTION = {"name": "f", "parameters": {"type": "object"}}
_SAMPLING = {
    "n": 2,
    "temperature": 0.5,
    "top_p": 0.9,
    "seed": 1,
    "stop": ["x"],
    "stream": True,
    "presence_penalty": 0.1,
    "logit_bias": {"7": 1.0},
    "response_format": {"type": "text"},
    "stream_options": {"include_usage": True},
    "latency_ms": 500.0,
    "utility": 1.0,
    "slo_class": "a",
    "request_tag": "b",
    "user": "u",
}
_MESSAGES = {
    "model": "agent",
    "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "text", "text": "b"},
                {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "d", "is_error": False}]},
    ],
    "tools": [{"name": "f", "input_schema": {"type": "object"}, "description": "e"}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "low"},
}
_CHAT = {
    "model": "agent",
    "messages": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [{"type": "text", "text": "b"}]},
    ],
    "tools": [{"type": "function", "function": _FUNCTION}],
    "continue_final_message": True,
    "add_generation_prompt": False,
    "chat_template_kwargs": {"enable_thinking": True},
}
VALID: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {
        "model": "encode",
        "input": ["a text", "b"],
        "encoding_format": "float",
        "dimensions": 4,
        "embedding_types": ["int8", "float"],
        "prompt_name": "query",
        "truncate": True,
        "truncate_prompt_tokens": 7,
        "latency_ms": 500.0,
    },
    "/v2/embed": {
        "model": "encode",
        "texts": ["a text", "b"],
        "input_type": "search_query",
        "embedding_types": ["uint8", "base64"],
        "output_dimension": 4,
        "max_tokens": 9,
        "truncate": "END",
    },
    "/v1/pooling": {"model": "encode", "input": ["a text"], "task": "embed", "encoding_format": "base64"},
    "/v1/score": {"model": "cross", "queries": "q", "documents": ["a"], "score_type": "cross-encoder"},
    "/v1/completions": {**_SAMPLING, "model": "generate", "prompt": "one two", "max_tokens": 4, "logprobs": 1},
    "/v1/chat/completions": {
        **_SAMPLING,
        "model": "agent",
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": [{"type": "text", "text": "b"}]},
        ],
        "max_completion_tokens": 4,
        "tools": [{"type": "function", "function": _FUNCTION}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning_effort": "low",
        "chat_template_kwargs": {"enable_thinking": True},
        "thinking_token_budget": None,
    },
    "/v1/responses": {
        "model": "agent",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "id": "d", "status": "completed"},
            {"type": "function_call_output", "call_id": "c", "output": "e"},
        ],
        "instructions": "i",
        "max_output_tokens": 4,
        "reasoning": {"effort": "low"},
        "stream": True,
        "temperature": 0.5,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [{"type": "function", **_FUNCTION}],
        "top_p": 0.9,
    },
    "/v1/chat/completions/input_tokens": {**_CHAT, "prompt_logprobs": 2, "reasoning_effort": "low"},
    "/v1/responses/input_tokens": {"model": "agent", "input": "a", "instructions": "b", "personality": None},
    "/apply-template": _CHAT,
    "/tokenize": {**_CHAT, "add_special_tokens": True, "return_token_strs": True},
    "/detokenize": {"model": "agent", "tokens": [1, 2]},
    "/v1/messages": {
        **_MESSAGES,
        "max_tokens": 4,
        "stream": True,
        "stop_sequences": ["x"],
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
    },
    "/v1/messages/count_tokens": _MESSAGES,
    "/v1/rerank": {"model": "cross", "query": "q", "documents": ["a", {"text": "b"}], "top_n": 1, "truncate": True},
    "/v1/classify": {"model": "classify_text", "input": ["a text", "b"], "level": 1, "min_accuracy": 0.5},
    "/embed": {"inputs": ["a text"], "normalize": True, "truncate": False, "dimensions": 4},
    "/rerank": {"query": "q", "texts": ["a"], "raw_scores": True, "return_text": True, "top_n": 1, "model": "cross"},
    "/predict": {"inputs": [["a"], ["b"]], "raw_scores": False, "model": "classify_text"},
    "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "a", "model": "generate_lora"},
    "/v1/unload_lora_adapter": {"lora_name": "a", "model": "generate_lora"},
}
"""A body for each route that `tests.gateway.fake_triton` can answer, with most of its fields."""

_FIELDS = sorted({name for body in VALID.values() for name in body})
_ODD: tuple[Any, ...] = (
    *(None, True, "", "x" * 5000, 0, -1, 2**31, 2**63, 10**30, -0.0, 1e308, 1e-320, "\0", "\ud83d\ude00", "NaN"),
    *([], {}, [[]], [None], [1, "a"], {"text": 1}, [[1, 2], ["a"]], ["a"] * 3000, [0] * 3000, {"$ref": "#"}),
    *("data:image/png;base64,", "generate", "shout", "no_such_model", {"type": "json_schema"}, [{"type": "image_url"}]),
)
_VALUES = st.recursive(
    st.sampled_from(_ODD) | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


def bodies() -> SearchStrategy[tuple[str, bytes]]:
    """(route, body): up to two values are replaced, added or left out, and one in four bodies is broken as JSON."""
    return st.sampled_from(sorted(VALID)).flatmap(_of)


def _of(route: str) -> SearchStrategy[tuple[str, bytes]]:
    places = list(_places(VALID[route]))
    key = st.sampled_from(_FIELDS) | st.text(max_size=8)
    change = st.tuples(st.sampled_from(places), st.sampled_from(("set", "add", "leave out")), _VALUES, key)
    broken = st.none() | st.none() | st.none() | st.tuples(st.floats(0, 1), st.binary(max_size=4))

    def made(changes: list[Any], damage: tuple[float, bytes] | None) -> tuple[str, bytes]:
        body = copy.deepcopy(VALID[route])
        for place, kind, value, key in changes:
            _change(body, place, kind, value, key)
        content = json.dumps(body).encode()
        if damage is not None:
            at = int(damage[0] * len(content))
            content = content[:at] + damage[1] + content[at + len(damage[1]) * 2 :]
        return route, content

    return st.builds(made, st.lists(change, max_size=2), broken)


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value inside an object or a list."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from _places(inner, (*path, key))


def _change(body: Any, place: tuple[Any, ...], kind: str, value: Any, key: str) -> None:
    *outer, last = place
    for step in outer:
        # An earlier change may have replaced what the path leads through.
        if not isinstance(body, dict | list) or (isinstance(body, dict) and step not in body):
            return
        if isinstance(body, list) and not (isinstance(step, int) and step < len(body)):
            return
        body = body[step]
    if isinstance(body, dict):
        if kind == "leave out":
            body.pop(last, None)
        else:
            body[last if kind == "set" else key] = value
    elif isinstance(body, list) and isinstance(last, int) and last < len(body):
        body[last] = value
