"""What is sent to each front, and the section of a scenario that follows from what it reports."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2

from bench.adapter_cache import random_adapters
from bench.adapter_cache.server import AdapterRequest, AdapterStreams
from bench.cascade import zoo
from bench.common.models import write_front
from bench.common.output import BUILD, FOLDER, empty
from bench.fidelity import calibration
from bench.fidelity.calibration import Counted
from bench.fused_decode.loads import Load as DecodeLoad
from bench.peers.protocol import DecodeRequest
from bench.polymorph.traces import planned as planned_texts
from bench.token_adapt.cells import NEVER_RUN
from bench.token_adapt.cells import read as read_image
from client.open_loop import PlannedRequest, replay
from shapeshift.adapter_cache.policy.scheduling import AdapterInfo
from shapeshift.cascade import candidates
from shapeshift.engines import manifest
from shapeshift.engines.hardware import cores
from shapeshift.fused_decode.interfaces import BLOCK_TOKENS
from shapeshift.fused_decode.settings import FusedDecodeSettings
from shapeshift.serving import events
from shapeshift.serving.events import RingReader
from shapeshift.settings import require
from shapeshift.triton import model_config
from shapeshift.triton.embedded.server import TritonServer
from shapeshift.triton.metrics import scrape
from shapeshift.workloads import adapters
from shapeshift.workloads.load import Load
from shapeshift.workloads.trace import Trace

WORK = FOLDER / "fidelity"
REPOSITORY = BUILD / "fidelity"
"""As deep in the build folder as the built fronts, whose paths are relative."""
Sections = Mapping[str, Mapping[str, object]]
Times = NDArray[np.float64]
_TIMEOUT_S = 120.0
_SETTLE_S = 1.5
"""Until a process has exported what it counted."""
_IMAGE_MS = 1500.0
_ADAPTERS, _CACHED = 20, 0.4
"""Adapters of a generator, and the share of their bytes that its cache holds."""
_TARGETS = ("q_proj", "o_proj")
# Of prompts: words, and none that a tokenizer adds.
_FIRST_ID, _LAST_ID = 1000, 40000


@dataclass(frozen=True)
class Sent:
    """A trace that was served. first_ms, last_ms: until the first and the last part of each answer, nan without one.

    events: of the front's process meanwhile. answers: serialised. counted: of a decode loop.
    """

    trace: Trace
    first_ms: Times
    last_ms: Times
    events: Sequence[events.Event] = ()
    answers: Sequence[bytes | None] = ()
    counted: Counted | None = None

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The events of one kind."""
        return [event.values for event in self.events if event.kind == kind]


@dataclass(frozen=True)
class Calibration:
    """alone: requests of which none waits for another; loads: all that was sent, the one like the trace last."""

    alone: Sent
    loads: Sequence[Sent]


class Front(Protocol):
    """A front of the server, and the model that serves it.

    figures: those compared, as prefixes of the simulation's. mixes: kinds of requests, which separate its times.
    """

    name: str
    model: str
    figures: Sequence[str]
    mixes: int

    def draw(self, rate: float, seconds: float, seed: int, kind: int = 0) -> Trace:
        """Poisson arrivals. kind: of several mixes of requests, 0 for that of the comparison."""
        ...

    def send(self, server: TritonServer, trace: Trace) -> Sent:
        """Serve a trace."""
        ...

    def sections(self, calibrated: Calibration) -> Sections:
        """Of the scenario. Writes files that it names to `WORK`."""
        ...


class Unary:
    """A front of plain requests."""

    figures: Sequence[str] = ("",)
    mixes = 1
    outputs: ClassVar[Sequence[str]] = ()

    def __init__(self, name: str) -> None:
        self.name = self.model = name

    def planned(self, trace: Trace) -> list[PlannedRequest]:
        """The requests of a trace."""
        raise NotImplementedError

    def send(self, server: TritonServer, trace: Trace) -> Sent:
        """See `Front`."""
        began = time.monotonic()
        report = asyncio.run(
            replay(
                server.grpc_url,
                self.name,
                self.planned(trace),
                outputs=self.outputs,
                timeout_s=_TIMEOUT_S,
                warmup=0,
                keep_answers=True,
            )
        )
        latency_ms = np.where(report.ok, report.latency_s * 1e3, np.nan)
        return Sent(trace, latency_ms, latency_ms, _events(server, self.model, began), report.answers)


class Texts(Unary):
    """`encode`, in its own process."""

    def draw(self, rate: float, seconds: float, seed: int, kind: int = 0) -> Trace:
        return Load("poisson", rate, seconds, max_length=512).draw(seed)

    def planned(self, trace: Trace) -> list[PlannedRequest]:
        return planned_texts(trace, 0)

    def sections(self, calibrated: Calibration) -> Sections:
        config = model_config.read(BUILD / "repository" / self.name / "config.pbtxt")
        profile = json.loads(model_config.parameters(config)["profile"])
        packs = calibrated.loads[-1].of("pack")
        model_config.set_parameter(config, "profile", json.dumps(calibration.text_profile(profile, packs)))
        model_config.write(config, WORK / f"{self.name}.pbtxt")
        front = {"profile": f"{self.name}.pbtxt", "engine_threads": cores()}
        return {"polymorph": front, "sidecar": {"overhead_ms": _beside(calibrated.alone, "pack")}}


class Images(Unary):
    """`classify_image`, by its default task."""

    outputs = ("GAMMA", "BATCH_SIZE", "OUTCOME")

    def draw(self, rate: float, seconds: float, seed: int, kind: int = 0) -> Trace:
        return Load("poisson", rate, seconds, lengths="1", latency_ms=_IMAGE_MS).draw(seed)

    def planned(self, trace: Trace) -> list[PlannedRequest]:
        image = {"PIXELS": np.random.default_rng(0).integers(0, 256, (1, 4, 4, 3), np.uint8)}
        parameters = {"latency_ms": _IMAGE_MS}
        return [PlannedRequest(at, image, parameters) for at in trace.at_s.tolist()]

    def send(self, server: TritonServer, trace: Trace) -> Sent:
        sent = super().send(server, trace)
        ran = np.array([read_image(answer)[0] != NEVER_RUN for answer in sent.answers])
        latency_ms = np.where(ran, sent.last_ms, np.nan)
        return replace(sent, first_ms=latency_ms, last_ms=latency_ms)

    def sections(self, calibrated: Calibration) -> Sections:
        config = model_config.parameters(model_config.read(BUILD / "repository" / self.name / "config.pbtxt"))
        batches = [one for sent in calibrated.loads for one in sent.of("batch")]
        file, task = WORK / f"{self.name}.json", config["task"]
        profiles = calibration.image_profile(json.loads(config["profile"]), batches)
        file.write_text(json.dumps({"profiles": profiles}))
        registry = BUILD / "tasks" / self.name
        folder = registry / json.loads((registry / "registry.json").read_text())["entries"][task]["folder"]
        accuracy = json.loads((folder / "profile.json").read_text())["accuracy"]
        front = {"profile": file.name, "task": task, "overhead_ms": _beside(calibrated.alone, "batch")}
        return {"token_adapt": front, f"tasks.{task}": accuracy}


class Cascade(Unary):
    """`classify_text`: texts of its data set."""

    outputs = ("LEVEL", "ENGINE_MS")

    def draw(self, rate: float, seconds: float, seed: int, kind: int = 0) -> Trace:
        return Load("poisson", rate, seconds).draw(seed)

    def planned(self, trace: Trace) -> list[PlannedRequest]:
        texts = zoo.texts_to_test(zoo.DEMO).texts
        chosen = _contents(trace).integers(len(texts), size=len(trace)).tolist()
        inputs = [{"TEXT": np.array([[texts[one][0]]], dtype=np.object_)} for one in chosen]
        return [PlannedRequest(at, one) for at, one in zip(trace.at_s.tolist(), inputs, strict=True)]

    def sections(self, calibrated: Calibration) -> Sections:
        folder = BUILD / "repository" / self.name
        config = model_config.parameters(model_config.read(folder / "config.pbtxt"))
        serving = candidates.serving(folder / config["candidates_dir"], config["task"])
        first_ms = float(np.mean([one["ms"] for one in calibrated.loads[-1].of("pack")]))
        level, engine_ms = (_column(calibrated.loads[-1], *one) for one in (("LEVEL", "i4"), ("ENGINE_MS", "f4")))
        later_ms, *_ = calibration.level_times(calibrated.loads[-1].last_ms, engine_ms, level)
        level, engine_ms = (_column(calibrated.alone, *one) for one in (("LEVEL", "i4"), ("ENGINE_MS", "f4")))
        _, overhead_ms, hop_ms = calibration.level_times(calibrated.alone.last_ms, engine_ms, level)
        file = WORK / f"{self.name}.json"
        name = serving.candidate.name
        table = calibration.cascade_table(json.loads(serving.table.as_json()), name, (first_ms, later_ms))
        file.write_text(json.dumps(table))
        times = {"control_ms": 0.0, "overhead_ms": overhead_ms, "hop_ms": hop_ms}
        threads = {"engine_threads": cores(), "instances": cores()}
        return {"cascade": {"candidates": file.name, "candidate": name, **threads, **times}}


class _Streams(AdapterStreams):
    """Prompts as tokens, so that their number is known."""

    def _inputs(self, request: DecodeRequest) -> dict[str, Any]:
        prompt = np.array(request.prompt, np.int32)
        inputs = {**super()._inputs(request), "input_ids": prompt}
        del inputs["text_input"]
        return inputs


@dataclass
class Generator:
    """A model that generates. is_adapted: with adapters of random weights, of which the cache holds a part."""

    name: str
    is_adapted: bool = False
    figures: Sequence[str] = ("first ", "last ")
    mixes: int = 3
    parameters: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        # A cache of another size makes it another model.
        self.model = f"{self.name}_cached" if self.is_adapted else self.name
        folder = BUILD / "repository" / self.name
        config = model_config.parameters(model_config.read(folder / "config.pbtxt"))
        self.checkpoint = (folder / config["checkpoint"]).resolve()
        self.ranks = adapters.ranks(_ADAPTERS) if self.is_adapted else {}
        self.rank_bytes = random_adapters.bytes_per_rank(self.checkpoint)
        if self.is_adapted:
            infos = {name: AdapterInfo(name, rank, rank * self.rank_bytes) for name, rank in self.ranks.items()}
            files = random_adapters.ensure(WORK / "adapters", self.checkpoint, infos, _TARGETS)
            cached = int(_CACHED * sum(info.bytes for info in infos.values()) / 2**20)
            config |= {"adapters_dir": str(files.resolve()), "starter_dir": "", "adapter_mb": str(cached)}
            config |= {"max_rank": str(max(adapters.RANKS))}
            empty(REPOSITORY)
            shutil.copytree(folder, REPOSITORY / self.model)
            write_front(folder, REPOSITORY / self.model, config)
        self.parameters = config

    def draw(self, rate: float, seconds: float, seed: int, kind: int = 0) -> Trace:
        """Prompts and answers of a mix: even, of long answers, of long prompts."""
        prompts, answers = (((8, 48), (4, 17)), ((8, 16), (16, 33)), ((48, 121), (1, 5)))[kind]
        rng = np.random.default_rng((seed, kind))
        drawn = Load("poisson", rate, seconds, lengths="1", adapters=len(self.ranks)).draw(rng)
        length, output_length = (rng.integers(*between, size=len(drawn)) for between in (prompts, answers))
        return replace(drawn, length=length, output_length=output_length)

    def send(self, server: TritonServer, trace: Trace) -> Sent:
        """See `Front`."""
        rng = _contents(trace)
        columns = (trace.at_s, trace.length, trace.output_length, trace.lora_name)
        requests = [
            AdapterRequest(at, rng.integers(_FIRST_ID, _LAST_ID, prompt).tolist(), answer, name or None)
            for at, prompt, answer, name in zip(*(column.tolist() for column in columns), strict=True)
        ]
        streams = _Streams(server.grpc_url, server.metrics_url, self.model, self.checkpoint / "tokenizer.json")
        before, began = self._page(server), time.monotonic()
        answers = streams.replay(DecodeLoad("", [*requests]))
        time.sleep(_SETTLE_S)
        after = self._page(server)
        named = ("iteration_ms_count", "iteration_ms_sum", "generated_tokens_total", "prompt_tokens_total")
        iterations, ms, rows, read = (after.get(name, 0.0) - before.get(name, 0.0) for name in named)
        ranks = sum(self.ranks.get(one.adapter or "", 0) * one.new_tokens for one in requests)
        times = (answers.first_s, answers.last_s)
        first_ms, last_ms = ((one - answers.arrived_s) * 1e3 for one in times)
        return Sent(
            trace, first_ms, last_ms, _events(server, self.model, began), (), Counted(iterations, ms, rows, read, ranks)
        )

    def _page(self, server: TritonServer) -> dict[str, float]:
        samples = scrape(server.metrics_url, timeout_s=5.0)
        page = {name: value for (name, labels), value in samples.items() if ("model", self.model) in labels}
        return {name.removeprefix("shapeshift_"): value for name, value in page.items()}

    def sections(self, calibrated: Calibration) -> Sections:
        counted = [sent.counted for sent in (calibrated.alone, *calibrated.loads) if sent.counted is not None]
        times: dict[str, object] = {**calibration.iteration_times(counted)}
        assert calibrated.alone.counted is not None
        # The last tokens come after all iterations.
        beside_ms = (float(calibrated.alone.last_ms.sum()) - calibrated.alone.counted.ms) / len(calibrated.alone.trace)
        times["overhead_ms"] = max(0.0, beside_ms)
        times["slots"] = int(self.parameters["max_concurrency"])
        times["prefill_tokens"] = int(self.parameters.get("prefill_tokens", FusedDecodeSettings.prefill_tokens))
        if not self.is_adapted:
            return {"fused_decode": times}
        loads = [one for sent in calibrated.loads for one in sent.of("load")]
        require(bool(loads), "loads", len(loads), "at least one: the cache holds a part of the adapters")
        tokens = int(self.parameters["kv_cache_tokens"])
        token_bytes = int(json.loads(self.parameters["device_memory"])["KV"] * 2**20 / tokens)
        adapter_mb = int(self.parameters["adapter_mb"])
        memory = {
            "load_bytes_s": sum(one["bytes"] for one in loads) / sum(one["ms"] for one in loads) * 1e3,
            "pool_bytes": tokens * token_bytes + adapter_mb * 2**20,
            "token_bytes": token_bytes,
            "slot_tokens": BLOCK_TOKENS,
            "rank_bytes": self.rank_bytes,
            "adapter_mb": adapter_mb,
            "max_rank": max(adapters.RANKS),
        }
        return {"adapter_cache": {**times, **memory}}


def _contents(trace: Trace) -> np.random.Generator:
    """Of the contents of requests: other ones for each trace, so that no cache has them."""
    return np.random.default_rng((len(trace), int(trace.length.sum())))


def _events(server: TritonServer, model: str, since: float) -> list[events.Event]:
    """What the processes of a model recorded since then."""
    folder, recorded = server.settings.run_directory / "events", list[events.Event]()
    for file in folder.glob(f"{model}.*{events.SUFFIX}"):
        reader = RingReader(file)
        recorded += [event for event in reader.read() if event.at >= since]
        reader.close()
    return recorded


def _beside(alone: Sent, kind: str) -> float:
    """Time of requests that wait for nothing, beside the calls for them; ms."""
    calls = [float(one["ms"]) for one in alone.of(kind)]
    return max(0.0, float(np.nanmean(alone.last_ms)) - sum(calls) / max(1, len(calls)))


def _column(sent: Sent, name: str, kind: str) -> NDArray[Any]:
    """An output of one number, of each request."""
    values = []
    for answer in sent.answers:
        assert answer is not None, "a request has failed"
        message = service_pb2.ModelInferResponse.FromString(answer)
        place = [output.name for output in message.outputs].index(name)
        values.append(np.frombuffer(message.raw_output_contents[place], kind)[0])
    return np.array(values)


def every() -> list[Front]:
    """All fronts."""
    return [
        Texts("encode"),
        Images("classify_image"),
        Cascade("classify_text"),
        Generator("generate"),
        Generator("generate_lora", is_adapted=True),
    ]


def models(fronts: Sequence[Front]) -> dict[str, int]:
    """The models to load, and how many engines each has."""
    names = [front.model for front in fronts]
    names += [zoo.FRONTS[-1]] if "classify_text" in names else []
    # The others do not say how many they have loaded.
    counted = ("encode", zoo.FRONTS[-1])
    return {name: len(manifest.load(BUILD / "engines" / name).engines) if name in counted else 0 for name in names}
