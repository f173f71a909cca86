"""The real server under the same loads: one process of `generate_lora` a system, a gRPC stream for each request."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench import adapter_files, decode_systems
from bench import adapter_report as report
from bench.adapter_loads import RANKS, Lengths, adapters, draw
from bench.adapter_report import CACHE, DEFAULT, ORDER, PLAIN, QUEUES, Outcome, Runs
from bench.decode_loads import Load
from bench.foreign import ForeignLoad
from bench.peers import random_llama
from bench.peers.decode_worker import Ask as Asked
from bench.systems import triton
from shapeshift.adapter_cache import evict
from shapeshift.engines.checkpoint import open_checkpoint
from shapeshift.engines.hardware import cores
from shapeshift.triton import modelconfig
from shapeshift.triton.metrics import scrape

MODEL = "generate_lora"
SLOTS, MAX_LENGTH = 16, 320
SCALE = 1 / 16
"""Of the trace's lengths: the model is some sixty times smaller than the paper's, the machine slower still."""
CACHE_SHARE = 0.4
"""Of the bytes of all adapters, that the pool's own part holds."""
_WARM = 8
FOLDER = Path("build/bench")
_SETTLE_S = 2.5
_COUNTED = {
    "loaded": "shapeshift_adapter_loaded_bytes_total",
    "hits": "shapeshift_adapter_hits_total",
    "misses": "shapeshift_adapter_misses_total",
}

PARTS: dict[str, dict[str, str]] = {
    PLAIN: {"scheduler": "fifo", "caching": "false"},
    CACHE: {"scheduler": "fifo"},
    ORDER: {"caching": "false"},
    DEFAULT: {},
    QUEUES: {"scheduler": "chameleon"},
}
FURTHER: dict[str, dict[str, str]] = {
    "chameleon, no cache": {"scheduler": "chameleon", "caching": "false"},
    **{f"{name}, cache": {"scheduler": name} for name in ("sjf", "wrs")},
    **{f"default, {name}": {"eviction": name} for name in list(evict.ALGORITHMS)[1:]},
    "default, predicting": {"prefetch": "true"},
}


@dataclass(frozen=True)
class AdapterAsk(Asked):
    """A request for an adapter."""

    adapter: str | None = None


@dataclass(frozen=True)
class Served:
    """A system that runs, as the model `model` of a server."""

    streams: AdapterStreams
    metrics_url: str
    model: str


class AdapterStreams(decode_systems.TritonStreams):
    """Streams whose requests name their adapters."""

    def _parameters(self, ask: Asked) -> dict[str, str]:
        adapter = ask.adapter if isinstance(ask, AdapterAsk) else None
        return {} if adapter is None else {"lora_name": adapter}


class Bench:
    """Every run of every system, by load. precision: of model and adapters in memory."""

    def __init__(self, precision: str, budget_s: float, say: Callable[[str], None]) -> None:
        self.model = random_llama.ensure(FOLDER / "llama-110m")
        self.known = adapters(adapter_files.bytes_per_rank(self.model))
        self.files = adapter_files.ensure(FOLDER / "adapters", self.model, self.known)
        self.lengths = Lengths.read(SCALE, MAX_LENGTH)
        self.runs: dict[tuple[float, str], list[Outcome]] = {}
        self.skipped: list[str] = []
        self._words = random_llama.words(self.model)
        self._precision = precision
        self._end = time.monotonic() + budget_s
        self._say = say

    def capacity(self, count: int) -> float:
        """Requests a second that FIFO without a cache serves when all are there at once."""
        with self.serving({PLAIN: PARTS[PLAIN]}) as served:
            return report.served_per_s([self.run(served[PLAIN], self.load(1e6, count, 10**6))])

    def measure(
        self, systems: Mapping[str, Mapping[str, str]], rates: Mapping[float, float], count: int, seed: int
    ) -> None:
        """Each of `systems` once under each load, in random order; all get the same requests, or none gets any.

        One load follows another on a server, so that the caches of the later ones are warm; requests are never the
        same again.
        """
        names = list(systems)
        if time.monotonic() > self._end:
            self.skipped.append(f"{', '.join(names)} (seed {seed})")
            return
        random.Random(seed).shuffle(names)
        for name in names:
            with self.serving({name: systems[name]}) as served:
                for at, (load, rate) in enumerate(rates.items()):
                    outcome = self.run(served[name], self.load(rate, count, seed, at))
                    self.runs.setdefault((load, name), []).append(outcome)
                    self._say(f"{name}, load {load:.0%}: p99 {report.first_ms([outcome], 99):.0f} ms")

    def of(self, load: float) -> dict[str, Runs]:
        """The runs of each system under a load."""
        return {name: runs for (at, name), runs in self.runs.items() if at == load}

    def load(self, rate: float, count: int, *seed: int) -> Load:
        """Poisson arrivals of `count` requests, `rate` a second."""
        rng = np.random.default_rng(seed)
        asks = draw(self.lengths, self.known, rate, count, rng)
        prompts = [rng.choice(self._words, ask.prompt_tokens).tolist() for ask in asks]
        rows = zip(asks, prompts, strict=True)
        return Load("", [AdapterAsk(ask.at_s, prompt, ask.answer_tokens, ask.adapter) for ask, prompt in rows])

    @contextmanager
    def serving(self, systems: Mapping[str, Mapping[str, str]]) -> Iterator[dict[str, Served]]:
        """One server with a model, and so a process, for each of `systems`, a little warmed up."""
        repository = FOLDER / "adapter-repository"
        shutil.rmtree(repository, ignore_errors=True)
        models = {name: MODEL if not at else f"{MODEL}_{at}" for at, name in enumerate(systems)}
        for name, model in models.items():
            self._publish(repository / model, systems[name])
        with triton(dict.fromkeys(models.values(), 0), (repository,), Path("build")) as server:
            served = {}
            for name, model in models.items():
                streams = AdapterStreams(name, server.grpc_url, model, self.model / "tokenizer.json")
                streams.replay(self.load(1e6, _WARM, 10**7))
                served[name] = Served(streams, server.metrics_url, model)
            yield served

    def run(self, system: Served, load: Load) -> Outcome:
        """Everything under `load`."""
        before = _counted(system)
        with ForeignLoad() as foreign:
            replayed = system.streams.replay(load)
        after = _counted(system)
        counted = {name: after[name] - before[name] for name in _COUNTED}
        arrived = np.array([ask.at_s for ask in load.asks])
        first = np.array([stamps[0] for stamps in replayed.stamps])
        last = np.array([stamps[-1] for stamps in replayed.stamps])
        return Outcome(
            np.array([self.known[str(ask.adapter)].rank for ask in load.asks if isinstance(ask, AdapterAsk)]),
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
        """The front with these parameters, over the benchmark's model and adapters."""
        total = sum(one.bytes for one in self.known.values())
        config = modelconfig.read(Path("model_repository") / MODEL / "config.pbtxt")
        stated = {
            "checkpoint": str(self.model.resolve()),
            "checkpoint_sha256": open_checkpoint(self.model).sha256,
            "precision": self._precision,
            "kernel_cache": str(Path("build/kernels").resolve()),
            "max_concurrency": str(SLOTS),
            "max_length": str(MAX_LENGTH),
            "adapters_dir": str(self.files.resolve()),
            "max_rank": str(max(RANKS)),
            "starter_dir": "",
            "adapter_mb": str(int(CACHE_SHARE * total / 2**20)),
            "recluster_s": "60",
            **parameters,
        }
        for field, value in stated.items():
            modelconfig.set_parameter(config, field, value)
        config.name = folder.name
        (folder / "1").mkdir(parents=True)
        modelconfig.write(config, folder / "config.pbtxt")


def _counted(system: Served) -> dict[str, float]:
    """The cache's counters, once what has just happened is in them."""
    time.sleep(_SETTLE_S)
    samples = scrape(system.metrics_url, timeout_s=5.0)
    found = dict.fromkeys(_COUNTED, 0.0)
    for (name, labels), value in samples.items():
        for key, full in _COUNTED.items():
            if name == full and ("model", system.model) in labels:
                found[key] += value
    return found
