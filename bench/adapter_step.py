"""What adapters add to a decode step: ours against PEFT's mixed batch, `python -m bench.adapter_step` (3 minutes).

A Llama of 110 million random parameters; 8 adapters of ranks 8, 16, 32, 64, 128, 8, 16 and 32 on queries, keys, values
and output of every layer; a context of 64 tokens. Rounds of all variants in turn; what is added is the difference of
two medians of the same run.
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

from shapeshift.fused_decode import waiting

RANKS = (8, 16, 32, 64, 128, 8, 16, 32)
TARGETS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
CONTEXT, BATCHES = 64, (8, 32)
ALL_STACKED = 1 << 20
Step = Callable[[], object]


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, default=Path("build"))
    parser.add_argument("--precision", default="auto", help="auto, f32 or bf16")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=4, help="of each variant in a round")
    parser.add_argument("--no-peft", action="store_true", help="ours alone, with each form and sums of ranks")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    options = parser.parse_args()
    # As the backend does, before torch is imported.
    waiting.arrange()
    from bench import adapter_step_loads
    from bench.peers.random_llama import ensure
    from client.hardware import describe
    from shapeshift.engines import precision

    stated = precision.resolve(options.precision, False)
    folder = ensure(options.build / "bench" / "llama-110m")
    adapters = [make(options.build / "bench" / "adapters-of-a-step", folder, number) for number in range(len(RANKS))]
    print(json.dumps(describe()))
    print(f"{stated}, context {CONTEXT}, ranks {RANKS}, {options.rounds} rounds of {options.steps} steps; ms, medians")
    found = {}
    for batch in BATCHES:
        variants = ours(folder, adapters, stated, options.build / "kernels", batch)
        if not options.no_peft:
            variants |= peft(folder, adapters, stated, batch)
        found[batch] = times = measure(variants, options.rounds, options.steps)
        print(f"batch {batch}: " + ", ".join(f"{name} {value:.2f}" for name, value in times.items()), flush=True)
        plain = times["ours"]
        added = {name: value - plain for name, value in times.items() if name.startswith("ours, ")}
        print("  added: " + ", ".join(f"{name.removeprefix('ours, ')} {value:.2f}" for name, value in added.items()))
        mine = added["ours, native"] if "ours, native" in added else min(added.values())
        print(f"  step with 8 adapters against the base: {(plain + mine) / plain:.2f}")
        if not options.no_peft:
            theirs = times["PEFT, mixed"] - times["PEFT's base"]
            print(f"  PEFT adds {theirs:.2f}: ours is {mine / theirs:.3f} of it", flush=True)
    calm, loading, seconds = adapter_step_loads.measure(
        folder, adapters, stated, options.build / "kernels", options.rounds
    )
    print(f"16 rows while the largest adapter is loaded ({seconds * 1e3:.0f} ms a load): p99 of a step {loading:.2f}")
    print(f"  undisturbed {calm:.2f}: {loading / calm:.3f} of it", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found))


def make(folder: Path, base: Path, number: int) -> Path:
    """A PEFT folder with random weights."""
    import torch
    from safetensors.torch import save_file

    target = folder / f"r{RANKS[number]}-{number}"
    if (target / "adapter_config.json").is_file():
        return target
    config = json.loads((base / "config.json").read_text())
    chance, width, rank = torch.Generator().manual_seed(number), config["hidden_size"], RANKS[number]
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name in TARGETS:
            stem = f"base_model.model.model.layers.{layer}.{name}.lora"
            tensors[f"{stem}_A.weight"] = torch.randn(rank, width, generator=chance) * 0.02
            tensors[f"{stem}_B.weight"] = torch.randn(width, rank, generator=chance) * 0.02
    target.mkdir(parents=True, exist_ok=True)
    save_file(tensors, target / "adapter_model.safetensors", {"format": "pt"})
    stated = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "task_type": "CAUSAL_LM", "bias": "none"}
    stated["target_modules"] = [name.split(".")[1] for name in TARGETS]
    (target / "adapter_config.json").write_text(json.dumps(stated))
    return target


def ours(folder: Path, adapters: list[Path], stated: str, kernels: Path, batch: int) -> dict[str, Step]:
    """Steps of `batch` rows without adapters, and with all of them in each form that is to be had."""
    import torch

    from shapeshift.adapter_cache import layout, loader, native
    from shapeshift.adapter_cache.segmented import Segmented
    from shapeshift.adapter_cache.stacked import Stacked
    from shapeshift.adapter_cache.terms import Form, Terms
    from shapeshift.engines.hardware import cores
    from shapeshift.fused_decode.model import DecodeModel
    from shapeshift.fused_decode.step import StepBatch

    def say(text: str) -> None:
        print(text, file=sys.stderr)

    model = DecodeModel.load(
        folder, precision=stated, slots=batch, max_length=CONTEXT * 2, threads=cores(), cache_dir=kernels, log=say
    )
    records = records_of(folder, adapters, model)
    memory = torch.zeros(sum(one.elements for one in records), dtype=model.memory.dtype)
    places, start = [], 0
    for one in records:
        loader.fill(memory[start : start + one.elements], one)
        places.append(layout.moved(one.relative, start))
        start += one.elements
    fast = native.load(kernels, say)
    forms: dict[str, tuple[Form, int]] = {"stacked": (Segmented(), ALL_STACKED), "torch": (Segmented(), 0)}
    if fast is not None:
        forms["native"] = (fast, 0)
    rows = torch.arange(batch, dtype=torch.int32)
    model.forward(StepBatch(torch.randint(9, 999, (batch * CONTEXT,)), rows, rows * 0, rows * 0 + CONTEXT, rows.long()))
    one_token = rows * 0 + 1

    def step(owners: torch.Tensor | None) -> StepBatch:
        return StepBatch(torch.randint(9, 999, (batch,)), rows, rows * 0 + CONTEXT, one_token, rows.long(), owners)

    plain, mixed = step(None), step((rows % len(adapters)).int())
    made: dict[str, Step] = {"ours": lambda: model.forward(plain)}
    for name, (form, ranks) in forms.items():
        terms = Terms(memory, lambda numbers: ([places[number] for number in numbers], 0), form, Stacked(), ranks)

        def run(terms: Terms = terms) -> object:
            model.adjuster = terms
            return model.forward(mixed)

        made[f"ours, {name}"] = run
    return made


def records_of(folder: Path, adapters: list[Path], model: Any) -> list[Any]:
    """The adapters as the cache knows them."""
    from shapeshift.adapter_cache import peft, record

    base = peft.Base(model.architecture, {folder.name}, max(RANKS))
    width = model.memory.element_size()
    made = [record.make(one.name, "0", peft.read(one, base), model.architecture, width) for one in adapters]
    for one in made:
        one.verified = True
    return made


def peft(folder: Path, adapters: list[Path], stated: str, batch: int) -> dict[str, Step]:
    """The same steps by transformers without adapters, and by PEFT with a mixed batch of them."""
    import torch
    import transformers
    from peft import PeftModel

    from shapeshift.fused_decode.model import DTYPES

    def base() -> Any:
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[stated])
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
                found = model(tokens, past_key_values=cache, use_cache=True, **options)
            # The next step finds the context as long as this one did.
            cache.crop(-1)
            return found

        return run

    return {"PEFT's base": stepper(plain), "PEFT, mixed": stepper(mixed, adapter_names=names)}


def measure(variants: dict[str, Step], rounds: int, steps: int) -> dict[str, float]:
    """Median ms of a step of each variant; the first round warms up and is not counted."""
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
