"""A provider whose engines are fakes, and manifests of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shapeshift.engines.interfaces import Array
from shapeshift.engines.manifest import EngineEntry, Latency, Manifest

CALL_MS, LONGEST = 10.0, 8


@dataclass
class FakeEngines:
    """A provider, runtime and engine: each vector is the number of its ids. made: the lengths of the engines.

    starts: called before an engine is made, with how many there are; computes: before each call of texts.
    threaded: whether engines are those of `interfaces.ThreadedEngine`; calls, ends: the threads of each
    call of texts, as it begins and as it ends.
    """

    made: list[int | None] = field(default_factory=list)
    opened: list[tuple[Any, ...]] = field(default_factory=list)
    starts: Callable[[int], None] = lambda count: None
    computes: Callable[[], None] = lambda: None
    threaded: bool = False
    calls: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    def open(self, *given: Any) -> FakeEngines:
        self.opened.append(given)
        return self

    def engine(self, tokens: int | None, rows: int | None) -> FakeEngine:
        self.starts(len(self.made))
        self.made.append(tokens)
        return (FakeThreadedEngine if self.threaded else FakeEngine)(self, tokens, rows)

    def used_mb(self) -> float:
        return 0.0


@dataclass
class FakeEngine:
    owner: FakeEngines
    tokens: int | None
    rows: int | None

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        if inputs["INPUT_IDS"].any():
            self.owner.computes()
        rows = inputs["ROWS"]
        segments = inputs["SEGMENTS"]
        return {"EMBEDDING": np.array([[(segments == row).sum()] for row in rows], np.float32)}


@dataclass
class FakeThreadedEngine(FakeEngine):
    threads: int = 1

    def use(self, threads: int) -> None:
        self.threads = threads

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        if inputs["INPUT_IDS"].any():
            self.owner.calls.append(self.threads)
            found = super().run(inputs)
            self.owner.ends.append(self.threads)
            return found
        return super().run(inputs)


def entry(tokens: int | None, ms: float = CALL_MS) -> EngineEntry:
    rows = None if tokens is None else 4
    return EngineEntry("", tokens, rows, 0.0, 1.0, (Latency(tokens or LONGEST, 1, ms, 2 * ms, ms),))


def manifest(*engines: EngineEntry) -> Manifest:
    stated: dict[str, Any] = dict.fromkeys(
        ("checkpoint_sha256", "build_key", "provider_version", "reference", "tolerance", "hardware"), ""
    )
    return Manifest(
        model="m",
        provider="fake",
        precision="f32",
        vocabulary=100,
        max_tokens=LONGEST,
        packs_rows=True,
        position_offset=0,
        outputs=(),
        files={},
        engines=engines,
        **stated,
    )
