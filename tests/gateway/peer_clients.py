"""Asks a gateway with clients of other makers: run by the interpreter of their environment, see `bench.peers.venv`.

Arguments: the gateway's URL, its model of embeddings, its model of conversations. Prints what each client got, in JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

TEXTS = ["A text of any length.", "Another one, somewhat longer.", "short"]
QUERY = "What does the function return?"
TOKENS = 8


def langchain(url: str, embedder: str, chat: str) -> dict[str, Any]:
    """langchain-openai: embeddings, one answer, a stream, an answer that follows a schema."""
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings

    given: Any = {"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0}
    vectors = OpenAIEmbeddings(model=embedder, check_embedding_ctx_length=False, **given).embed_documents(TEXTS)
    model = ChatOpenAI(model=chat, temperature=0, max_completion_tokens=TOKENS, **given)
    whole = model.invoke(QUERY)
    pieces = [str(piece.content) for piece in model.stream(QUERY)]
    tokens = (whole.usage_metadata or {}).get("output_tokens")
    return {"vectors": vectors, "text": whole.content, "streamed": "".join(pieces), "tokens": tokens}


def litellm(url: str, embedder: str, chat: str) -> dict[str, Any]:
    """litellm: embeddings, one answer, a stream, and a rerank, by the URLs that its providers make of the gateway's."""
    import litellm as library

    given: Any = {"api_base": f"{url}/v1", "api_key": "none", "num_retries": 0}
    answer = library.embedding(model=f"openai/{embedder}", input=TEXTS, encoding_format="float", **given)
    asked = {"model": f"openai/{chat}", "messages": [{"role": "user", "content": QUERY}], "max_tokens": TOKENS}
    whole = library.completion(**asked, temperature=0, **given)
    stream = library.completion(**asked, temperature=0, stream=True, **given)

    def ranked(provider: str, base: str) -> list[int]:
        body: Any = {"model": f"{provider}/{embedder}", "query": TEXTS[2], "documents": TEXTS}
        return [one["index"] for one in library.rerank(**body, api_base=base, api_key="none").results]

    return {
        "vectors": [one["embedding"] for one in answer.data],
        "text": whole.choices[0].message.content,
        "streamed": "".join(piece.choices[0].delta.content or "" for piece in stream),
        "tokens": whole.usage.completion_tokens,
        "ranked": ranked("hosted_vllm", f"{url}/v1"),
        **{f"ranked_{provider}": ranked(provider, url) for provider in ("hosted_vllm", "cohere", "jina_ai")},
    }


def cohere(url: str, embedder: str, chat: str) -> dict[str, Any]:
    """Cohere's client: a rerank, in both versions of its API."""
    import cohere as library

    found = {}
    for name, client in (("ranked", library.ClientV2), ("ranked_v1", library.Client)):
        answer = client(api_key="none", base_url=url).rerank(model=embedder, query=TEXTS[2], documents=TEXTS)
        found[name] = [one.index for one in answer.results]
    return found


CLIENTS: dict[str, Callable[[str, str, str], dict[str, Any]]] = {
    client.__name__: client for client in (langchain, litellm, cohere)
}


if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    print(json.dumps(CLIENTS[name](*arguments)))
