"""Time that adapters add to a decode step, ours and PEFT's mixed batch: `python -m bench.adapter_cache.step` (3 min).

A Llama of 110 million random parameters; 8 adapters of ranks 8, 16, 32, 64, 128, 8, 16 and 32 on queries, keys, values
and output of every layer; a context of 64 tokens. Each round runs all variants in turn. The added time is a difference
between two medians of the same run.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from bench.adapter_cache import random_adapters
from bench.common.models import KERNELS
from bench.common.output import FOLDER, Output, Row, parser, program
from bench.peers import random_llama
from shapeshift.engines import hardware
from shapeshift.kernels import kernel_build

RANKS = (8, 16, 32, 64, 128, 8, 16, 32)
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
CONTEXT = 64
BATCHES = (8, 32)
STEPS = 4
"""Of each variant in a round."""
BASE, NATIVE, TORCH, PEFT_BASE, PEFT_MIXED = "ours", "ours, native", "ours, torch", "PEFT's base", "PEFT, mixed"
Step = Callable[[], object]


@program
def main() -> int:
    """Measure, print, and write the table to build/bench/."""
    parse = parser("adapter_cache.step", __doc__)
    parse.add_argument("--precision", default="auto", help="auto, f32 or bf16")
    parse.add_argument("--rounds", type=int, default=12)
    options = parse.parse_args()
    # As the backend does, before torch is imported.
    kernel_build.limit_spinning()
    precision = hardware.resolve_precision(options.precision)
    output = Output("adapter_cache.step", {"seed": 0, "precision": precision, "rounds": options.rounds}, "adapter_step")
    folder = random_llama.ensure(FOLDER / "llama-110m")
    adapters = [make(FOLDER / "adapters-of-a-step", folder, number) for number in range(len(RANKS))]
    rows: list[Row] = []
    for batch in BATCHES:
        variants = {**ours(folder, adapters, precision, batch), **peft(folder, precision, batch)}
        times_ms = measure(variants, options.rounds)
        theirs = times_ms[PEFT_MIXED] - times_ms[PEFT_BASE]
        for name in [name for name in (NATIVE, TORCH) if name in times_ms]:
            added = times_ms[name] - times_ms[BASE]
            row = {"rows": str(batch), "form": name, "base, ms": times_ms[BASE], "added, ms": added}
            share = {"of the base": times_ms[name] / times_ms[BASE], "of PEFT's": added / theirs}
            rows.append({**row, "PEFT adds, ms": theirs, **share})
    output.table(f"a step with {len(RANKS)} adapters", rows)
    output.data["steps"] = rows
    output.save()
    return 0


def ours(folder: Path, adapters: list[Path], precision: str, batch: int) -> dict[str, Step]:
    """Steps of `batch` rows without adapters, and with all of them in each available form."""
    import torch

    from shapeshift.adapter_cache.lora import native
    from shapeshift.adapter_cache.lora.batch import LoraHook, LoraKernels
    from shapeshift.adapter_cache.lora.segmented import TorchLora
    from shapeshift.fused_decode.interfaces import StepBatch
    from shapeshift.fused_decode.model.cpu_runtime import DecodeModel, ModelOptions

    def say(text: str) -> None:
        print(text, file=sys.stderr)

    options = ModelOptions(
        precision=precision, slots=batch, max_length=CONTEXT * 2, threads=hardware.cores(), cache_dir=KERNELS
    )
    model = DecodeModel.load(folder, options, say)
    memory, places = random_adapters.loaded(model, folder, adapters)
    fast = native.load(KERNELS, say)
    forms: dict[str, LoraKernels] = {TORCH: TorchLora(), **({} if fast is None else {NATIVE: fast})}
    rows = torch.arange(batch, dtype=torch.int32)
    model.forward(StepBatch(torch.randint(9, 999, (batch * CONTEXT,)), rows, rows * 0, rows * 0 + CONTEXT, rows.long()))

    def step(owners: torch.Tensor | None) -> StepBatch:
        return StepBatch(torch.randint(9, 999, (batch,)), rows, rows * 0 + CONTEXT, rows * 0 + 1, rows.long(), owners)

    plain, mixed = step(None), step((rows % len(adapters)).int())
    steps: dict[str, Step] = {BASE: lambda: model.forward(plain)}
    for name, lora_kernels in forms.items():
        hook = LoraHook(memory, lambda numbers: ([places[number] for number in numbers], 0), lora_kernels)

        def run(hook: LoraHook = hook) -> object:
            model.linear_hook = hook
            return model.forward(mixed)

        steps[name] = run
    return steps


def peft(folder: Path, precision: str, batch: int) -> dict[str, Step]:
    """The same steps by transformers without adapters, and by PEFT with a mixed batch."""
    import torch
    import transformers

    from bench.peers.peft_steps import stepper, with_adapters
    from shapeshift.fused_decode.model.cpu_runtime import DTYPES

    plain, base = (transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[precision]) for _ in range(2))
    names = [str(row % len(RANKS)) for row in range(batch)]
    prompt = torch.randint(9, 999, (batch, CONTEXT))
    mixed = with_adapters(base, RANKS)
    return {PEFT_BASE: stepper(plain, prompt), PEFT_MIXED: stepper(mixed, prompt, adapter_names=names)}


def make(folder: Path, base: Path, number: int) -> Path:
    """The PEFT folder of an adapter, with random weights; made if missing."""
    target = folder / f"r{RANKS[number]}-{number}"
    if not (target / "adapter_config.json").is_file():
        random_adapters.write(target, base, RANKS[number], TARGETS, seed=number)
    return target


def measure(variants: Mapping[str, Step], rounds: int) -> dict[str, float]:
    """Median ms of a step of each variant; the first round is an unmeasured warm-up."""
    seen: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(rounds + 1):
        for name, step in variants.items():
            for _ in range(STEPS):
                before = time.perf_counter()
                step()
                if turn:
                    seen[name].append((time.perf_counter() - before) * 1e3)
    return {name: statistics.median(values) for name, values in seen.items()}


if __name__ == "__main__":
    sys.exit(main())
