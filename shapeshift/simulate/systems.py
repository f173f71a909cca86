"""The systems that a scenario may name: a front of each technique, with its parameters of config.pbtxt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from shapeshift import settings
from shapeshift.adapter_cache.policy.length_prediction import LengthPredictor, Oracle, RunningMean
from shapeshift.adapter_cache.policy.scheduling import AdapterInfo
from shapeshift.adapter_cache.settings import SCHEDULERS, AdapterCacheSettings
from shapeshift.engines.manifest import Manifest
from shapeshift.errors import InvalidInputError
from shapeshift.polymorph.router.placement import queues
from shapeshift.polymorph.settings import MAX_WORKERS, PlacementSettings, PolymorphSettings
from shapeshift.settings import require
from shapeshift.sidecar.front_config import Front
from shapeshift.simulate import adapter_cache, profile, token_adapt
from shapeshift.simulate.adapter_cache import Machine, SimulatedRequest
from shapeshift.simulate.adapter_pool import CacheOptions
from shapeshift.simulate.events import Progress
from shapeshift.simulate.outcome import Outcome, in_time, latencies, shares, timeliness
from shapeshift.simulate.planner import Pace, Planner, Served
from shapeshift.simulate.polymorph import OUTCOMES
from shapeshift.token_adapt.policy.costs import Costs, GammaProfile, efficient_batch_size
from shapeshift.token_adapt.settings import TokenAdaptSettings
from shapeshift.triton import model_config
from shapeshift.workloads import adapters
from shapeshift.workloads.trace import Trace

MOST_WORKERS = 10_000
"""Of a node of a simulated front; more than `MAX_WORKERS` are spread over several."""
_MOST_IMAGES, _THROUGHPUT_SHARE = 64, 0.9


@dataclass(frozen=True)
class TextEngines:
    """The engines of a simulated front of texts.

    profile  a file of `profiles/`, {lengths, latency_ms}, or the generated config.pbtxt of a front, whose parameters
             are then the defaults of this section
    bins     longest texts of the static engines, separated by commas; a config.pbtxt has its own
    dynamic  whether there is an engine for any length beside them
    packing  whether texts share a call
    slower   factor on all latencies
    nodes    machines that have the front, each with `workers`
    """

    profile: str
    bins: str = ""
    dynamic: bool = True
    packing: bool = True
    slower: float = 1.0
    nodes: int = 1

    def __post_init__(self) -> None:
        require(bool(self.profile), "profile", self.profile, "a file of latencies")
        require(self.slower > 0, "slower", self.slower, "above 0")
        require(1 <= self.nodes <= 1000, "nodes", self.nodes, "1 to 1000")

    def edges(self) -> list[int]:
        """The bins. Raises InvalidInputError."""
        try:
            edges = [int(part) for part in self.bins.split(",") if part.strip()]
        except ValueError:
            edges = [0]
        ascend = all(low < high for low, high in zip([0, *edges], edges, strict=False))
        require(ascend, "bins", self.bins, "whole numbers of tokens, ascending, separated by commas")
        return edges


@dataclass(frozen=True)
class TextSystem:
    """A front of texts, its workers and its sidecar."""

    SETTINGS: ClassVar[Sequence[type]] = (TextEngines, PolymorphSettings)

    parameters: Mapping[str, str]
    engines: Manifest
    edges: Sequence[int]
    nodes: int
    pace: Pace

    @classmethod
    def read(cls, values: Mapping[str, str]) -> TextSystem:
        """Raises InvalidInputError naming a field."""
        engine_options = settings.read(TextEngines, values)
        parameters = {name: text for name, text in values.items() if name in settings.names(PolymorphSettings)}
        file, edges = Path(engine_options.profile), engine_options.edges()
        if file.suffix == ".pbtxt":
            config = model_config.parameters(model_config.read(file))
            allowed = "a config.pbtxt that `shapeshift engines` has written"
            require("profile" in config, "profile", engine_options.profile, allowed)
            measured = profile.parse(config["profile"], engine_options.profile)
            parameters = {name: config[name] for name in settings.names(PolymorphSettings) & config.keys()} | parameters
            edges = edges or settings.read(PlacementSettings, config).edges()
            edges = edges or profile.lengths(measured)
        else:
            measured = profile.read(file)
        engines = profile.engines(
            measured, edges, engine_options.dynamic, engine_options.packing, engine_options.slower
        )
        system = cls(
            parameters, engines, edges or [engines.max_tokens], engine_options.nodes, settings.read(Pace, values)
        )
        system.front([1.0] * len(system.edges))
        return system

    def with_parameters(self, changed: Mapping[str, str]) -> TextSystem:
        """The same engines, with other parameters of the front."""
        return replace(self, parameters={**self.parameters, **changed})

    def front(self, weights: Sequence[float], workers: int = 0) -> Front:
        """The front, with so many workers if given. weights: of the first plan. Raises InvalidInputError."""
        parameters: dict[str, object] = {"placement": "inline", **self.parameters}
        if not workers and (each := self._many()):
            workers = each * self.nodes
        if not workers:
            return profile.front(parameters, self.engines, self.edges, weights, self.nodes)
        # A front has at most so many on one machine.
        nodes = max(self.nodes, -(-workers // MAX_WORKERS))
        parameters |= dict.fromkeys(("workers", "min_workers", "max_workers"), -(-workers // nodes))
        front = profile.front(parameters, self.engines, self.edges, weights, nodes)
        return replace(front, workers=workers, min_workers=workers, max_workers=workers)

    def _many(self) -> int:
        """The workers of a node where they are more than a server may have, else 0. Raises InvalidInputError."""
        text = self.parameters.get("workers", "")
        count = int(text) if text.isdecimal() else 0
        if count <= MAX_WORKERS:
            return 0
        require(count <= MOST_WORKERS, "workers", count, f"at most {MOST_WORKERS}")
        for name in ("min_workers", "max_workers"):
            value = self.parameters.get(name, text)
            require(value == text, name, value, f"left out: more than {MAX_WORKERS} workers do not scale")
        return count

    def least_ms(self, lengths: NDArray[np.int64]) -> float:
        """Engine time of texts, if all calls were full. Raises InvalidInputError for a text that is too long."""
        self._check(lengths)
        _, times = queues(self.engines, self.front([1.0] * len(self.edges)).settings, self.edges)
        return float(np.array(times.rows[0])[lengths].sum())

    def planner(self, trace: Trace, workers: int = 0) -> Planner:
        """What serves a trace, by so many workers if given. Raises InvalidInputError for a text that is too long."""
        self._check(trace.length)
        front = self.front(profile.weights(self.edges, trace.length), workers)
        return Planner(front, self.engines, trace, self.pace)

    def run(self, trace: Trace, progress: Progress | None = None, workers: int = 0) -> Served:
        """Serve a trace. See `planner`."""
        return self.planner(trace, workers).run(progress)

    def _check(self, lengths: NDArray[np.int64]) -> None:
        longest = self.engines.max_tokens
        if (too_long := np.flatnonzero(lengths > longest)).size:
            row = int(too_long[0])
            allowed = f"at most {longest} tokens, the longest of the profile's bins; or set max_length in [load]"
            raise InvalidInputError(f"length of request {row + 1}", int(lengths[row]), allowed)

    def serve(self, trace: Trace, progress: Progress | None = None) -> Outcome:
        """See `scenario.System`."""
        served = self.run(trace, progress)
        slo_ms = float(self.parameters.get("slo_ms", 0.0))
        timely = in_time(served.latency_ms, trace, slo_ms)
        figures = {
            "requests": len(trace),
            **shares(served.outcome, OUTCOMES),
            **timeliness(timely, trace),
            **latencies(served.latency_ms),
            "workers": served.mean_workers,
        }
        return Outcome(figures, served.latency_ms, [(at, reason) for at, _, reason in served.plans])


@dataclass(frozen=True)
class ImageProfile:
    """The profile of a simulated image model: a file of `profiles/` with latencies by gamma. slower: factor on them.

    overhead_ms: of each image beside wait and batch: network, reading, answering.
    """

    profile: str
    slower: float = 1.0
    overhead_ms: float = 0.0


@dataclass(frozen=True)
class ImageSystem:
    """A front of images over one device. accuracy: by task and gamma."""

    SETTINGS: ClassVar[Sequence[type]] = (ImageProfile, TokenAdaptSettings)

    settings: TokenAdaptSettings
    profiles: Mapping[int, GammaProfile]
    accuracy: Mapping[str, Mapping[int, float]]
    overhead_ms: float = 0.0

    @classmethod
    def read(cls, values: Mapping[str, str], tasks: Mapping[str, Mapping[str, float]] | None = None) -> ImageSystem:
        """tasks: accuracies by task and gamma, in the place of the profile's. Raises InvalidInputError."""
        engine_options, serving = settings.read(ImageProfile, values), settings.read(TokenAdaptSettings, values)
        try:
            entries = json.loads(Path(engine_options.profile).read_text(encoding="utf-8"))["profiles"]
            profiles = {int(one["gamma"]): _gamma(one, engine_options.slower) for one in entries}
            accuracy: dict[str, dict[int, float]] = {}
            for one in entries if tasks is None else ():
                for task, share in one.get("accuracy", {}).items():
                    accuracy.setdefault(task, {})[int(one["gamma"])] = float(share)
            for task, shares_of in (tasks or {}).items():
                accuracy[task] = {int(gamma): float(share) for gamma, share in shares_of.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            allowed = f"a JSON file with profiles: gamma, latency_ms by images, memory_mb ({error!r})"
            raise InvalidInputError("profile", engine_options.profile, allowed) from None
        require(bool(accuracy), "tasks", "", "a section [tasks.NAME] with accuracies by gamma: the profile has none")
        for gamma in serving.gammas(tuple(profiles)):
            require(gamma in profiles, "use_gammas", gamma, f"gammas of the profile: {', '.join(map(str, profiles))}")
        require(engine_options.overhead_ms >= 0, "overhead_ms", engine_options.overhead_ms, "0 or more")
        return cls(serving, profiles, accuracy, engine_options.overhead_ms)

    def costs(self) -> Costs:
        """What batches cost."""
        gammas = self.settings.gammas(tuple(self.profiles))
        plain = min((self.profiles[gamma] for gamma in gammas), key=lambda one: abs(one.gamma))
        size = self.settings.batch_size or efficient_batch_size(plain, _MOST_IMAGES, _THROUGHPUT_SHARE)
        return Costs(self.profiles, gammas, size, float(self.settings.memory_mb or np.inf))

    def serve(self, trace: Trace, progress: Progress | None = None) -> Outcome:
        """See `scenario.System`."""
        require(bool((trace.latency_ms > 0).all()), "latency_ms", 0, "above 0 of each request: set it in [load]")
        costs = self.costs()
        rows = {task: [of.get(gamma, np.nan) for gamma in costs.gammas] for task, of in self.accuracy.items()}
        default = next(iter(self.accuracy)) if len(self.accuracy) == 1 else self.settings.task
        named = [task or default for task in trace.task.tolist()]
        for task in sorted({*named} - {*rows}):
            raise InvalidInputError("task", task, f"one of {', '.join(rows)}")
        accuracy = np.array([rows[task] for task in named])
        result = token_adapt.run(costs, self.settings, trace, accuracy, progress=progress)
        ran = result.gamma >= 0
        latency_ms = np.where(ran, result.done_ms - trace.at_s * 1e3 + self.overhead_ms, np.nan)
        figures = {
            "requests": len(trace),
            **shares(result.outcome, token_adapt.OUTCOMES),
            "utility": result.total_utility(trace, accuracy) / (float(trace.utility.sum()) or 1.0),
            **latencies(latency_ms),
            "mean gamma": float(np.array(costs.gammas)[result.gamma[ran]].mean()) if ran.any() else 0.0,
            "images a batch": float(np.mean(result.batch_sizes)) if result.batch_sizes else 0.0,
        }
        return Outcome(figures, latency_ms)


def _gamma(entry: Mapping[str, Any], slower: float) -> GammaProfile:
    latency_ms = {int(count): slower * float(ms) for count, ms in entry["latency_ms"].items()}
    return GammaProfile(int(entry["gamma"]), int(entry.get("tokens", 0)), latency_ms, float(entry["memory_mb"]))


@dataclass(frozen=True)
class AdapterLaw:
    """The adapters of a simulated generator. rank_bytes: of each rank of one; predictor: mean, or oracle:SHARE.

    overhead_ms: of each request beside wait and iterations: network, reading, answering. loaded: adapters that are in
    memory at the start, separated by commas.
    """

    rank_bytes: int = 2 * 2**20
    predictor: str = "mean"
    overhead_ms: float = 0.0
    loaded: str = ""


@dataclass(frozen=True)
class AdapterSystem:
    """A decode loop with adapters, whose iterations take a linear time (`adapter_cache.Machine`)."""

    SETTINGS: ClassVar[Sequence[type]] = (Machine, AdapterLaw, AdapterCacheSettings)

    machine: Machine
    law: AdapterLaw
    settings: AdapterCacheSettings
    is_cache_stated: bool

    @classmethod
    def read(cls, values: Mapping[str, str]) -> AdapterSystem:
        """Raises InvalidInputError naming a field."""
        machine, law = settings.read(Machine, values), settings.read(AdapterLaw, values)
        for name in [one.name for one in fields(Machine)]:
            require(0 <= getattr(machine, name) < np.inf, name, getattr(machine, name), "0 or more")
        for name in ("slots", "prefill_tokens", "base_s", "load_bytes_s", "pool_bytes", "token_bytes"):
            require(getattr(machine, name) > 0, name, getattr(machine, name), "above 0")
        require(law.rank_bytes > 0, "rank_bytes", law.rank_bytes, "above 0")
        require(law.overhead_ms >= 0, "overhead_ms", law.overhead_ms, "0 or more")
        system = cls(machine, law, settings.read(AdapterCacheSettings, values), "adapter_mb" in values)
        system.predictor()
        return system

    def predictor(self) -> LengthPredictor:
        """A new one."""
        kind, _, share = self.law.predictor.partition(":")
        if kind == "mean" and not share:
            return RunningMean()
        if kind == "oracle" and share.replace(".", "", 1).isdecimal() and float(share) <= 1:
            return Oracle(float(share))
        raise InvalidInputError("predictor", self.law.predictor, "mean, or oracle: and a share, such as oracle:0.8")

    def serve(self, trace: Trace, progress: Progress | None = None) -> Outcome:
        """See `scenario.System`."""
        require(bool((trace.output_length > 0).all()), "output_length", 0, "at least 1 of each request")
        most_tokens = max(self.machine.slot_tokens, int((trace.length + trace.output_length).max()))
        loaded = [name for name in self.law.loaded.split(",") if name]
        ranks = {**self._ranks(loaded, "loaded"), **self._ranks(trace.lora_name.tolist(), "lora_name")}
        infos = {name: AdapterInfo(name, rank, rank * self.law.rank_bytes) for name, rank in ranks.items()}
        largest = max((info.bytes for info in infos.values()), default=0)
        reserve_bytes = self.settings.adapter_mb * 2**20 if self.is_cache_stated else 0
        allowed = f"at least {-(-largest // 2**20)}, the largest adapter"
        require(largest <= (reserve_bytes or largest), "adapter_mb", self.settings.adapter_mb, allowed)
        needed = most_tokens * self.machine.token_bytes + max(largest, reserve_bytes)
        require(needed <= self.machine.pool_bytes, "pool_bytes", self.machine.pool_bytes, f"at least {needed}")
        options = CacheOptions(
            self.settings.eviction, self.settings.prefetch, reserve_bytes=reserve_bytes, loaded=loaded
        )
        columns = (trace.at_s, trace.lora_name, trace.length, trace.output_length)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        requests = [SimulatedRequest(at, name or None, prompt, answer) for at, name, prompt, answer in rows]
        scheduler = SCHEDULERS[self.settings.scheduler]
        result = adapter_cache.run(self.machine, infos, requests, scheduler, options, self.predictor(), progress)
        first_ms, last_ms = (times * 1e3 + self.law.overhead_ms for times in (result.first_s, result.last_s))
        timely = in_time(first_ms, trace)
        figures = {
            "requests": len(trace),
            **timeliness(timely, trace),
            **latencies(first_ms, "first "),
            **latencies(last_ms, "last "),
            "between p99 ms": float(np.percentile(result.between_s, 99)) * 1e3 if len(result.between_s) else 0.0,
            "hit ratio": result.hits / max(1, result.hits + result.misses),
            "MiB loaded a request": result.loaded_bytes / len(trace) / 2**20,
        }
        return Outcome(figures, first_ms)

    def _ranks(self, named: Sequence[str], field: str) -> dict[str, int]:
        """The rank of each adapter that is named: `r8-03` has rank 8."""
        ranks = {}
        for name in sorted({*named} - {""}):
            rank = name.partition("-")[0].removeprefix("r")
            is_named = rank.isdecimal() and 0 < int(rank) <= self.settings.max_rank
            most = self.settings.max_rank
            allowed = f"names that begin with their rank, such as r{adapters.RANKS[0]}-00, at most {most}"
            require(is_named, field, name, allowed)
            ranks[name] = int(rank)
        return ranks
