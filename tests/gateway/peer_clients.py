"""Asks a gateway with clients of other makers: run by the interpreter of their environment, see `bench.peers.venv`.

Arguments: the gateway's URL, its model of embeddings, its model of conversations; of `kserve` the server's HTTP URL and
gRPC address, and the model of embeddings. Prints what each client got, in JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

TEXTS = ["A text of any length.", "Another one, somewhat longer.", "short"]
QUERY = "What does the function return?"
TOKENS = 8
TOOL = "weather"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
}


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


def openai(url: str, embedder: str, chat: str) -> dict[str, Any]:
    """OpenAI's client: embeddings, a response and its stream, a call that has to be made, whole and as a stream."""
    import openai as library

    client: Any = library.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    answer = client.embeddings.create(model=embedder, input=TEXTS)
    asked: Any = {"model": chat, "temperature": 0}
    whole = client.responses.create(**asked, input=QUERY, max_output_tokens=TOKENS)
    with client.responses.stream(**asked, input=QUERY, max_output_tokens=TOKENS) as stream:
        events = list(stream)
    # Its tokens end the answer, so that it is not one that the client calls final.
    streamed = events[-1].response
    function = {"name": TOOL, "parameters": SCHEMA}
    asked |= {"messages": [{"role": "user", "content": QUERY}], "tools": [{"type": "function", "function": function}]}
    asked["tool_choice"] = {"type": "function", "function": {"name": TOOL}}
    with client.chat.completions.stream(**asked) as chunks:
        streamed_call = chunks.get_final_completion().choices[0].message.tool_calls[0].function
    call = client.chat.completions.create(**asked).choices[0].message.tool_calls[0].function
    return {
        "vectors": [one.embedding for one in answer.data],
        "text": whole.output_text,
        "streamed": "".join(event.delta for event in events if event.type == "response.output_text.delta"),
        "tokens": streamed.usage.output_tokens,
        "counted": streamed.usage.input_tokens,
        "call": [call.name, json.loads(call.arguments)],
        "streamed_call": [streamed_call.name, json.loads(streamed_call.arguments)],
    }


def anthropic(url: str, embedder: str, chat: str) -> dict[str, Any]:
    """Anthropic's client: an answer, a stream, the tokens of a conversation, and the same call."""
    import anthropic as library

    client: Any = library.Anthropic(base_url=url, api_key="none", max_retries=0)
    told = {"model": chat, "messages": [{"role": "user", "content": QUERY}]}
    asked = {**told, "extra_body": {"temperature": 0}, "max_tokens": TOKENS}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        pieces = list(stream.text_stream)
        tokens = stream.get_final_message().usage.output_tokens
    tools = {"tools": [{"name": TOOL, "input_schema": SCHEMA}], "tool_choice": {"type": "tool", "name": TOOL}}
    asked["max_tokens"] = 64
    with client.messages.stream(**asked, **tools) as stream:
        (streamed_call,) = stream.get_final_message().content
    (call,) = client.messages.create(**asked, **tools).content
    return {
        "text": whole.content[0].text,
        "streamed": "".join(pieces),
        "tokens": tokens,
        "counted": client.messages.count_tokens(**told).input_tokens,
        "call": [call.name, call.input],
        "streamed_call": [streamed_call.name, streamed_call.input],
    }


def kserve(http: str, grpc: str, embedder: str) -> dict[str, Any]:
    """KServe's clients of the server itself: whether the model is ready, and vectors."""
    import numpy as np
    from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig

    async def answers(client: Any, *base: str) -> list[list[float]]:
        assert await client.is_model_ready(*base, model_name=embedder)
        texts = InferInput("TEXT", [len(TEXTS), 1], "BYTES")
        texts.set_data_from_numpy(np.array(TEXTS, dtype=object)[:, None])
        answer = await client.infer(
            *base, InferRequest(embedder, [texts]), **({"model_name": embedder} if base else {})
        )
        vectors: list[list[float]] = answer.outputs[0].as_numpy().tolist()
        await client.close()
        return vectors

    async def both() -> dict[str, Any]:
        over_http = await answers(InferenceRESTClient(RESTConfig(protocol="v2")), http)
        return {"http": over_http, "grpc": await answers(InferenceGRPCClient(grpc))}

    return asyncio.run(both())


CLIENTS: dict[str, Callable[[str, str, str], dict[str, Any]]] = {
    client.__name__: client for client in (langchain, litellm, cohere, openai, anthropic)
}


if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    print(json.dumps({**CLIENTS, "kserve": kserve}[name](*arguments)))
