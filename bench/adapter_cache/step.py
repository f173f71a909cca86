"""Time that adapters add to a decode step, ours and PEFT's mixed batch: `python -m bench.adapter_cache.step` (3 min).

A Llama of 110 million random parameters; 8 adapters of ranks 8, 16, 32, 64, 128, 8, 16 and 32 on queries, keys, values
and output of every layer; a context of 64 tokens. Each round runs all variants in turn. The added time is a difference
between two medians of the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.adapter_cache import random_adapters
from shapeshift.fused_decode.model import kernel_build

RANKS = (8, 16, 32, 64, 128, 8, 16, 32)
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
CONTEXT = 64
BATCHES = (8, 32)
Step = Callable[[], object]


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, default=Path("build"))
    parser.add_argument("--precision", default="auto", help="auto, f32 or bf16")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=4, help="of each variant in a round")
    parser.add_argument("--no-peft", action="store_true", help="measure our forms alone")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    options = parser.parse_args()
    # As the backend does, before torch is imported.
    kernel_build.limit_spinning()
    from bench.peers.random_llama import ensure
    from client.hardware import describe
    from shapeshift.engines import hardware

    precision = hardware.resolve_precision(options.precision)
    folder = ensure(options.build / "bench" / "llama-110m")
    adapters = [make(options.build / "bench" / "adapters-of-a-step", folder, number) for number in range(len(RANKS))]
    print(json.dumps(describe()))
    print(
        f"{precision}, context {CONTEXT}, ranks {RANKS}, {options.rounds} rounds of {options.steps} steps; ms, medians"
    )
    times_by_batch = {}
    for batch in BATCHES:
        variants = ours(folder, adapters, precision, options.build / "kernels", batch)
        if not options.no_peft:
            variants |= peft(folder, adapters, precision, batch)
        times_by_batch[batch] = times = measure(variants, options.rounds, options.steps)
        print(f"batch {batch}: " + ", ".join(f"{name} {value:.2f}" for name, value in times.items()), flush=True)
        plain = times["ours"]
        added = {name: value - plain for name, value in times.items() if name.startswith("ours, ")}
        print("  added: " + ", ".join(f"{name.removeprefix('ours, ')} {value:.2f}" for name, value in added.items()))
        mine = added["ours, native"] if "ours, native" in added else min(added.values())
        print(f"  step with 8 adapters against the base: {(plain + mine) / plain:.2f}")
        if not options.no_peft:
            theirs = times["PEFT, mixed"] - times["PEFT's base"]
            print(f"  PEFT adds {theirs:.2f}: ours is {mine / theirs:.3f} of it", flush=True)
    if options.json:
        options.json.write_text(json.dumps(times_by_batch))


def ours(folder: Path, adapters: list[Path], precision: str, kernels: Path, batch: int) -> dict[str, Step]:
    """Steps of `batch` rows without adapters, and with all of them in each available form."""
    import torch

    from shapeshift.adapter_cache.lora import native
    from shapeshift.adapter_cache.lora.batch import LoraHook, LoraKernels, shifted
    from shapeshift.adapter_cache.lora.segmented import TorchLora
    from shapeshift.adapter_cache.memory.loader import load_weights
    from shapeshift.engines.hardware import cores
    from shapeshift.fused_decode.interfaces import StepBatch
    from shapeshift.fused_decode.model.cpu_runtime import DecodeModel, ModelOptions

    def say(text: str) -> None:
        print(text, file=sys.stderr)

    model = DecodeModel.load(
        folder,
        ModelOptions(precision=precision, slots=batch, max_length=CONTEXT * 2, threads=cores(), cache_dir=kernels),
        say,
    )
    records = records_of(folder, adapters, model)
    memory = torch.zeros(sum(one.elements for one in records), dtype=model.memory.dtype)
    places, start = [], 0
    for one in records:
        load_weights(memory[start : start + one.elements], one, TorchLora().store)
        places.append(shifted(one.relative, start))
        start += one.elements
    fast = native.load(kernels, say)
    forms: dict[str, LoraKernels] = {"torch": TorchLora()}
    if fast is not None:
        forms["native"] = fast
    rows = torch.arange(batch, dtype=torch.int32)
    model.forward(StepBatch(torch.randint(9, 999, (batch * CONTEXT,)), rows, rows * 0, rows * 0 + CONTEXT, rows.long()))
    one_token = rows * 0 + 1

    def step(owners: torch.Tensor | None) -> StepBatch:
        return StepBatch(torch.randint(9, 999, (batch,)), rows, rows * 0 + CONTEXT, one_token, rows.long(), owners)

    plain, mixed = step(None), step((rows % len(adapters)).int())
    steps: dict[str, Step] = {"ours": lambda: model.forward(plain)}
    for name, lora_kernels in forms.items():
        hook = LoraHook(memory, lambda numbers: ([places[number] for number in numbers], 0), lora_kernels)

        def run(hook: LoraHook = hook) -> object:
            model.linear_hook = hook
            return model.forward(mixed)

        steps[f"ours, {name}"] = run
    return steps


def peft(folder: Path, adapters: list[Path], precision: str, batch: int) -> dict[str, Step]:
    """The same steps by transformers without adapters, and by PEFT with a mixed batch."""
    import torch
    import transformers
    from peft import PeftModel

    from shapeshift.fused_decode.model.cpu_runtime import DTYPES

    def base() -> Any:
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[precision])
        return model.eval()

    plain = base()
    mixed = PeftModel.from_pretrained(base(), adapters[0], adapter_name="0")
    for number, adapter in enumerate(adapters[1:], 1):
        mixed.load_adapter(adapter, adapter_name=str(number))
    names = [str(row % len(adapters)) for row in range(batch)]
    tokens, prompt = torch.randint(9, 999, (batch, 1)), torch.randint(9, 999, (batch, CONTEXT))

    def stepper(model: Any, **options: Any) -> Step:
        with torch.inference_mode():
            cache = model(prompt, use_cache=True, **options).past_key_values

        def run() -> object:
            with torch.inference_mode():
                answer = model(tokens, past_key_values=cache, use_cache=True, **options)
            # Keep the context at the same length for the next step.
            cache.crop(-1)
            return answer

        return run

    return {"PEFT's base": stepper(plain), "PEFT, mixed": stepper(mixed, adapter_names=names)}


def make(folder: Path, base: Path, number: int) -> Path:
    """The PEFT folder of an adapter, with random weights; made if missing."""
    target = folder / f"r{RANKS[number]}-{number}"
    if not (target / "adapter_config.json").is_file():
        random_adapters.write(target, base, RANKS[number], TARGETS, seed=number)
    return target


def records_of(folder: Path, adapters: list[Path], model: Any) -> list[Any]:
    """The cache's records of the adapters."""
    from shapeshift.adapter_cache.memory.adapter_table import make_adapter
    from shapeshift.adapter_cache.registry import peft

    base = peft.BaseModel(model.architecture, {folder.name}, max(RANKS), folder)
    width = model.memory.element_size()
    records = [make_adapter(one.name, "0", peft.read(one, base), model.architecture, width) for one in adapters]
    for one in records:
        one.verified = True
    return records


def measure(variants: dict[str, Step], rounds: int, steps: int) -> dict[str, float]:
    """Median ms of a step of each variant; the first round is an unmeasured warm-up."""
    seen: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(rounds + 1):
        for name, step in variants.items():
            for _ in range(steps):
                before = time.perf_counter()
                step()
                if turn:
                    seen[name].append((time.perf_counter() - before) * 1e3)
    return {name: statistics.median(values) for name, values in seen.items()}


if __name__ == "__main__":
    main()
