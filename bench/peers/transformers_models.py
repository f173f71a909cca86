"""transformers as its users run it, with the instant of every token."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria, StoppingCriteriaList

from bench.peers.decode_worker import DecodeRequest

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def load(folder: Path, precision: str, threads: int) -> Any:
    """The model, which never stops at an end-of-sequence token."""
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[precision]).eval()
    model.generation_config.eos_token_id = None
    return model


class _Stamps(StoppingCriteria):
    """Never stops; records the instant of each token."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.at.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def generate(
    model: Any, requests: list[DecodeRequest], num_beams: int = 1
) -> tuple[list[list[float]], list[list[int]]]:
    """One `generate` for all requests, whose prompts are equally long: the perf_counter instants and tokens of each.

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
        made = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            generation_config=config,
            stopping_criteria=StoppingCriteriaList([stamps]),
        )
    if num_beams > 1:
        stamps.at = [time.perf_counter()] * len(stamps.at)
    answers = made[:, prompts.shape[1] :].tolist()
    return [stamps.at[: request.new_tokens] for request in requests], [
        row[: request.new_tokens] for row, request in zip(answers, requests, strict=True)
    ]
