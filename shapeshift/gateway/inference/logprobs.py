"""Logprobs in the shapes of OpenAI's two APIs, from those of the generators."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

TokenEntries = dict[str, Any]
"""Of one token: by id `logprob`, `rank`, `decoded_token` and `bytes`, the token itself first, then the likeliest."""


class CompletionLogprobs:
    """`logprobs` of one choice of /v1/completions: parallel lists.

    top: how many of the most likely tokens each token has beside it. Offsets go on over the pieces of a stream; that of
    a token is the number of whole characters before its first byte.
    """

    def __init__(self, top: int) -> None:
        self._top = top
        self._offset = 0
        self._characters = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def of(
        self, tokens: Sequence[TokenEntries], prompt: str = "", scored: Sequence[TokenEntries | None] = ()
    ) -> dict[str, Any]:
        """Of the next tokens, behind those of `prompt`: of these the first, None, has no logprob."""
        begun = prompt[: len(prompt) - len(text_of(entries for entries in scored if entries))]
        found: dict[str, Any] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for entries in (*scored, *tokens):
            own = next(iter(entries.values())) if entries else None
            found["text_offset"].append(self._begin(bytes(own["bytes"]) if own else begun.encode()))
            found["tokens"].append(own["decoded_token"] if own else begun)
            found["token_logprobs"].append(own["logprob"] if own else None)
            found["top_logprobs"].append(_top(entries, self._top) if entries else None)
        return found

    def _begin(self, token: bytes) -> int:
        """The offset of the next token."""
        first = self._characters.decode(token[:1])
        # The byte begins a character that is not complete, or ends the last one; U+FFFD before it is for other bytes.
        begins = self._characters.getstate()[0] == token[:1]
        offset = self._offset + len(first) - (first != "" and not begins)
        self._offset += len(first) + len(self._characters.decode(token[1:]))
        return offset


def text_of(tokens: Iterable[TokenEntries]) -> str:
    """The text of tokens that follow one another; a character may consist of several."""
    return b"".join(bytes(next(iter(entries.values()))["bytes"]) for entries in tokens).decode(errors="replace")


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
