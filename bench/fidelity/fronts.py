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
from shapeshift.engines.text.tokenizer import FILE_NAME, TextTokenizer
from shapeshift.fused_decode.interfaces import BLOCK_TOKENS
from shapeshift.fused_decode.settings import FusedDecodeSettings
from shapeshift.serving.events import SUFFIX, Event, RingReader
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
_ADAPTERS, _CACHED, _KV_TOKENS = 20, 0.4, 2048
"""Adapters of a generator, the share of their bytes that its memory holds where no text is, and tokens of all texts."""
_TARGETS = ("q_proj", "o_proj")
# Of prompts: words, and none that a tokenizer adds.
_FIRST_ID, _LAST_ID = 1000, 40000


@dataclass(frozen=True)
class Sent:
    """A trace that was served. first_ms, last_ms: until the first and the last part of each answer, nan without one.

    events: of the front's process meanwhile; later: of that of a cascade's second level. answers: serialised. counted:
    of a decode loop; loaded: adapters that were in memory before.
    """

    trace: Trace
    first_ms: Times
    last_ms: Times
    events: Sequence[Event] = ()
    later: Sequence[Event] = ()
    answers: Sequence[bytes | None] = ()
    counted: Counted | None = None
    loaded: Sequence[str] = ()

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The events of one kind."""
        return [event.values for event in self.events if event.kind == kind]

    def of_figure(self, what: str) -> Times:
        """The times of one of `Front.figures`."""
        return self.last_ms if what == "last " else self.first_ms


@dataclass(frozen=True)
class Calibration:
    """alone: requests of which none waits for another; like: traces that are like the one of the comparison; loads: all
    that was sent but `alone`."""

    alone: Sent
    like: Sequence[Sent]
    loads: Sequence[Sent]

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The events of one kind in `like`."""
        return [values for sent in self.like for values in sent.of(kind)]


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
        """Of the scenario, but for the time beside all that is simulated. Writes files that it names to `WORK`."""
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
        return Sent(trace, latency_ms, latency_ms, _events(server, self.model, began), answers=report.answers)


class Texts(Unary):
    """`encode`, in its own process."""

    def draw(self, rate: float, seconds: float, seed: int, kind: int = 0) -> Trace:
        return Load("poisson", rate, seconds, max_length=512).draw(seed)

    def planned(self, trace: Trace) -> list[PlannedRequest]:
        return planned_texts(trace, 0)

    def sections(self, calibrated: Calibration) -> Sections:
        config = model_config.read(BUILD / "repository" / self.name / "config.pbtxt")
        profile = json.loads(model_config.parameters(config)["profile"])
        profile = calibration.text_profile(profile, calibrated.of("pack"))
        model_config.set_parameter(config, "profile", json.dumps(profile))
        model_config.write(config, WORK / f"{self.name}.pbtxt")
        return {"polymorph": {"profile": f"{self.name}.pbtxt"}, "sidecar": {}}


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
        return {"token_adapt": {"profile": file.name, "task": task}, f"tasks.{task}": accuracy}


class Cascade(Unary):
    """`classify_text`: texts of its data set."""

    outputs = ("LEVEL", "ENGINE_MS")

    def __init__(self, name: str) -> None:
        super().__init__(name)
        folder = BUILD / "engines" / zoo.FRONTS[0]
        self._texts = [text for (text,) in zoo.texts_to_test(zoo.DEMO).texts]
        tokenizer = TextTokenizer(folder / FILE_NAME, manifest.load(folder).max_tokens)
        self._lengths = np.array([len(tokenizer.encode(text, truncate=True)) for text in self._texts])

    def draw(self, rate: float, seconds: float, seed: int, kind: int = 0) -> Trace:
        drawn = Load("poisson", rate, seconds).draw(seed)
        return replace(drawn, length=np.random.default_rng(seed).choice(self._lengths, len(drawn)))

    def planned(self, trace: Trace) -> list[PlannedRequest]:
        rng, requests = _contents(trace), []
        of_length = {length: np.flatnonzero(self._lengths == length) for length in {*self._lengths.tolist()}}
        for at, length in zip(trace.at_s.tolist(), trace.length.tolist(), strict=True):
            text = self._texts[int(rng.choice(of_length[length]))]
            requests.append(PlannedRequest(at, {"TEXT": np.array([[text]], dtype=np.object_)}))
        return requests

    def send(self, server: TritonServer, trace: Trace) -> Sent:
        began = time.monotonic()
        sent = super().send(server, trace)
        return replace(sent, later=_events(server, zoo.FRONTS[1], began))

    def sections(self, calibrated: Calibration) -> Sections:
        folder = BUILD / "repository"
        config = model_config.parameters(model_config.read(folder / self.name / "config.pbtxt"))
        serving = candidates.serving(folder / self.name / config["candidates_dir"], config["task"])
        (WORK / f"{self.name}.json").write_text(serving.table.as_json())
        later = [event.values for sent in calibrated.like for event in sent.later if event.kind == "pack"]
        for model, packs in zip(zoo.FRONTS, (calibrated.of("pack"), later), strict=True):
            config = model_config.parameters(model_config.read(folder / model / "config.pbtxt"))
            profile = calibration.text_profile(json.loads(config["profile"]), packs)
            (WORK / f"{model}.json").write_text(json.dumps(profile))
        level, engine_ms = (_column(calibrated.alone, *one) for one in (("LEVEL", "i4"), ("ENGINE_MS", "f4")))
        _, hop_ms = calibration.level_times(calibrated.alone.last_ms, engine_ms, level)
        named = {"candidates": f"{self.name}.json", "candidate": serving.candidate.name}
        profiles = [f"{model}.json" for model in zoo.FRONTS]
        return {"cascade": {**named, "profiles": profiles, "control_ms": 0.0, "hop_ms": hop_ms}}


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
        kv_mb = json.loads(config["device_memory"])["KV"]
        self.token_bytes = int(kv_mb * 2**20 / int(config["kv_cache_tokens"]))
        self.checkpoint = (folder / config["checkpoint"]).resolve()
        self.ranks = adapters.ranks(_ADAPTERS) if self.is_adapted else {}
        self.rank_bytes = random_adapters.bytes_per_rank(self.checkpoint)
        if self.is_adapted:
            infos = {name: AdapterInfo(name, rank, rank * self.rank_bytes) for name, rank in self.ranks.items()}
            files = random_adapters.ensure(WORK / "adapters", self.checkpoint, infos, _TARGETS)
            held, sizes = _KV_TOKENS * self.token_bytes, [info.bytes for info in infos.values()]
            # Beside it adapters are held where no text is.
            reserve_mb = -(-max(*sizes, int(_CACHED * sum(sizes)) - held) // 2**20)
            config |= {"adapters_dir": str(files.resolve()), "starter_dir": "", "adapter_mb": str(reserve_mb)}
            config |= {"max_rank": str(max(adapters.RANKS)), "kv_cache_tokens": str(_KV_TOKENS)}
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
        loaded = list[str]()
        for event in _events(server, self.model, 0.0):
            if event.kind == "load":
                loaded.append(event.values["adapter"])
            elif event.kind == "evict":
                loaded.remove(event.values["adapter"])
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
            trace,
            first_ms,
            last_ms,
            _events(server, self.model, began),
            counted=Counted(iterations, ms, rows, read, ranks),
            loaded=loaded,
        )

    def _page(self, server: TritonServer) -> dict[str, float]:
        samples = scrape(server.metrics_url, timeout_s=5.0)
        page = {name: value for (name, labels), value in samples.items() if ("model", self.model) in labels}
        return {name.removeprefix("shapeshift_"): value for name, value in page.items()}

    def sections(self, calibrated: Calibration) -> Sections:
        counted = [sent.counted for sent in (calibrated.alone, *calibrated.loads) if sent.counted is not None]
        times: dict[str, object] = {**calibration.iteration_times(counted)}
        times["slots"] = int(self.parameters["max_concurrency"])
        times["prefill_tokens"] = int(self.parameters.get("prefill_tokens", FusedDecodeSettings.prefill_tokens))
        if not self.is_adapted:
            return {"fused_decode": times}
        loads = [one for sent in calibrated.loads for one in sent.of("load")]
        require(bool(loads), "loads", len(loads), "at least one: the cache holds a part of the adapters")
        adapter_mb = int(self.parameters["adapter_mb"])
        memory = {
            "load_bytes_s": sum(one["bytes"] for one in loads) / sum(one["ms"] for one in loads) * 1e3,
            "pool_bytes": _KV_TOKENS * self.token_bytes + adapter_mb * 2**20,
            "token_bytes": self.token_bytes,
            "slot_tokens": BLOCK_TOKENS,
            "rank_bytes": self.rank_bytes,
            "adapter_mb": adapter_mb,
            "max_rank": max(adapters.RANKS),
        }
        return {"adapter_cache": {**times, **memory}}


def _contents(trace: Trace) -> np.random.Generator:
    """Of the contents of requests: other ones for each trace, so that no cache has them."""
    return np.random.default_rng((len(trace), int(trace.length.sum())))


def _events(server: TritonServer, model: str, since: float) -> list[Event]:
    """What the processes of a model recorded since then."""
    folder, recorded = server.settings.run_directory / "events", list[Event]()
    for file in folder.glob(f"{model}.*{SUFFIX}"):
        reader = RingReader(file)
        recorded += [event for event in reader.read() if event.at >= since]
        reader.close()
    return recorded


def _column(sent: Sent, name: str, kind: str) -> NDArray[Any]:
    """An output of one number, of each request."""
    values = []
    for answer in sent.answers:
        assert answer is not None, "a request has failed"
        message = service_pb2.ModelInferResponse.FromString(answer)
        place = [output.name for output in message.outputs].index(name)
        values.append(np.frombuffer(message.raw_output_contents[place], kind)[0])
    return np.array(values)
