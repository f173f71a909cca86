"""The systems on the real server: a `generate_lora` model for each, and a gRPC stream for each request."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.adapter_cache import random_adapters, report
from bench.adapter_cache.loads import RANKS, Lengths, adapter_set, draw
from bench.adapter_cache.report import CACHE, DEFAULT, ORDER, PLAIN, QUEUES, AdapterRun, Runs
from bench.common.foreign_load import ForeignLoad
from bench.common.models import SHIPPED, generator, write_front
from bench.common.output import FOLDER, empty, progress
from bench.common.server import loaded_server
from bench.fused_decode.loads import Load
from bench.fused_decode.served import TritonStreams
from bench.peers import random_llama
from bench.peers.protocol import DecodeRequest
from shapeshift.adapter_cache.settings import EVICTION_RULES, UNUSED
from shapeshift.engines.hardware import cores
from shapeshift.triton.metrics import scrape

MODEL = "generate_lora"
SLOTS, MAX_LENGTH = 16, 320
SCALE = 1 / 16
"""Factor of the trace's lengths: the model is about sixty times smaller than the paper's, the machine even slower."""
CACHE_SHARE = 0.4
"""Share of the bytes of all adapters that the cache holds."""
_WARM = 8
_SETTLE_S = 2.5
_COUNTED = {
    "loaded": "shapeshift_adapter_loaded_bytes_total",
    "hits": "shapeshift_adapter_hits_total",
    "misses": "shapeshift_adapter_misses_total",
}

PARTS: dict[str, dict[str, str]] = {
    PLAIN: {"scheduler": "fifo", "eviction": UNUSED},
    CACHE: {"scheduler": "fifo"},
    ORDER: {"eviction": UNUSED},
    DEFAULT: {},
    QUEUES: {"scheduler": "chameleon"},
}
VARIANTS: dict[str, dict[str, str]] = {
    "chameleon, no cache": {"scheduler": "chameleon", "eviction": UNUSED},
    **{f"{name}, cache": {"scheduler": name} for name in ("sjf", "wrs")},
    **{f"default, {name}": {"eviction": name} for name in list(EVICTION_RULES)[1:] if name != UNUSED},
    "default, predicting": {"prefetch": "true"},
}


@dataclass(frozen=True)
class AdapterRequest(DecodeRequest):
    """A request for an adapter."""

    adapter: str | None = None


@dataclass(frozen=True)
class ServedSystem:
    """A running system: the model `model` of a server."""

    streams: AdapterStreams
    metrics_url: str
    model: str


class AdapterStreams(TritonStreams):
    """Streams of requests for adapters."""

    def _parameters(self, request: DecodeRequest) -> dict[str, str]:
        adapter = request.adapter if isinstance(request, AdapterRequest) else None
        return {} if adapter is None else {"lora_name": adapter}


class ServerBench:
    """Runs the systems, and keeps every run by load and system. precision: of model and adapters in memory."""

    def __init__(self, precision: str, budget_s: float) -> None:
        self.model = random_llama.ensure(FOLDER / "llama-110m")
        self.adapters = adapter_set(random_adapters.bytes_per_rank(self.model))
        self.files = random_adapters.ensure(FOLDER / "adapters", self.model, self.adapters)
        self.lengths = Lengths.read(SCALE, MAX_LENGTH)
        self.runs: dict[tuple[float, str], list[AdapterRun]] = {}
        self.skipped: list[str] = []
        self._words = random_llama.words(self.model)
        self._precision = precision
        self._end = time.monotonic() + budget_s

    def capacity(self, count: int) -> float:
        """Requests a second that FIFO without a cache serves when all arrive at once."""
        with self.serving({PLAIN: PARTS[PLAIN]}) as served:
            return report.served_per_s([self.run(served[PLAIN], self.load(1e6, count, 10**6))])

    def measure(
        self, systems: Mapping[str, Mapping[str, str]], rates: Mapping[float, float], count: int, seed: int
    ) -> None:
        """Run each of `systems` once under each load, in random order, on the same requests; none if the time is up.

        A server serves one load after another, so the caches of later loads are warm. No request is sent twice.
        """
        names = list(systems)
        if time.monotonic() > self._end:
            self.skipped.append(f"{', '.join(names)} (seed {seed})")
            return
        random.Random(seed).shuffle(names)
        for name in names:
            with self.serving({name: systems[name]}) as served:
                for at, (load, rate) in enumerate(rates.items()):
                    run = self.run(served[name], self.load(rate, count, seed, at))
                    self.runs.setdefault((load, name), []).append(run)
                    progress(f"{name}, load {load:.0%}: p99 {report.first_ms([run], 99):.0f} ms")

    def of(self, load: float) -> dict[str, Runs]:
        """The runs of each system under a load."""
        return {name: runs for (at, name), runs in self.runs.items() if at == load}

    def load(self, rate: float, count: int, *seed: int) -> Load:
        """Poisson arrivals of `count` requests, `rate` a second."""
        rng = np.random.default_rng(seed)
        requests = draw(self.lengths, self.adapters, rate, count, rng)
        prompts = [rng.choice(self._words, request.prompt_tokens).tolist() for request in requests]
        rows = zip(requests, prompts, strict=True)
        return Load(
            "",
            [AdapterRequest(request.at_s, prompt, request.answer_tokens, request.adapter) for request, prompt in rows],
        )

    @contextmanager
    def serving(self, systems: Mapping[str, Mapping[str, str]]) -> Iterator[dict[str, ServedSystem]]:
        """One server with a model, and so a process, for each of `systems`, after a short warm-up."""
        repository = FOLDER / "adapter-repository"
        empty(repository)
        models = {name: MODEL if not at else f"{MODEL}_{at}" for at, name in enumerate(systems)}
        for name, model in models.items():
            self._publish(repository / model, systems[name])
        with loaded_server(dict.fromkeys(models.values(), 0), (repository,)) as server:
            served = {}
            for name, model in models.items():
                streams = AdapterStreams(name, server.grpc_url, model, self.model / "tokenizer.json")
                streams.replay(self.load(1e6, _WARM, 10**7))
                served[name] = ServedSystem(streams, server.metrics_url, model)
            yield served

    def run(self, system: ServedSystem, load: Load) -> AdapterRun:
        """Run a system under `load`."""
        before = _counted(system)
        with ForeignLoad() as foreign:
            replayed = system.streams.replay(load)
        after = _counted(system)
        counted = {name: after[name] - before[name] for name in _COUNTED}
        arrived = np.array([request.at_s for request in load.requests])
        first = np.array([stamps[0] for stamps in replayed.stamps])
        last = np.array([stamps[-1] for stamps in replayed.stamps])
        return AdapterRun(
            np.array([self.adapters[request.adapter].rank for request in load.requests]),  # type: ignore[attr-defined]
            first - arrived,
            last - arrived,
            np.concatenate([np.diff(stamps) for stamps in replayed.stamps]),
            counted["loaded"],
            counted["hits"],
            counted["misses"],
            float(last.max() - arrived.min()),
            foreign.cores / cores(),
        )

    def _publish(self, folder: Path, parameters: Mapping[str, str]) -> None:
        """Write the front with these parameters, over the benchmark's model and adapters."""
        total = sum(adapter.bytes for adapter in self.adapters.values())
        values = {
            **generator(self.model, self._precision, SLOTS, MAX_LENGTH),
            "adapters_dir": self.files.resolve(),
            "max_rank": max(RANKS),
            "starter_dir": "",
            "adapter_mb": int(CACHE_SHARE * total / 2**20),
            **parameters,
        }
        write_front(SHIPPED / MODEL, folder, values)


def _counted(system: ServedSystem) -> dict[str, float]:
    """The cache's counters, after they are exported."""
    time.sleep(_SETTLE_S)
    samples = scrape(system.metrics_url, timeout_s=5.0)
    counts = dict.fromkeys(_COUNTED, 0.0)
    for (name, labels), value in samples.items():
        for key, full in _COUNTED.items():
            if name == full and ("model", system.model) in labels:
                counts[key] += value
    return counts
