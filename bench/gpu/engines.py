"""BERT-Base and Large: static lengths as CUDA graphs, against a dynamic graph, torch.compile and transformers.

Three kinds of rows. `step curve`: one text in the static engine of its length (Arlo, Fig. 2). `pack`: a full pack of
the longest texts. `batch`: texts of one length at once. Ours takes them in packs, each padded to the next static
length. The dynamic engine and torch.compile take the same packs without padding; transformers takes all as one batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from bench.common.output import FOLDER, empty
from bench.gpu.device import Device, Step
from bench.gpu.part import Part, Row, ratio
from bench.gpu.random_models import Shape, encoder, on_device
from shapeshift.engines.execution.engine_set import pack, row_slots
from shapeshift.engines.interfaces import Array, Engine, Ids
from shapeshift.engines.providers.torch import PROVIDER

OURS, DYNAMIC, COMPILED, BATCHED = "static graphs", "dynamic", "torch.compile", "transformers"


@dataclass(frozen=True)
class Sizes:
    """bins, packs: static lengths for texts, and for packs longer than any; lengths, batches: of the rows `batch`;
    rounds: of each cell."""

    models: Mapping[str, Shape]
    bins: tuple[int, ...]
    packs: tuple[int, ...]
    lengths: tuple[int, ...]
    batches: tuple[int, ...]
    rounds: int


def bert(layers: int, hidden: int, heads: int) -> Shape:
    """The shape of a BERT."""
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": 4 * hidden,
    }


def measure(device: Device, sizes: Sizes, seed: int) -> Iterator[Row]:
    """See the module."""
    rng = np.random.default_rng(seed)
    for name, shape in sizes.models.items():
        model = _Model(device, name, shape, sizes, seed)
        for length in sizes.bins:
            step = model.ours([_text(rng, length)])
            yield {"model": name, "kind": "step curve", "tokens": length, "ms": _ms(device, step, sizes.rounds)}
        for tokens in sizes.packs:
            texts = [_text(rng, sizes.bins[-1])] * (tokens // sizes.bins[-1])
            yield {"model": name, "kind": "pack", "tokens": tokens, "ms": _ms(device, model.ours(texts), sizes.rounds)}
        for length in sizes.lengths:
            for batch in sizes.batches:
                texts = [_text(rng, length) for _ in range(batch)]
                times_ms = device.in_turn(model.variants(texts), sizes.rounds)
                against = {
                    f"{other} / ours": ratio(times_ms[other], times_ms[OURS]) for other in times_ms if other != OURS
                }
                row = {"model": name, "kind": "batch", "tokens": length, "texts": batch}
                yield row | {f"{key}, ms": round(ms, 3) for key, ms in times_ms.items()} | against
        del model
        device.free()


class _Model:
    """One shape in every form."""

    def __init__(self, device: Device, name: str, shape: Shape, sizes: Sizes, seed: int) -> None:
        # Every GPU multiplies in f16.
        self._precision = "f32" if device.number is None else "f16"
        self._device, self._most = device, max(sizes.bins + sizes.packs)
        module = encoder(shape, seed)
        folder = FOLDER / "gpu" / name
        empty(folder)
        example = pack([np.ones(9, np.int64), np.ones(7, np.int64)], 24, 2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            PROVIDER.export(module, example, folder, self._precision)
        runtime = PROVIDER.open(folder, self._precision, 1, device.number)
        self._rows = partial(row_slots, packs_rows=True, max_tokens=sizes.bins[-1])
        self._bins = {tokens: runtime.as_on_gpu(tokens, self._rows(tokens)) for tokens in sizes.bins + sizes.packs}
        self._dynamic = runtime.engine(None, None)
        self._plain = on_device(module, device, self._precision)
        self._compiled = device.compiled(self._plain, dynamic=True)

    def variants(self, texts: Sequence[Ids]) -> dict[str, Step]:
        packs = list(self._packs(texts))
        plain = [pack(packed, sum(map(len, packed)), len(packed)) for packed in packs]
        batch = torch.from_numpy(np.stack(texts)).to(self._device.torch_device)
        return {
            OURS: self.ours(texts),
            DYNAMIC: lambda: [self._dynamic.run(inputs) for inputs in plain],
            COMPILED: lambda: [self._run_compiled(inputs) for inputs in plain],
            BATCHED: lambda: self._run_batch(batch),
        }

    def ours(self, texts: Sequence[Ids]) -> Step:
        """The step that encodes these texts with static engines."""
        calls: list[tuple[Engine, Mapping[str, Array]]] = []
        for packed in self._packs(texts):
            engine = self._engine(sum(map(len, packed)), len(packed))
            calls.append((engine, pack(packed, engine.tokens or 0, engine.rows or 0)))
        return lambda: [engine.run(inputs) for engine, inputs in calls]

    def _engine(self, tokens: int, rows: int) -> Engine:
        return next(
            engine for length, engine in self._bins.items() if length >= tokens and engine.rows and engine.rows >= rows
        )

    def _packs(self, texts: Sequence[Ids]) -> Iterator[Sequence[Ids]]:
        """As the executor packs texts of one length."""
        count = max(1, min(self._rows(self._most), self._most // len(texts[0])))
        for first in range(0, len(texts), count):
            yield texts[first : first + count]

    @torch.inference_mode()
    def _run_compiled(self, inputs: Mapping[str, Array]) -> Any:
        tensors = [torch.from_numpy(inputs[name]).to(self._device.torch_device) for name in self._plain.input_axes]
        return self._compiled(*tensors).cpu()

    @torch.inference_mode()
    def _run_batch(self, ids: torch.Tensor) -> Any:
        return self._plain.model(input_ids=ids).last_hidden_state.float().mean(1).cpu()


def _text(rng: np.random.Generator, length: int) -> Ids:
    return rng.integers(999, 9999, length, dtype=np.int64)


def _ms(device: Device, step: Step, rounds: int) -> float:
    return round(device.in_turn({"": step}, rounds)[""], 3)


PART = Part(
    "BERT shapes: static lengths as CUDA graphs, against dynamic, torch.compile and transformers",
    measure,
    Sizes(
        {"bert-base": bert(12, 768, 12), "bert-large": bert(24, 1024, 16)},
        (8, *range(16, 513, 16)),
        (1024, 2048, 4096, 8192, 16384),
        (8, 16, 32, 64, 128, 256, 512),
        (1, 4, 8, 32),
        rounds=20,
    ),
    Sizes({"tiny": bert(2, 32, 2)}, (16, 48), (96,), (12,), (3,), rounds=1),
    minutes=5.0,
)
