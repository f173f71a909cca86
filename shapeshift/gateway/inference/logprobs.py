"""Logprobs in the shapes of OpenAI's two APIs, from those of the generators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

TokenEntries = dict[str, Any]
"""Of one token: by id `logprob`, `rank`, `decoded_token` and `bytes`, the token itself first, then the likeliest."""


class CompletionLogprobs:
    """`logprobs` of one choice of /v1/completions: parallel lists.

    top: how many of the most likely tokens each token has beside it. Offsets go on over the pieces of a stream.
    """

    def __init__(self, top: int) -> None:
        self._top = top
        self._offset = 0

    def of(self, tokens: Sequence[TokenEntries | None], text: str) -> dict[str, Any]:
        """Of the next tokens, which are `text`. None: the first token of a prompt, which has no logprob."""
        first = len(text) - sum(len(next(iter(entries.values()))["decoded_token"]) for entries in tokens if entries)
        found: dict[str, Any] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for entries in tokens:
            own = next(iter(entries.values())) if entries else None
            shown = own["decoded_token"] if own else text[: max(0, first)]
            found["text_offset"].append(self._offset)
            found["tokens"].append(shown)
            found["token_logprobs"].append(own["logprob"] if own else None)
            found["top_logprobs"].append(_top(entries, self._top) if entries else None)
            self._offset += len(shown)
        return found


def chat_logprobs(tokens: Sequence[TokenEntries], top: int) -> dict[str, Any]:
    """`logprobs` of one choice of /v1/chat/completions: an object for each token."""
    content = []
    for entries in tokens:
        own, *_ = entries.values()
        likely = sorted(entries.values(), key=lambda one: one["rank"])[:top]
        content.append({**_shown(own), "top_logprobs": [_shown(one) for one in likely]})
    return {"content": content, "refusal": None}


def _top(entries: TokenEntries, top: int) -> dict[str, float]:
    """The most likely tokens and the token itself; of two with the same text the likelier one."""
    own, *_ = entries.values()
    likely = sorted(entries.values(), key=lambda one: one["rank"])[:top]
    found: dict[str, float] = {}
    for one in [*likely, own]:
        found.setdefault(one["decoded_token"], one["logprob"])
    return found


def _shown(entry: dict[str, Any]) -> dict[str, Any]:
    return {"token": entry["decoded_token"], "logprob": entry["logprob"], "bytes": entry["bytes"]}
