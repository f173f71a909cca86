"""BERT-Base in ONNX Runtime's CUDA provider: CUDA graphs of static lengths, against a dynamic session and torch.

All compute in f32, as provider `onnxruntime` builds its engines; `cosine` is the least of a text's two vectors, of ONNX
Runtime's graph and of torch's. Runtimes copy their inputs to the device and their answers back.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from bench.common.output import FOLDER, empty
from bench.gpu.device import Device
from bench.gpu.engines import bert
from bench.gpu.part import Part, Row, ratio
from bench.gpu.random_models import Shape, encoder
from shapeshift.engines.execution.engine_set import pack, row_slots
from shapeshift.engines.interfaces import PROVIDERS, Array, Runtime
from shapeshift.engines.verify import compare
from shapeshift.errors import UnsupportedError

GRAPHS, DYNAMIC, TORCH = "ONNX Runtime, graphs", "ONNX Runtime, dynamic", "torch graphs"


@dataclass(frozen=True)
class Sizes:
    """bins: static lengths; texts: that fill each, in equal parts."""

    shape: Shape
    bins: tuple[int, ...]
    texts: int
    rounds: int


def measure(device: Device, sizes: Sizes, seed: int) -> Iterator[Row]:
    """See the module."""
    try:
        runtimes = _runtimes(device, sizes, seed)
    except UnsupportedError as error:
        yield {"not measured": str(error)}
        return
    rng = np.random.default_rng(seed)
    for tokens in sizes.bins:
        rows = row_slots(tokens, True, tokens)
        texts = [rng.integers(999, 9999, tokens // sizes.texts, dtype=np.int64) for _ in range(sizes.texts)]
        inputs = pack(texts, tokens, rows)
        engines = {
            GRAPHS: runtimes["onnxruntime"].engine(tokens, rows),
            DYNAMIC: runtimes["onnxruntime"].engine(None, None),
            TORCH: runtimes["torch"].engine(tokens, rows),
        }
        outputs: dict[str, Array] = {
            name: next(iter(engine.run(inputs).values()))[: sizes.texts] for name, engine in engines.items()
        }
        times_ms = device.in_turn({name: partial(engine.run, inputs) for name, engine in engines.items()}, sizes.rounds)
        row = {"tokens": tokens, "texts": sizes.texts} | {f"{name}, ms": round(ms, 3) for name, ms in times_ms.items()}
        row |= {f"{name} / graphs": ratio(times_ms[name], times_ms[GRAPHS]) for name in (DYNAMIC, TORCH)}
        yield row | {"cosine": round(compare(outputs[GRAPHS], outputs[TORCH]).min_cosine, 6)}


def _runtimes(device: Device, sizes: Sizes, seed: int) -> dict[str, Runtime]:
    module = encoder(sizes.shape, seed)
    example = pack([np.ones(9, np.int64), np.ones(7, np.int64)], 24, 2)
    runtimes = {}
    for name in ("onnxruntime", "torch"):
        folder = FOLDER / "gpu" / name
        empty(folder)
        PROVIDERS[name].version()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            PROVIDERS[name].export(module, example, folder, "f32")
        runtimes[name] = PROVIDERS[name].open(folder, "f32", 1, device.number)
    return runtimes


PART = Part(
    "BERT-Base in f32 by ONNX Runtime's CUDA provider, as graphs and without, beside torch graphs",
    measure,
    Sizes(bert(12, 768, 12), (16, 32, 64, 128, 256, 512), texts=4, rounds=20),
    Sizes(bert(2, 32, 2), (16, 48), texts=2, rounds=1),
    minutes=1.0,
)
