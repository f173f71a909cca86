"""transformers as its users run it: `python -m bench.peers.transformers_decoding KIND FOLDER PRECISION THREADS`.

batches     one batch of the requests, which arrive at once, after another
continuous  transformers' own continuous batching
"""

from __future__ import annotations

import queue
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    StoppingCriteria,
    StoppingCriteriaList,
)

from bench.peers.protocol import DecodeRequest, Replayed, send, serve_decoding

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
ROWS = 32
PAGE, BLOCKS, TOKENS = 32, 512, 288

Answers = tuple[list[list[float]], list[list[int]]]
"""Of each request, the perf_counter instant of every token, and the tokens."""


class _Stamps(StoppingCriteria):  # type: ignore[misc]
    """Never stops; records the instant of each token."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.at.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def generate(model: Any, requests: list[DecodeRequest], num_beams: int = 1) -> Answers:
    """One `generate` for all requests, whose prompts are equally long.

    With beams, every token has the instant at which all are known. The call runs until the longest answer is complete;
    further tokens of the others are dropped.
    """
    stamps = _Stamps()
    prompts = torch.tensor([request.prompt for request in requests])
    config = GenerationConfig(
        max_new_tokens=max(request.new_tokens for request in requests),
        do_sample=False,
        pad_token_id=0,
        num_beams=num_beams,
    )
    with torch.inference_mode():
        texts = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            generation_config=config,
            stopping_criteria=StoppingCriteriaList([stamps]),
        )
    if num_beams > 1:
        stamps.at = [time.perf_counter()] * len(stamps.at)
    counts = [request.new_tokens for request in requests]
    answers = texts[:, prompts.shape[1] :].tolist()
    return [stamps.at[:count] for count in counts], [row[:count] for row, count in zip(answers, counts, strict=True)]


class Batches:
    """One model, whose batches follow one another."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def replay(self, requests: list[DecodeRequest], num_beams: int = 1, most: int = ROWS) -> Replayed:
        """most: requests of a batch. With beams, all tokens of an answer are there when its batch has ended."""
        due: queue.SimpleQueue[int] = queue.SimpleQueue()
        start = send(requests, lambda number, request: due.put(number))
        replayed = Replayed.empty(len(requests))
        left, batches = len(requests), 0
        while left:
            numbers = [due.get() for _ in range(min(most, left))]
            answers = generate(self._model, [requests[number] for number in numbers], num_beams)
            for number, instants, tokens in zip(numbers, *answers, strict=True):
                replayed.stamps[number], replayed.tokens[number] = [at - start for at in instants], tokens
            left -= len(numbers)
            batches += 1
        replayed.extra["batches"] = batches
        return replayed


class Continuous:
    """One manager, with one queue for all answers."""

    def __init__(self, model: Any) -> None:
        self._manager = model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=256),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=PAGE,
                num_blocks=BLOCKS,
                max_requests_per_batch=ROWS,
                max_batch_tokens=TOKENS,
                allow_block_sharing=False,
            ),
        )
        self._manager.start()

    def replay(self, requests: list[DecodeRequest]) -> Replayed:
        start = send(requests, self._submit)
        replayed = Replayed.empty(len(requests))
        left = len(requests)
        while left:
            output = self._manager.get_result(timeout=1.0)
            if output is None:
                if not self._manager.is_running():
                    raise RuntimeError("transformers' generation thread has stopped")
                continue
            if output.error is not None:
                raise RuntimeError(output.error)
            if output.is_finished():
                number = int(output.request_id.partition("/")[0])
                replayed.stamps[number] = [at - start for at in output.timestamps]
                replayed.tokens[number] = list(output.generated_tokens)
                left -= 1
        return replayed

    def _submit(self, number: int, request: DecodeRequest) -> None:
        self._manager.add_request(
            request.prompt,
            request_id=f"{number}/{id(request)}",
            max_new_tokens=request.new_tokens,
            record_timestamps=True,
        )


def main() -> None:
    """Serve a model that never stops at an end-of-sequence token."""
    kind, folder, precision, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    model = AutoModelForCausalLM.from_pretrained(Path(folder), dtype=DTYPES[precision]).eval()
    model.generation_config.eos_token_id = None
    kinds: dict[str, Any] = {"batches": Batches, "continuous": Continuous}
    serve_decoding(kinds[kind](model).replay)


if __name__ == "__main__":
    main()
