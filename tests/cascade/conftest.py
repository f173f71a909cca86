"""A cascade whose first level is an emulated engine in this process; later levels are fake models of a test."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import json_format
from safetensors.numpy import save_file

from shapeshift.build_engines import cascade as build_cascade
from shapeshift.build_engines.paths import BuildPaths
from shapeshift.cascade import candidates
from shapeshift.cascade.candidates import Candidate, CandidateTable, Gap, LevelModel
from shapeshift.cascade.front import CascadeFront
from shapeshift.cascade.level_client import LevelClient
from shapeshift.engines import manifest
from shapeshift.errors import ModelGoneError
from shapeshift.serving import model_args
from shapeshift.serving.error_codes import FORWARDED, code_of, error_of
from shapeshift.serving.model_args import DESCRIPTION, ModelArgs
from shapeshift.triton import model_config
from shapeshift.triton.async_client import AsyncClient, ModelCall
from tests.conftest import LIGHT_WIDTH
from tests.fakes import InferenceResponse, PbUtils, Request, Tensor, TritonError, as_served, values_of

LABELS = ("LABEL_0", "LABEL_1")
_LEVEL_OUTPUTS = """output [
  { name: "LOGITS" data_type: TYPE_FP32 dims: [ 2 ] },
  { name: "IMPORTANCE" data_type: TYPE_FP32 dims: [ -1 ] },
  { name: "OFFSETS" data_type: TYPE_INT32 dims: [ -1, 2 ] }
]
"""
_REGRESSION_OUTPUTS = """output [
  { name: "LOGITS" data_type: TYPE_FP32 dims: [ 1 ] },
  { name: "EMBEDDING" data_type: TYPE_FP32 dims: [ %d ] }
]
"""
_FRONT = """
name: "classify"
backend: "cascade"
max_batch_size: 64
input [ { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] }PAIR ]
output [
  { name: "LABEL" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "PROBABILITIES" data_type: TYPE_FP32 dims: [ -1 ] },
  { name: "CONFIDENCE" data_type: TYPE_FP32 dims: [ 1 ] },
  { name: "LEVEL" data_type: TYPE_INT32 dims: [ 1 ] },
  { name: "WORDS_PRUNED" data_type: TYPE_INT32 dims: [ 1 ] },
  { name: "ENGINE_MS" data_type: TYPE_FP32 dims: [ 1 ] },
  { name: "CONTROL_MS" data_type: TYPE_FP32 dims: [ 1 ] }
]
"""
ALL = ("LABEL", "PROBABILITIES", "CONFIDENCE", "LEVEL", "WORDS_PRUNED", "ENGINE_MS", "CONTROL_MS")


class FakeLevel:
    """A model of the server: answers with fixed logits, or with the error `fail`, once `open` is set."""

    decoupled = False

    def __init__(self, logits: Sequence[float]) -> None:
        self.logits = list(logits)
        self.asked: list[list[bytes]] = []
        self.outputs: list[list[str]] = []
        self.parameters: list[str] = []
        self.fail: Exception | TritonError | None = None
        self.open = threading.Event()
        self.open.set()

    def execute(self, requests: Sequence[Request]) -> list[InferenceResponse]:
        (request,) = requests
        columns = [request.tensors[name].as_numpy()[:, 0] for name in ("TEXT", "TEXT_PAIR") if name in request.tensors]
        self.asked += [list(texts) for texts in zip(*columns, strict=True)]
        self.outputs.append(request.requested_output_names())
        self.parameters.append(request.parameters())
        assert self.open.wait(120)
        if isinstance(self.fail, TritonError):
            return [InferenceResponse(error=self.fail)]
        if self.fail is not None:
            raise self.fail
        rows = len(columns[0])
        values = {
            "LOGITS": np.tile(np.array(self.logits, np.float32), (rows, 1)),
            "ENGINE_MS": np.full((rows, 1), 7.0, np.float32),
        }
        return [InferenceResponse([Tensor(name, values[name]) for name in request.requested_output_names()])]


def gap(c: float = 1.0, alpha: float = 0.0, w: float = 0.75, **others: Any) -> Gap:
    """By default every text goes on, unpruned."""
    return Gap(c, 10.0, "cut", alpha, w, **others)


def candidate(
    name: str, levels: Sequence[str], gaps: Sequence[Gap], accuracy: float = 0.9, ms: float = 5.0
) -> Candidate:
    """The lower bound of its accuracy is 0.02 below."""
    shares = tuple(1 / len(levels) for _ in levels)
    latencies = tuple(3.0 * (number + 1) for number in range(len(levels)))
    bound = round(accuracy - 0.02, 4)
    return Candidate(name, tuple(levels), tuple(gaps), accuracy, ms, ms, ms, latencies, shares, 0.8, 0.0, bound)


class FakeClient(AsyncClient):
    """Calls the models in `pb_utils.models` instead of a server's; each call has a thread, as it may block."""

    def __init__(self, pb_utils: PbUtils) -> None:
        super().__init__("nowhere:1")
        self._pb_utils = pb_utils
        self.signs = 0
        self.no_sign: Exception | None = None

    async def infer(self, call: ModelCall) -> dict[str, np.ndarray]:
        if list(call.outputs) == [DESCRIPTION.name]:
            self.signs += 1
            if self.no_sign is not None:
                raise self.no_sign
            if self.has(call.model):
                return {}
            raise ModelGoneError(f"model {call.model} is not loaded")
        outcome: Future[dict[str, np.ndarray]] = Future()
        threading.Thread(target=self._execute, args=(call, outcome), daemon=True).start()
        return await asyncio.wrap_future(outcome)

    def has(self, model: str) -> bool:
        return model in self._pb_utils.models

    def _execute(self, call: ModelCall, outcome: Future[dict[str, np.ndarray]]) -> None:
        try:
            found = self._answer(call)
        except Exception as error:  # noqa: BLE001  reported to the caller
            if outcome.set_running_or_notify_cancel():
                outcome.set_exception(error)
        else:
            if outcome.set_running_or_notify_cancel():
                outcome.set_result(found)

    def _answer(self, call: ModelCall) -> dict[str, np.ndarray]:
        if not self.has(call.model):
            raise error_of(f"Request for unknown model: '{call.model}' is not found", "UNAVAILABLE")
        inputs: dict[str, Any] = dict(call.inputs)
        request = Request(call.outputs, {**call.parameters, FORWARDED: True}, **inputs)
        try:
            (response,) = self._pb_utils.models[call.model].execute([request])
        except Exception as error:  # noqa: BLE001  the server answers for a model that raises
            raise error_of(str(error)) from None
        if response.has_error():
            raise error_of(response.error().message(), code_of(self._pb_utils, response.error().code()))
        return values_of(response)


class Workspace:
    """The folders of a cascade, its registry, and the fronts that serve it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.paths = BuildPaths(root, root / "build", root / "model_repository")
        self.folder = root / "candidates"
        self.pb_utils = PbUtils()
        self.fronts: list[CascadeFront] = []
        self.check_s = 1.0
        self.most_calls = 4096

    def table(self, *candidates: Candidate, kind: str = "classification", **others: Any) -> CandidateTable:
        """A table of these candidates; only `small` has engines and a known checkpoint."""
        names = sorted({level for one in candidates for level in one.levels})
        built = manifest.load(self.paths.engines / "small").checkpoint_sha256
        models = tuple(
            LevelModel(name, built if name == "small" else "", 0.9, 3.0, 1.5, 0.01, ("LOGITS", "ENGINE_MS"))
            for name in names
        )
        values = {"labels": LABELS, "pairs": False, "tolerance": 0.0, "origin": {}, **others}
        return CandidateTable("task", kind, models=models, candidates=tuple(candidates), **values)

    def put(self, table: CandidateTable, chosen: str | None = None) -> None:
        """Register the table; `chosen` serves, by default the first candidate."""
        candidates.put(self.folder, table, chosen or table.candidates[0].name, pinned=False)

    def publish(self, pairs: bool = False, **parameters: object) -> Path:
        """Write the model's folder as `make engines` does."""
        folder = self.paths.repository / "classify"
        folder.mkdir(parents=True, exist_ok=True)
        stated = {"candidates_dir": self.folder, "task": "task", "engine_threads": 1, **parameters}
        entries = [f'parameters {{ key: "{key}" value {{ string_value: "{text}" }} }}' for key, text in stated.items()]
        pair = ', { name: "TEXT_PAIR" data_type: TYPE_STRING dims: [ 1 ] optional: true }' if pairs else ""
        (folder / "config.pbtxt").write_text(_FRONT.replace("PAIR", pair) + "\n".join(entries))
        config = model_config.read(folder / "config.pbtxt")
        front = build_cascade.read(folder, config, model_config.parameters(config))
        build_cascade.publish(front, self.paths)
        return self.paths.generated / "classify"

    def open(self, table: CandidateTable | None = None, timeout_s: float = 60.0, **parameters: Any) -> CascadeFront:
        """A front that serves the table's first candidate. timeout_s: of its calls to later levels."""
        if table is not None:
            self.put(table)
        self.publish(**parameters)
        self.fronts.append(as_served(CascadeFront(self.pb_utils, self.args(), self.levels(timeout_s), self.check_s)))
        return self.fronts[-1]

    def levels(self, timeout_s: float = 60.0) -> LevelClient:
        """Calls the models of the test."""
        return LevelClient(FakeClient(self.pb_utils), lambda line: None, self.most_calls, timeout_s)

    def args(self) -> ModelArgs:
        """What Triton tells the published model."""
        folder = self.paths.generated / "classify"
        config = json_format.MessageToDict(model_config.read(folder / "config.pbtxt"), preserving_proto_field_name=True)
        args = {
            "model_config": json.dumps(config),
            "model_name": folder.name,
            "model_repository": str(folder),
            "model_version": "1",
            "model_instance_name": f"{folder.name}_0",
            "model_instance_kind": "CPU",
            "model_instance_device_id": "0",
        }
        return model_args.read(args)


@pytest.fixture(scope="session")
def built_small(
    tmp_path_factory: pytest.TempPathFactory, add_front: Callable[..., Path], build_fronts: Callable[[Path, Path], Path]
) -> Path:
    """A folder with emulated engines of a model `small`, and of a regression `number`, in build/engines."""
    root = tmp_path_factory.mktemp("small")
    save_file({"weight": np.ones((1, LIGHT_WIDTH), np.float32), "bias": np.zeros(1, np.float32)}, root / "head")
    for name, outputs, more in (
        ("small", _LEVEL_OUTPUTS, {}),
        ("number", _REGRESSION_OUTPUTS % LIGHT_WIDTH, {"head": root / "head"}),
    ):
        folder = add_front(root / "model_repository", name, bins="16,64", **more)
        text = (folder / "config.pbtxt").read_text()
        text = text.replace(text[text.index("output [") : text.index("instance_group")], outputs)
        (folder / "config.pbtxt").write_text(text)
    build_fronts(root / "model_repository", root / "build")
    return root


@pytest.fixture
def workspace(tmp_path: Path, built_small: Path) -> Iterator[Workspace]:
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "engines").symlink_to(built_small / "build" / "engines")
    made = Workspace(tmp_path)
    yield made
    for front in made.fronts:
        front.close()
