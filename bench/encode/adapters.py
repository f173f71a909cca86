"""`python -m bench.encode.adapters`: texts with LoRA adapters over one encoder, in one process, in turns with none.

Requests take the adapters in turn, so that almost every text of a pack has another one. The engines are those of the
provider native, which computes the texts without adapters, too. Ratios are between medians over the rounds.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.common.cells import Cells
from bench.common.models import build_encoder
from bench.common.output import FOLDER, Output, parser, program
from bench.common.texts import CHECKPOINT, Outcome, figures, short_texts
from bench.encode.worker import Encoder
from shapeshift.kernels import kernel_build

TARGETS = {
    "query, value": ("attention.self.query", "attention.self.value"),
    "all linears": (
        *("attention.self.query", "attention.self.key", "attention.self.value"),
        *("attention.output.dense", "intermediate.dense", "output.dense"),
    ),
}
PLACE = FOLDER / "encode_adapters"
BASE, ADAPTERS, RANK, CLIENTS = "no adapter", 32, 16, 32


@program
def main() -> int:
    """Measure, print, and write tables and data to build/bench/."""
    options = parser("encode.adapters", __doc__, "one minute: three rounds")
    options.add_argument("--precision", choices=("f32", "bf16", "int8"), default="f32")
    chosen = options.parse_args()
    rounds, requests = (3, 600) if chosen.quick else (7, 1200)
    settings = {"precision": chosen.precision, "adapters": ADAPTERS, "rank": RANK, "in flight": CLIENTS}
    output = Output("encode.adapters", {**settings, "rounds": rounds, "requests": requests, "seed": chosen.seed})
    kernel_build.limit_spinning()
    parameters = {"precision": chosen.precision, "adapter_mb": "64", "max_tokens": "256"}
    engines = build_encoder(PLACE / chosen.precision, "encode", CHECKPOINT, parameters).engines / "encode"
    texts, cells = short_texts(chosen.seed), Cells(figures, chosen.seed)
    memory = {}
    encoders = {BASE: Encoder(engines)}
    for name, targets in TARGETS.items():
        records, adapted, size = load(engines, targets)
        encoders[name] = Encoder(engines, adapted, records)
        memory[name] = round(size / 2**20, 1)
    systems = {name: partial(outcome, one, texts, requests) for name, one in encoders.items()}
    cells.measure(f"closed {CLIENTS}", systems, rounds)
    output.say(cells.tables(f"short texts, {ADAPTERS} adapters of rank {RANK}, {chosen.precision}, "))
    rows = [
        {
            "targets": name,
            "over no adapter": round(cells.over(f"closed {CLIENTS}", name, BASE, "per_second"), 3),
            "processor ms over no adapter": round(cells.over(f"closed {CLIENTS}", name, BASE, "processor_ms"), 3),
            "MiB of adapters": memory[name],
        }
        for name in TARGETS
    ]
    output.table("throughput with adapters", rows)
    output.data |= {"cells": cells.records(), "ratios": rows}
    output.save()
    return 0


def outcome(encoder: Encoder, texts: Sequence[str], count: int) -> Outcome:
    import numpy as np

    answer = encoder.closed(texts, CLIENTS, count)
    return Outcome(np.array(answer["latency_ms"]), float(str(answer["per_second"])))


def load(engines: Path, targets: Sequence[str]) -> tuple[list[Any], Any, int]:
    """Random adapters in memory: their records, what engines need of them, and their bytes."""
    import torch

    from shapeshift.adapter_cache.lora.batch import shifted
    from shapeshift.adapter_cache.lora.segmented import TorchLora
    from shapeshift.adapter_cache.memory.adapter_table import make_adapter
    from shapeshift.adapter_cache.memory.loader import load_weights
    from shapeshift.adapter_cache.registry import peft
    from shapeshift.adapter_cache.text.base import PackAdapters, base_model
    from shapeshift.engines.native.encoder import value_type

    base, dtype = base_model(engines, {CHECKPOINT.name}, RANK, CHECKPOINT), value_type(engines)
    folders = [PLACE / f"{len(targets)}-{number}" for number in range(ADAPTERS)]
    for number, folder in enumerate(folders):
        write(folder, base.adaptable, targets, number)
    records = [make_adapter(one.name, "", peft.read(one, base), dtype.itemsize) for one in folders]
    memory, start = torch.zeros(sum(one.elements for one in records), dtype=dtype), 0
    for record in records:
        record.verified, record.places, record.start = True, shifted(record.relative, start), start
        load_weights(memory[start : start + record.elements], record, TorchLora().store)
        start += record.elements
    return records, PackAdapters(memory, base.head), memory.nbytes


def write(folder: Path, adaptable: Any, targets: Sequence[str], seed: int) -> None:
    """A PEFT folder with random weights of these modules of each layer."""
    import json

    import torch
    from safetensors.torch import save_file

    chance, tensors = torch.Generator().manual_seed(seed), {}
    for layer in range(adaptable.layers):
        for target in targets:
            part = adaptable.parts[adaptable.targets[target]]
            stem = f"base_model.model.{adaptable.paths[0]}.{layer}.{target}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(RANK, part.inputs, generator=chance) * 0.02
            tensors[f"{stem}.lora_B.weight"] = torch.randn(part.outputs, RANK, generator=chance) * 0.02
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    config = {"peft_type": "LORA", "base_model_name_or_path": CHECKPOINT.name, "r": RANK, "lora_alpha": RANK}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "target_modules": list(targets)}))


if __name__ == "__main__":
    sys.exit(main())
