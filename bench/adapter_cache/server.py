"""The systems on the real server: a `generate_lora` model for each, and a gRPC stream for each request."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from bench.adapter_cache import random_adapters, report
from bench.adapter_cache.loads import Lengths, adapter_set, draw
from bench.adapter_cache.report import CACHE, DEFAULT, ORDER, PLAIN, QUEUES, AdapterRun
from bench.common.cells import Cells, Run
from bench.common.models import SHIPPED, generator, write_front
from bench.common.output import FOLDER, empty, table
from bench.common.server import loaded_server
from bench.fused_decode.loads import Load
from bench.fused_decode.served import TritonStreams
from bench.peers import random_llama
from bench.peers.protocol import DecodeRequest
from shapeshift.adapter_cache.settings import UNUSED
from shapeshift.triton.metrics import scrape
from shapeshift.workloads.adapters import RANKS

MODEL = "generate_lora"
SLOTS, MAX_LENGTH = 16, 320
SCALE = 1 / 16
"""Factor of the trace's lengths: the model is about sixty times smaller than the paper's, the machine even slower."""
CACHE_SHARE = 0.4
"""Share of the bytes of all adapters that the cache holds."""
_WARM = 60
"""Unmeasured requests that fill the caches, where draws are repeated."""
_SETTLE_S = 2.5
_COUNTED = tuple(f"shapeshift_adapter_{name}_total" for name in ("loaded_bytes", "hits", "misses"))

PARTS: dict[str, dict[str, str]] = {
    PLAIN: {"scheduler": "fifo", "eviction": UNUSED},
    CACHE: {"scheduler": "fifo"},
    ORDER: {"eviction": UNUSED},
    DEFAULT: {},
    QUEUES: {"scheduler": "chameleon"},
}


@dataclass(frozen=True)
class AdapterRequest(DecodeRequest):
    """A request for an adapter."""

    adapter: str | None = None


class AdapterStreams(TritonStreams):
    """Streams of requests for adapters to a model, whose counters are at `metrics_url`."""

    def __init__(self, url: str, metrics_url: str, model: str, tokenizer: Path) -> None:
        super().__init__(url, model, tokenizer)
        self._metrics_url = metrics_url

    def run(self, load: Load) -> AdapterRun:
        """Run the system under `load`."""
        before = self._counted()
        answers = self.replay(load)
        loaded_bytes, hits, misses = (after - one for after, one in zip(self._counted(), before, strict=True))
        return AdapterRun(
            answers.first_s - answers.arrived_s,
            answers.last_s - answers.arrived_s,
            answers.between_s,
            loaded_bytes,
            hits,
            misses,
            answers.span_s,
        )

    def _parameters(self, request: DecodeRequest) -> dict[str, str]:
        adapter = request.adapter if isinstance(request, AdapterRequest) else None
        return {} if adapter is None else {"lora_name": adapter}

    def _counted(self) -> list[float]:
        """The cache's counters, after they are exported."""
        time.sleep(_SETTLE_S)
        samples = scrape(self._metrics_url, timeout_s=5.0)
        page = {name: value for (name, labels), value in samples.items() if ("model", self._model) in labels}
        return [page.get(name, 0.0) for name in _COUNTED]


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
        with self.serving([PLAIN]) as served:
            return report.served_per_s([served[PLAIN].run(self.load(1e6, count, 10**6))])

    def measure(
        self, systems: Sequence[str], load: str, rate: float, draws: int, repeats: int, count: int, seed: int
    ) -> Cells[AdapterRun]:
        """Runs of the systems, of PARTS, in one server, under `draws` of `count` requests, each repeated.

        If the machine is fast at one time and slow at another, all systems are affected alike. A draw repeats only
        after all others, so that the caches have changed by then.
        """
        cells = Cells(_figures, seed)
        drawn = {f"{load}, draw {number}": self.load(rate, count, seed, number, 2) for number in range(draws)}
        with self.serving(systems) as served:
            for streams in served.values() if repeats > 1 else ():
                streams.replay(self.load(1e6, _WARM, seed, draws, 2))
            for _ in range(repeats):
                for name, one in drawn.items():
                    cells.measure(name, {system: partial(served[system].run, one) for system in systems})
        return cells

    def load(self, rate: float, count: int, *seed: int) -> Load:
        """Poisson arrivals of `count` requests, `rate` a second."""
        rng = np.random.default_rng(seed)
        requests = draw(self.lengths, len(self.adapters), rate, count, rng)
        prompts = [rng.choice(self._words, request.prompt_tokens).tolist() for request in requests]
        rows = zip(requests, prompts, strict=True)
        return Load(
            "",
            [AdapterRequest(request.at_s, prompt, request.answer_tokens, request.adapter) for request, prompt in rows],
        )

    @contextmanager
    def serving(self, systems: Sequence[str]) -> Iterator[dict[str, AdapterStreams]]:
        """One server with a model, and so a process, for each of `systems`, after a short warm-up."""
        repository, tokenizer = FOLDER / "adapter-repository", self.model / "tokenizer.json"
        empty(repository)
        models = {name: f"{MODEL}_{at}" for at, name in enumerate(systems)}
        for name, model in models.items():
            self._publish(repository / model, PARTS[name])
        with loaded_server(dict.fromkeys(models.values(), 0), (repository,)) as server:
            served = {
                name: AdapterStreams(server.grpc_url, server.metrics_url, model, tokenizer)
                for name, model in models.items()
            }
            for streams in served.values():
                streams.replay(self.load(1e6, 8, 10**7))
            yield served

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


def _figures(run: Run[AdapterRun]) -> dict[str, float]:
    return {"first_p99_ms": report.first_ms([run.result], 99)}


def tables(cells: Cells[AdapterRun]) -> str:
    """All runs; of repeated ones the median of each request; ours over PLAIN; and draw by draw."""
    draws, names = cells.loads, cells.systems(cells.loads[0])
    results = {name: [[run.result for run in cells.runs[draw, name]] for draw in draws] for name in names}
    medians = {name: [report.typical(of_draw) for of_draw in results[name]] for name in names}
    title = f"{draws[0].partition(',')[0]}, draws: {len(draws)}"
    shown = [report.systems_table(title, every(cells))]
    if len(results[names[0]][0]) > 1:
        shown.append(report.systems_table("the median of each request", medians))
    for name in [name for name in (DEFAULT, QUEUES) if name in names]:
        shown.append(table(f"{name} over {PLAIN}", report.ratios(medians[name], medians[PLAIN])))
    p99 = {name: [report.first_ms([run], 99) for run in medians[name]] for name in names}
    by_draw = np.divide(p99[DEFAULT], p99[PLAIN])
    rows = [
        {"draw": str(number), **{name: p99[name][number] for name in names}, f"{DEFAULT} over {PLAIN}": ratio}
        for number, ratio in enumerate(by_draw.tolist())
    ]
    shown.append(table("draw by draw, p99 of the first token, ms", rows))
    value, low, high = report.geometric_mean(by_draw)
    shown.append(f"  geometric mean of the draws' ratios {value:.2f}  ({low:.2f} to {high:.2f})")
    foreign = max(run.foreign for runs in cells.runs.values() for run in runs)
    return "\n".join([*shown, f"  other processes used at most {foreign:.2f} cores"])


def every(cells: Cells[AdapterRun]) -> dict[str, report.Runs]:
    """All runs of each system."""
    names = cells.systems(cells.loads[0])
    return {name: [run.result for draw in cells.loads for run in cells.runs[draw, name]] for name in names}
