"""The outputs and engine times of one model on a sample: measured once, used for every candidate."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shapeshift.cascade.policy.routing import Array, LevelOutput
from shapeshift.engines import manifest
from shapeshift.engines.execution.engine_set import EngineSet
from shapeshift.engines.interfaces import PROVIDERS, Ids
from shapeshift.engines.manifest import Manifest
from shapeshift.engines.text.tokenizer import FILE_NAME, Encoded, TextTokenizer
from shapeshift.errors import EngineError

# Called with the percentage of texts that have run.
Progress = Callable[[int], None]
_WARM_UP = 20
# Providers that compute in this process alone, where processor time is the time on an idle machine: other programs do
# not count. Engines on a GPU, and emulated ones, are waited for.
_ON_CPU = ("native", "openvino")


@dataclass(frozen=True)
class Observation:
    """Of n texts. logits: [n, labels]; engine_ms: [n]; importance: [tokens] each, empty where the model has none;
    offsets: [tokens, 2] each; embedding: [n, width], or None."""

    logits: Array
    engine_ms: Array
    importance: list[Array]
    offsets: list[Array]
    embedding: Array | None


class ModelRunner:
    """Runs the engines of one model on one thread, one text per call."""

    def __init__(self, engines: Path, name: str) -> None:
        folder = engines / name
        self.name = name
        self.manifest: Manifest = manifest.load(folder)
        self.outputs = tuple(output.name for output in self.manifest.outputs)
        if "LOGITS" not in self.outputs:
            raise EngineError(f"{name} has no output LOGITS; list it in its config.pbtxt and run `shapeshift engines`")
        self._tokenizer = TextTokenizer(
            folder / FILE_NAME,
            self.manifest.max_tokens,
            type_stride=self.manifest.type_stride,
            vocab_size=self.manifest.vocabulary,
        )
        self._clock = time.process_time if self.manifest.provider in _ON_CPU else time.perf_counter
        runtime = PROVIDERS[self.manifest.provider].open(folder, self.manifest.precision, threads=1)
        self._engine_set = EngineSet(self.manifest)
        for entry in self.manifest.engines:
            self._engine_set.add(runtime.engine(entry.tokens, entry.rows), entry)

    def run_one(self, text: Sequence[bytes]) -> tuple[LevelOutput, float]:
        """The output for one text, and its engine time in ms."""
        encoded = self._encode(text)
        outputs, took = self._run(encoded.ids)
        values = {name.lower(): values[0] for name, values in outputs.items()}
        return LevelOutput(**values, offsets=encoded.offsets), took

    def observe(self, texts: Sequence[Sequence[bytes]], progress: Progress = lambda percent: None) -> Observation:
        """Run every text, truncated if too long, after a few runs that only warm up the engines."""
        encoded = [self._encode(one, row) for row, one in enumerate(texts)]
        for one in encoded[:_WARM_UP]:
            self._run(one.ids)
        results, times = [], []
        for number, one in enumerate(encoded):
            outputs, took = self._run(one.ids)
            results.append(outputs)
            times.append(took)
            if 100 * (number + 1) // len(encoded) > 100 * number // len(encoded):
                progress(100 * (number + 1) // len(encoded))
        return Observation(
            np.stack([one["LOGITS"][0] for one in results]),
            np.array(times),
            [one["IMPORTANCE"][0] for one in results] if "IMPORTANCE" in self.outputs else [],
            [one.offsets for one in encoded],
            np.stack([one["EMBEDDING"][0] for one in results]) if "EMBEDDING" in self.outputs else None,
        )

    def _encode(self, text: Sequence[bytes], row: int | None = None) -> Encoded:
        pair = text[1] if len(text) > 1 else None
        return self._tokenizer.encode_with_offsets(text[0], pair, row, truncate=True, prompt=self.manifest.prompt(None))

    def _run(self, ids: Ids) -> tuple[dict[str, Array], float]:
        before = self._clock()
        outputs = self._engine_set.run([ids])
        return outputs, (self._clock() - before) * 1e3
