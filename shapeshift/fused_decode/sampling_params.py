"""How the tokens of one answer are chosen, and when it ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

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
