"""Decode steps of a transformers model without adapters, and with PEFT's mixed batch of random ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")


def stepper(model: Any, prompt: torch.Tensor, **options: Any) -> Callable[[], object]:
    """A step of each row of `prompt`, over a cache that keeps its length: the most likely tokens, on the CPU."""
    with torch.inference_mode():
        cache = model(prompt, use_cache=True, **options).past_key_values
    token = prompt[:, :1]

    def run_step() -> object:
        with torch.inference_mode():
            answer = model(token, past_key_values=cache, use_cache=True, **options)
        # The next step has the same context.
        cache.crop(-1)
        return answer.logits.argmax(-1).cpu()

    return run_step


def with_adapters(base: Any, ranks: Sequence[int]) -> Any:
    """`base` with an adapter of each rank on TARGETS, named by its place. PEFT replaces the linears of `base`."""
    from peft import LoraConfig, get_peft_model

    place, dtype = base.device, base.dtype
    configs = [LoraConfig(r=rank, lora_alpha=rank, target_modules=list(TARGETS)) for rank in ranks]
    model: Any = get_peft_model(base, configs[0], adapter_name="0")
    for number, config in enumerate(configs[1:], 1):
        model.add_adapter(str(number), config)
    return model.to(place, dtype).eval()
