"""What a model makes of a sample, text by text, and how long its engines take: saved once, used for every candidate."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shapeshift.cascade.control import Level
from shapeshift.cascade.softmax import Array
from shapeshift.engines import manifest, registry
from shapeshift.engines.ladder import Ladder
from shapeshift.engines.manifest import Manifest
from shapeshift.engines.protocol import Ids
from shapeshift.engines.tokenizer import FILE_NAME as TOKENIZER_FILE
from shapeshift.engines.tokenizer import TextTokenizer
from shapeshift.errors import EngineError

# Told how many percent have run.
Progress = Callable[[int], None]
_WARM_UP = 20


@dataclass(frozen=True)
class Observed:
    """logits: [n, labels]; engine_ms: [n]; of each text, where the model tells it: importance [tokens], offsets
    [tokens, 2] and embedding [width]."""

    logits: Array
    engine_ms: Array
    importance: list[Array]
    offsets: list[Array]
    embedding: Array | None


class ProfiledModel:
    """The engines of one model, on one thread, one text a call."""

    def __init__(self, engines: Path, name: str) -> None:
        folder = engines / name
        self.name = name
        self.made: Manifest = manifest.load(folder)
        self.outputs = tuple(output.name for output in self.made.outputs)
        if "LOGITS" not in self.outputs:
            raise EngineError(f"{name} has no output LOGITS; list it in its config.pbtxt, `make engines`")
        self._tokenizer = TextTokenizer(
            folder / TOKENIZER_FILE, self.made.max_tokens, type_stride=self.made.type_stride
        )
        runtime = registry.provider(self.made.provider).open(folder, self.made.precision, threads=1)
        self._ladder = Ladder(self.made)
        for entry in self.made.engines:
            self._ladder.add(runtime.engine(entry.tokens, entry.rows), entry)

    def one(self, text: Sequence[bytes]) -> tuple[Level, float]:
        """What the model says of one text, and how long its engine took, in ms."""
        encoded = self._tokenizer.encode_whole(text[0], text[1] if len(text) > 1 else None, truncate=True)
        outputs, took = self._run(encoded.ids)
        own = {name.lower(): values[0] for name, values in outputs.items()}
        return Level(**own, offsets=encoded.offsets), took

    def observe(self, texts: Sequence[Sequence[bytes]], progress: Progress = lambda percent: None) -> Observed:
        """Run every text, truncated where it is too long, after a few that only warm the engines up."""
        encoded = [
            self._tokenizer.encode_whole(one[0], one[1] if len(one) > 1 else None, row, truncate=True)
            for row, one in enumerate(texts)
        ]
        for one in encoded[:_WARM_UP]:
            self._run(one.ids)
        found, times = [], []
        for number, one in enumerate(encoded):
            outputs, took = self._run(one.ids)
            found.append(outputs)
            times.append(took)
            if 100 * (number + 1) // len(encoded) > 100 * number // len(encoded):
                progress(100 * (number + 1) // len(encoded))
        return Observed(
            np.stack([one["LOGITS"][0] for one in found]),
            np.array(times),
            [one["IMPORTANCE"][0] for one in found] if "IMPORTANCE" in self.outputs else [],
            [one.offsets for one in encoded],
            np.stack([one["EMBEDDING"][0] for one in found]) if "EMBEDDING" in self.outputs else None,
        )

    def _run(self, ids: Ids) -> tuple[dict[str, Array], float]:
        before = time.perf_counter()
        outputs = self._ladder.run([ids])
        return outputs, (time.perf_counter() - before) * 1e3
