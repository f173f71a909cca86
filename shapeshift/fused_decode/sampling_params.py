"""How the tokens of one answer are chosen, and when it ends; and the checks of the values that a client sends."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from shapeshift.errors import InvalidInputError
from shapeshift.fused_decode.declarations import (
    INPUTS,
    MAX_BAD_WORDS,
    MAX_BEAMS,
    MAX_BIAS,
    MAX_BIASES,
    MAX_CHOICES,
    MAX_GRAMMAR,
    MAX_STOP_IDS,
    MAX_STOP_LENGTH,
    MAX_STOPS,
    Input,
)
from shapeshift.policy_api import Check, integer, list_of, number
from shapeshift.settings import require

NEVER = "never"
"""Of `early_stopping`: only when no beam can become better, whatever its length."""


class StructuredOutputs(NamedTuple):
    """What an answer has to be: `kind` json (a JSON schema), regex, choice (a JSON list of texts) or grammar; its text.

    compact: whether JSON has no white space.
    """

    kind: str
    text: str
    compact: bool = False


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when the answer ends; names and meanings are vLLM's, of beam search transformers'.

    n                   answers to each prompt
    best_of             answers that are generated, of which the n most likely ones are given; None: n
    num_beams           1: no beam search
    length_penalty      of beam search: above 0, longer texts are preferred
    early_stopping      of beam search: True: it ends with `num_beams` complete texts; False: when the beams do not look
                        better; NEVER: when they cannot become better
    num_return_sequences  texts of beam search that are given
    max_tokens          most tokens of the answer
    min_tokens          before so many tokens of the answer there is no end-of-sequence token and none of stop_token_ids
    temperature         0: always the most likely token
    top_k               keep only this many of the most likely tokens; 0 or -1: all
    top_p               keep only the most likely tokens that together have this probability
    min_p               keep only tokens with at least this share of the most likely one's probability
    repetition_penalty  above 1: tokens that occur in the prompt or the answer become less likely
    presence_penalty    subtracted from the logits of tokens that occur in the answer
    frequency_penalty   subtracted once for each time that the token occurs in the answer
    logit_bias          (token, number that is added to its logit)
    bad_words           texts whose tokens are not generated in a row
    seed                of the random numbers; None: a new one for each request
    stop                texts that end the answer and are not part of it
    stop_token_ids      tokens that end the answer; their text is not part of it
    ignore_eos          whether the answer continues after an end-of-sequence token
    structured_outputs  a grammar that the answer follows; it ends where the grammar is complete
    logprobs            most likely tokens whose logprobs come with each token of the answer; None: no logprobs
    prompt_logprobs     the same for the tokens of the prompt

    Raises InvalidInputError for parameters that contradict one another.
    """

    n: int = 1
    best_of: int | None = None
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    num_return_sequences: int = 1
    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[str, ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    structured_outputs: StructuredOutputs | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        require(
            self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})"
        )
        if self.structured_outputs is not None:
            require(
                self.min_tokens == 0,
                "min_tokens",
                self.min_tokens,
                "0 with structured_outputs",
            )
            require(not self.bad_words, "bad_words", self.bad_words, "none with structured_outputs")
        require(self.samples >= self.n, "best_of", self.best_of, f"at least n ({self.n})")
        allowed = f"at most num_beams ({self.num_beams})"
        require(self.num_return_sequences <= self.num_beams, "num_return_sequences", self.num_return_sequences, allowed)
        refused, when = (_WITH_BEAMS, "above 1") if self.num_beams > 1 else (_WITHOUT_BEAMS, "of 1")
        for name, (values, words) in refused.items():
            value = getattr(self, name)
            require(value in values, name, value, f"{words} with num_beams {when}")

    @property
    def samples(self) -> int:
        """The answers that are generated for each prompt."""
        return self.n if self.best_of is None else self.best_of

    @property
    def choices(self) -> int:
        """The answers that are given to each prompt."""
        return self.n if self.num_beams == 1 else self.num_return_sequences


_WITH_BEAMS: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "n": ((1,), "1"),
    "best_of": ((None, 1), "1"),
    "temperature": ((0, 1), "0 or 1"),
    "top_k": ((-1, 0), "0 or -1"),
    "top_p": ((1,), "1"),
    "min_p": ((0,), "0"),
    "stop": (((),), "none"),
    "structured_outputs": ((None,), "none"),
    "logprobs": ((None,), "none"),
}
"""What beam search, which draws nothing at random and has no text before its end, does not combine with."""
_WITHOUT_BEAMS: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "length_penalty": ((1,), "1"),
    "early_stopping": ((False,), "false"),
}


# The checks of single values.


def sampling_checks(vocab_size: int) -> dict[str, Check]:
    """The check of each field of `SamplingParams`. vocab_size: tokens of the model."""
    token = integer(minimum=0, maximum=vocab_size - 1)
    special: Mapping[str, Check] = {
        "n": integer(minimum=1, maximum=MAX_CHOICES),
        "best_of": integer(minimum=1, maximum=MAX_CHOICES),
        "early_stopping": _early_stopping,
        "num_return_sequences": integer(minimum=1, maximum=MAX_BEAMS),
        "min_tokens": integer(minimum=0),
        "top_k": integer(minimum=-1, maximum=vocab_size),
        "logit_bias": _biases(vocab_size),
        "bad_words": _texts(MAX_BAD_WORDS),
        "seed": integer(minimum=-(2**63), maximum=2**63 - 1),
        "stop": _texts(MAX_STOPS),
        "stop_token_ids": _several(token, MAX_STOP_IDS, "ids"),
        "structured_outputs": _structured,
    }
    named = {one.name: one for one in INPUTS}
    return {one.name: special.get(one.name) or _of(named[one.name]) for one in fields(SamplingParams)}


def plain(value: Any) -> Any:
    """A number, flag, list or object that was sent as text; some clients can send nothing else."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def flag(name: str, value: Any) -> bool:
    """true or false."""
    if not isinstance(value, bool):
        raise InvalidInputError(name, value, "true or false")
    return value


def text(name: str, value: Any) -> str:
    """Text, given as such or as UTF-8."""
    try:
        return value.decode() if isinstance(value, bytes) else str(value)
    except UnicodeDecodeError as error:
        raise InvalidInputError(name, value, f"valid UTF-8 (byte {error.start} is not)") from None


def json_object(name: str, value: Any) -> dict[str, Any]:
    """A JSON object, given as such or as text."""
    if not isinstance(value, dict):
        content = text(name, value)
        try:
            value = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise InvalidInputError(name, content, f"JSON ({error})") from None
        if not isinstance(value, dict):
            raise InvalidInputError(name, content, "a JSON object")
    return value


def _of(declared: Input) -> Check:
    """The check that the declaration of a flag or a number states."""
    if declared.kind == "BOOL":
        return flag
    assert declared.least is not None
    if declared.kind == "FP32":
        return number(minimum=declared.least, maximum=math.inf if declared.most is None else declared.most)
    return integer(minimum=int(declared.least), maximum=None if declared.most is None else int(declared.most))


def _early_stopping(name: str, value: Any) -> bool | str:
    """true, false or never; an input of type BYTES says true and false as text."""
    word = text(name, value) if isinstance(value, str | bytes) else value
    for said, meant in (("true", True), ("false", False), (NEVER, NEVER)):
        if word is meant or word == said:
            return meant
    raise InvalidInputError(name, word, "true, false or never")


def _word(name: str, value: Any) -> str:
    if not isinstance(value, str | bytes):
        raise InvalidInputError(name, value, "a text")
    word = text(name, value)
    if not 1 <= len(word) <= MAX_STOP_LENGTH:
        raise InvalidInputError(name, word, f"a text of 1 to {MAX_STOP_LENGTH} characters")
    return word


def _texts(most: int) -> Check:
    several = _several(_word, most, "texts")
    return lambda name, value: several(name, [value] if isinstance(value, str) else value)


def _several(check: Check, most: int, what: str) -> Check:
    def check_all(name: str, value: Any) -> tuple[Any, ...]:
        values = list_of(check)(name, value)
        if len(values) > most:
            raise InvalidInputError(name, f"{len(values)} {what}", f"at most {most}")
        return tuple(values)

    return check_all


def _biases(vocab_size: int) -> Check:
    token, bias = integer(minimum=0, maximum=vocab_size - 1), number(minimum=-MAX_BIAS, maximum=MAX_BIAS)

    def check(name: str, value: Any) -> tuple[tuple[int, float], ...]:
        biases = json_object(name, value)
        if len(biases) > MAX_BIASES:
            raise InvalidInputError(name, f"{len(biases)} tokens", f"at most {MAX_BIASES}")
        return tuple((token(f"{name} token", plain(key)), bias(f"{name} {key}", one)) for key, one in biases.items())

    return check


_KINDS = ("json", "json_object", "regex", "choice", "grammar")


def _structured(name: str, value: Any) -> StructuredOutputs:
    """vLLM's object: one of `_KINDS`; what else it may hold is refused unless it has no effect."""
    parts = {key: one for key, one in json_object(name, value).items() if one not in (None, False)}
    compact = parts.pop("disable_any_whitespace", False)
    if len(parts) != 1 or not {*parts} <= {*_KINDS}:
        raise InvalidInputError(name, sorted(parts), f"one of {', '.join(_KINDS)}")
    ((kind, content),) = parts.items()
    field = f"{name} {kind}"
    if kind == "json_object":
        kind, content = "json", {"type": "object"}
    if kind == "choice":
        words = list_of(_word, min_length=1)(field, content)
        content = json.dumps(words)
    elif kind == "json" and not isinstance(content, str):
        content = json.dumps(content)
    if not isinstance(content, str):
        raise InvalidInputError(field, content, "a text")
    if len(content) > MAX_GRAMMAR:
        raise InvalidInputError(field, f"{len(content)} characters", f"at most {MAX_GRAMMAR}")
    return StructuredOutputs(kind, content, flag("disable_any_whitespace", compact))
