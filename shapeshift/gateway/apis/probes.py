"""GET /health, GET /metrics, and GET /info of text-embeddings-inference (TEI)."""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import Mapping
from urllib.parse import urlsplit

from fastapi import APIRouter, Request, Response

from shapeshift.errors import ShapeshiftError
from shapeshift.gateway.apis.fields import MOST_ITEMS
from shapeshift.gateway.endpoint import gateway_of, json_answer
from shapeshift.serving.description import EMBEDDING, RERANKING, SPARSE_EMBEDDING, TEXT_CLASSIFICATION
from shapeshift.triton import metrics
from shapeshift.triton.endpoint import tls_from_environment

router = APIRouter(tags=["probes"])

_TIMEOUT_S = 2.0
_TYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
_SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(\{)?")


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health(request: Request) -> Response:
    """200 if a server answers, 503 if none does; the body says how many do."""
    servers = gateway_of(request).upstream.servers
    live = await asyncio.gather(*(server.client.is_live(_TIMEOUT_S) for server in servers))
    # Not their addresses: no key is asked for.
    response = json_answer({"status": "ok" if any(live) else "unavailable", "servers": len(live), "live": sum(live)})
    response.status_code = 200 if any(live) else 503
    return response


@router.head("/metrics", include_in_schema=False)
@router.get("/metrics")
async def pass_metrics(request: Request) -> Response:
    """The gateway's own metrics, then the page of each server; a comment stands for one that does not answer."""
    gateway = gateway_of(request)
    urls = gateway.settings.metrics
    pages = await asyncio.gather(*(asyncio.to_thread(_page, url) for url in urls))
    # One server's page goes on as it is: nothing in it has to be told apart.
    servers = {urlsplit(url).netloc: page for url, page in zip(urls, pages, strict=True)}
    passed = _merged(servers) if len(urls) > 1 else "".join(pages)
    gateway.metrics.broken_key_lines = 0 if gateway.keys is None else gateway.keys.num_broken
    return Response(gateway.metrics.page() + passed, media_type="text/plain; version=0.0.4")


@router.get("/info")
async def tei_info(request: Request, model: str | None = None) -> Response:
    """What TEI says of its model; model: which front is asked, None: the only one that embeds, ranks or classifies."""
    gateway = gateway_of(request)
    front = (await gateway.catalogue.only(model, (EMBEDDING, SPARSE_EMBEDDING, RERANKING, TEXT_CLASSIFICATION))).front
    facts = front.description
    labels = {str(place): name for place, name in enumerate(front.names("labels"))}
    named = {"id2label": labels, "label2id": {name: int(place) for place, name in labels.items()}}
    pooling = "splade" if front.kind == SPARSE_EMBEDDING else str(facts.get("pooling"))
    kinds = {RERANKING: {"reranker": named}, TEXT_CLASSIFICATION: {"classifier": named}}
    info = {
        "model_id": facts.get("checkpoint") or front.name,
        "model_sha": facts.get("checkpoint_version"),
        "model_dtype": _TYPES.get(str(facts.get("precision")), "float32"),
        "model_type": kinds.get(front.kind, {"embedding": {"pooling": pooling.replace("lasttoken", "last_token")}}),
        "max_concurrent_requests": gateway.settings.max_requests,
        "max_input_length": facts.get("max_tokens"),
        "max_batch_tokens": front.number("max_batch_size", 1) * front.number("max_tokens", 1),
        "max_batch_requests": facts.get("max_batch_size"),
        "max_client_batch_size": MOST_ITEMS,
        "auto_truncate": False,
        "tokenization_workers": 1,
        "version": facts.get("shapeshift"),
        "sha": None,
        "docker_label": None,
    }
    return json_answer(info)


def _page(url: str) -> str:
    try:
        return metrics.page(url, _TIMEOUT_S, tls_from_environment())
    except ShapeshiftError as error:
        return f"# {error}\n"


def _merged(pages: Mapping[str, str]) -> str:
    """The pages by server: each family once, its samples with the label `server`; other comments at the end."""
    heads: dict[str, dict[str, str]] = defaultdict(dict)
    samples: dict[str, list[str]] = defaultdict(list)
    comments: list[str] = []
    for server, page in pages.items():
        family = ""
        for line in page.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                _, kind, family, *_ = line.split(" ")
                heads[family].setdefault(kind, line)
            elif line.startswith("#"):
                comments.append(line)
            elif match := _SAMPLE.match(line):
                name, rest = match[1], line[match.end() :]
                label = f'{name}{{server="{server}"'
                family_of = family if family and name.startswith(family) else name
                samples[family_of].append(f"{label},{rest}" if match[2] else f"{label}}}{rest}")
    lines = [line for name in {**heads, **samples} for line in (*heads[name].values(), *samples[name])]
    return "".join(f"{line}\n" for line in [*lines, *comments])
