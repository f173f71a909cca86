"""transformers as its users run it: one model, and when its tokens came."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria, StoppingCriteriaList

from bench.peers.decode_worker import Ask

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def load(folder: Path, precision: str, threads: int) -> Any:
    """The model, which will not end at an end-of-sequence token."""
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[precision]).eval()
    model.generation_config.eos_token_id = None
    return model


class _Stamps(StoppingCriteria):
    """Never stops; notes the instant of each token."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.at.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def generate(model: Any, asks: list[Ask]) -> tuple[list[list[float]], list[list[int]]]:
    """One `generate` for all asks, whose prompts are equally long: each one's tokens, and their perf_counter instants.

    It runs until the longest answer is complete; of the others what they did not want is left out.
    """
    stamps = _Stamps()
    prompts = torch.tensor([ask.prompt for ask in asks])
    config = GenerationConfig(max_new_tokens=max(ask.new for ask in asks), do_sample=False, pad_token_id=0)
    with torch.inference_mode():
        made = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            generation_config=config,
            stopping_criteria=StoppingCriteriaList([stamps]),
        )
    answers = made[:, prompts.shape[1] :].tolist()
    return [stamps.at[: ask.new] for ask in asks], [row[: ask.new] for row, ask in zip(answers, asks, strict=True)]
