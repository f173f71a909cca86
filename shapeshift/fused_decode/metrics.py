"""Metrics of the decode loop; the generating thread writes them, the front exports them."""

from __future__ import annotations

from shapeshift.serving.metrics import Counter, Histogram

_ITERATION_MS = (1, 2, 5, 10, 15, 20, 25, 30, 40, 50, 75, 100, 150, 200, 300, 500, 1000, 2000)
_FIRST_TOKEN_MS = (5, 10, 20, 30, 50, 75, 100, 150, 200, 300, 500, 750, 1000, 2000, 5000, 10000, 30000)
MODEL, SAMPLING, REST = "model", "sampling", "rest"


class LoopMetrics:
    """Counters and histograms of one loop; `exported` lists all of them."""

    def __init__(self) -> None:
        self.iteration_ms = Histogram("iteration_ms", "Time of one iteration of the loop", _ITERATION_MS)
        self.first_token_ms = Histogram("first_token_ms", "From arrival to the first token", _FIRST_TOKEN_MS)
        self.between_tokens_ms = Histogram("between_tokens_ms", "From a request's token to its next", _ITERATION_MS)
        self.prompt_tokens = Counter("prompt_tokens_total", "Tokens of prompts computed")
        self.generated_tokens = Counter("generated_tokens_total", "Tokens generated")
        self.prefix_queries = Counter("prefix_cache_queries_total", "Tokens of requests that got slots")
        self.prefix_hits = Counter("prefix_cache_hits_total", "Those of them whose keys and values were there")
        self.draft_tokens = Counter("spec_decode_num_draft_tokens_total", "Tokens that were proposed and verified")
        self.accepted_tokens = Counter("spec_decode_num_accepted_tokens_total", "Those of them that the model chose")
        self.preemptions = Counter("preemptions_total", "Requests that lost their slots, since blocks ran out")
        self.parts = {
            part: Counter("iteration_part_ms_total", "Time of the generating thread by activity", {"part": part})
            for part in (MODEL, SAMPLING, REST)
        }

    @property
    def exported(self) -> list[Counter | Histogram]:
        return [
            *(self.iteration_ms, self.first_token_ms, self.between_tokens_ms),
            *(self.prompt_tokens, self.generated_tokens, self.preemptions, self.prefix_queries, self.prefix_hits),
            *(self.draft_tokens, self.accepted_tokens),
            *self.parts.values(),
        ]

    def observe_tokens(self, prompt: int, generated: int, drafted: int, accepted: int) -> None:
        """Count the tokens of one iteration: of prompts, new ones, and of those proposed and chosen among them."""
        self.prompt_tokens.add(prompt)
        self.generated_tokens.add(generated)
        self.draft_tokens.add(drafted)
        self.accepted_tokens.add(accepted)

    def observe_iteration(
        self, start: float, model: float, sampling: float, recording: float, end: float, waited: float
    ) -> None:
        """Count one iteration by the instants, in seconds, at which it and its phases began and it ended.

        waited: seconds before the first phase and in the last one in which the model still computed.
        """
        self.parts[MODEL].add((sampling - model + waited) * 1e3)
        self.parts[SAMPLING].add((recording - sampling) * 1e3)
        self.parts[REST].add((model - start + end - recording - waited) * 1e3)
        self.iteration_ms.observe((end - start) * 1e3)
