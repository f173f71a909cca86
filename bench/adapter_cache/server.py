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
from bench.adapter_cache.report import CACHE, DEFAULT, ORDER, PLAIN, QUEUES, AdapterRun
from bench.common.foreign_load import ForeignLoad
from bench.common.models import SHIPPED, generator, write_front
from bench.common.output import FOLDER, empty, progress
from bench.common.server import loaded_server
from bench.fused_decode.loads import Load
from bench.fused_decode.served import TritonStreams
from bench.peers import random_llama
from bench.peers.protocol import DecodeRequest
from shapeshift.adapter_cache.settings import EVICTION_RULES, UNUSED
from shapeshift.triton.metrics import scrape

MODEL = "generate_lora"
SLOTS, MAX_LENGTH = 16, 320
SCALE = 1 / 16
"""Factor of the trace's lengths: the model is about sixty times smaller than the paper's, the machine even slower."""
CACHE_SHARE = 0.4
"""Share of the bytes of all adapters that the cache holds."""
_WARM = 8
_SETTLE_S = 2.5
_COUNTED = tuple(f"shapeshift_adapter_{name}_total" for name in ("loaded_bytes", "hits", "misses"))

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
    """Runs the systems. precision: of model and adapters in memory."""

    def __init__(self, precision: str) -> None:
        self.model = random_llama.ensure(FOLDER / "llama-110m")
        self.adapters = adapter_set(random_adapters.bytes_per_rank(self.model))
        self.files = random_adapters.ensure(FOLDER / "adapters", self.model, self.adapters)
        self.lengths = Lengths.read(SCALE, MAX_LENGTH)
        self._words = random_llama.words(self.model)
        self._precision = precision

    def capacity(self, count: int) -> float:
        """Requests a second that FIFO without a cache serves when all arrive at once."""
        with self.serving({PLAIN: PARTS[PLAIN]}) as served:
            return report.served_per_s([self.run(served[PLAIN], self.load(1e6, count, 10**6))])

    def measure(
        self, systems: Mapping[str, Mapping[str, str]], rates: Mapping[str, float], count: int, seed: int
    ) -> Iterator[tuple[str, str, AdapterRun]]:
        """Load, system and run: each of `systems` once under each load, in random order, on the same requests.

        A server serves one load after another, so the caches of later loads are warm. No request is sent twice.
        """
        for name in random.Random(seed).sample(list(systems), len(systems)):
            with self.serving({name: systems[name]}) as served:
                for at, (load, rate) in enumerate(rates.items()):
                    run = self.run(served[name], self.load(rate, count, seed, at))
                    progress(f"{name}, {load}: p99 {report.first_ms([run], 99):.0f} ms")
                    yield load, name, run

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
                streams = AdapterStreams(server.grpc_url, model, self.model / "tokenizer.json")
                streams.replay(self.load(1e6, _WARM, 10**7))
                served[name] = ServedSystem(streams, server.metrics_url, model)
            yield served

    def run(self, system: ServedSystem, load: Load) -> AdapterRun:
        """Run a system under `load`."""
        before = _counted(system)
        with ForeignLoad() as foreign:
            answers = system.streams.replay(load)
        after = _counted(system)
        loaded_bytes, hits, misses = (after[name] - before[name] for name in _COUNTED)
        return AdapterRun(
            answers.first_s - answers.arrived_s,
            answers.last_s - answers.arrived_s,
            answers.between_s,
            loaded_bytes,
            hits,
            misses,
            answers.span_s,
            foreign.cores,
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
    page = {name: value for (name, labels), value in samples.items() if ("model", system.model) in labels}
    return {name: page.get(name, 0.0) for name in _COUNTED}
