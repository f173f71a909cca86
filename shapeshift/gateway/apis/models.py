"""What requests may name: GET /v1/models, and GET / for people with a browser."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from html import escape
from typing import Any

from fastapi import APIRouter, Request, Response

from shapeshift.gateway.catalogue import Front, Target
from shapeshift.gateway.endpoint import gateway_of, json_answer
from shapeshift.gateway.errors import ApiError
from shapeshift.serving.description import (
    EMBEDDING,
    GENERATION,
    IMAGE_CLASSIFICATION,
    IMAGE_EMBEDDING,
    RERANKING,
    SPARSE_EMBEDDING,
    TEXT_CLASSIFICATION,
    TOKEN_CLASSIFICATION,
    TOKEN_EMBEDDING,
)

router = APIRouter(tags=["models"])

# Of a front's description, what stands beside OpenAI's fields.
_SHOWN = (
    *(
        "kind",
        "also",
        "version",
        "max_batch_size",
        "embedding_size",
        "dimensions",
        "outputs",
        "labels",
        "activation",
        "pairs",
    ),
    *("only_pairs", "tasks", "text_model", "prompts", "levels", "precision"),
)
_PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
_CHAT: tuple[str, Mapping[str, Any]] = (
    "v1/chat/completions",
    {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 40},
)
# By kind: a route, and what it is sent beside `model`.
_EXAMPLES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    EMBEDDING: ("v1/embeddings", {"input": ["A text of any length.", "Another one."]}),
    RERANKING: ("v1/rerank", {"query": "a cat", "documents": ["a dog", "a kitten"]}),
    SPARSE_EMBEDDING: ("embed_sparse", {"inputs": ["A text of any length."]}),
    TOKEN_EMBEDDING: ("v1/pooling", {"input": ["A text of any length."]}),
    TOKEN_CLASSIFICATION: ("predict", {"inputs": "A text of any length.", "aggregation_strategy": "simple"}),
    TEXT_CLASSIFICATION: ("v1/classify", {"input": "A text of any length."}),
    IMAGE_CLASSIFICATION: ("v1/classify", {"input": f"data:image/png;base64,{_PNG}"}),
    IMAGE_EMBEDDING: ("v1/embeddings", {"input": [{"image": f"data:image/png;base64,{_PNG}"}]}),
    GENERATION: ("v1/completions", {"prompt": "Once upon a time", "max_tokens": 40}),
}
_LINKS = (
    ("docs", "every route with its fields"),
    ("openapi.json", "the same for programs"),
    ("v1/models", "what requests may name"),
    ("health", "whether a server answers"),
    ("metrics", "of the gateway and its servers"),
)
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Shapeshift gateway</title>
<style>
:root {{ color-scheme: light dark }}
body {{ font-family: sans-serif; line-height: 1.4; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }}
pre {{ overflow-x: auto; padding: .6rem; border: 1px solid #8886 }}
</style>
</head>
<body>
<h1>Shapeshift gateway</h1>
<ul>
{links}
</ul>
{models}
</body>
</html>
"""


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """The fronts, and their adapters as BASE:ADAPTER, and by their own name where only one front has it."""
    catalogue = gateway_of(request).catalogue
    return json_answer({"object": "list", "data": [_model(one, catalogue.since) for one in catalogue.targets.values()]})


@router.get("/v1/models/{model:path}")
async def retrieve_model(request: Request, model: str) -> Response:
    """One of them; 404 where there is none."""
    catalogue = gateway_of(request).catalogue
    if model not in catalogue.targets:
        raise ApiError(404, f"model: {model[:80]!r} is not served", param="model", code="model_not_found")
    return json_answer(_model(catalogue.targets[model], catalogue.since))


def _model(target: Target, since: int) -> dict[str, Any]:
    front, description = target.front, target.front.description
    model = {
        "id": target.name,
        "object": "model",
        "created": since,
        "owned_by": "shapeshift",
        "root": description.get("base_model") or description.get("checkpoint") or front.name,
        "parent": front.name if target.adapter else None,
        "max_model_len": description.get("max_tokens"),
    }
    return model | {key: description[key] for key in _SHOWN if description.get(key) is not None}


@router.head("/", include_in_schema=False)
@router.get("/", include_in_schema=False)
async def page(request: Request) -> Response:
    """The models with their kinds and an example of each, and where to read on; nothing of it comes from elsewhere."""
    gateway = gateway_of(request)
    key = "" if gateway.keys is None else ' -H "Authorization: Bearer $KEY"'
    models = [_section(front, str(request.base_url), key) for front in gateway.catalogue.fronts]
    # Without a slash before: a proxy may serve the gateway below a path.
    links = [f'<li><a href="{path}">/{path}</a>: {about}</li>' for path, about in _LINKS]
    text = _PAGE.format(links="\n".join(links), models="\n".join(models) or "<p>No model is served yet.</p>")
    return Response(text, media_type="text/html", headers={"cache-control": "no-cache"})


def _section(front: Front, url: str, key: str) -> str:
    lines = [f"<h2>{escape(front.name)}</h2>", f"<p>{escape(front.kind)}</p>"]
    if adapters := front.names("adapters"):
        lines.append(f"<p>adapters: {escape(', '.join(adapters))}</p>")
    example = _CHAT if front.description.get("chat_template") else _EXAMPLES.get(front.kind)
    if example is not None:
        path, fields = example
        body = shlex.quote(json.dumps({"model": front.name, **fields}))
        lines.append(f"<pre>{escape(f'curl -s {url}{path}{key} -d {body}')}</pre>")
    return "\n".join(lines)
