"""One worker behind a router: a Triton model with one process, which holds one bin's engine or all of them.

It takes a pack of texts, INPUT_IDS INT64 [tokens of all texts] and LENGTHS INT32 [texts], and answers
with the front's outputs, [texts, ...], and STATE INT64 [6]: its bin, its generation, its process number, the
microseconds that this request took, those of all requests so far, and the answers' version of its engines. A request
without texts asks for STATE only.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import numpy as np

from shapeshift import settings
from shapeshift.engines import manifest
from shapeshift.engines.execution.engine_set import (
    BackgroundLoader,
    EngineSet,
    first_and_rest,
    longest_call_s,
    work_metrics,
)
from shapeshift.engines.interfaces import PROVIDERS, Array, Ids
from shapeshift.engines.manifest import EngineEntry, GeneratedSettings
from shapeshift.engines.settings import TextEngineSettings
from shapeshift.errors import InvalidInputError, UnsupportedError
from shapeshift.polymorph.service_times import bin_edges, entry_of_bin
from shapeshift.polymorph.settings import (
    WORKER_INPUTS,
    WORKER_STATE,
    PlacementSettings,
    PolymorphSettings,
    WorkerSettings,
)
from shapeshift.serving import error_codes, events
from shapeshift.serving.liveness import Liveness, StepCounter
from shapeshift.serving.metrics import Counter, Gauge, MetricsFlusher
from shapeshift.serving.model_args import ModelArgs, model_log
from shapeshift.serving.pb_utils import InferenceRequest, InferenceResponse, PbUtils, Tensor

INPUTS = tuple(tensor.name for tensor in WORKER_INPUTS)
STATE = WORKER_STATE.name
PARAMETERS = settings.names(TextEngineSettings, PolymorphSettings, GeneratedSettings, PlacementSettings, WorkerSettings)


class TextWorker:
    """Runs one request at a time, on the thread that Triton calls it with."""

    def __init__(self, pb_utils: PbUtils, args: ModelArgs) -> None:
        self._pb_utils = pb_utils
        self._log = model_log(pb_utils, args.name)
        settings.refuse_unknown(args.parameters, PARAMETERS)
        worker = settings.read(WorkerSettings, args.parameters)
        folder = args.folder / settings.read(GeneratedSettings, args.parameters).engines
        engines = manifest.load(folder, args.parameters.get("manifest_sha256") or None)
        engines.check_files(folder, manifest.hashes_file(folder))
        if worker.bin and worker.bin not in bin_edges(engines):
            raise InvalidInputError("bin", worker.bin, f"0, or one of {', '.join(map(str, bin_edges(engines)))}")
        self._outputs = [name for name in args.outputs if name != STATE]
        self._widths = {output.name: output.dims for output in engines.outputs}
        self._vocabulary = engines.vocabulary
        self._longest = worker.bin or engines.max_tokens
        self._max_tokens = worker.bin or engines.pack_tokens
        self._identity = worker.bin, args.generation, os.getpid()
        self._version = engines.answers_version()
        self._busy_ns = 0
        self._lengths_seen = [0] * (engines.max_tokens + 1)
        self._runtime = PROVIDERS[engines.provider].open(folder, engines.precision, 1, args.device)
        self.engines = EngineSet(engines)
        first, rest = (entry_of_bin(engines, worker.bin), []) if worker.bin else first_and_rest(engines)
        self._load(first)
        self.engines.warm_up()
        memory_mb = settings.read(PolymorphSettings, args.parameters).memory_mb
        self.loader = BackgroundLoader(
            rest, self._load, self._lengths_seen, memory_mb, self._log.warning, used_mb=self._runtime.used_mb
        )
        self._calls = Counter("engine_calls_total", "Engine calls")
        self._rows = Counter("engine_rows_total", "Texts computed")
        loaded = Gauge("engines_loaded", "Engines in use", lambda: len(self.engines.loaded))
        counters = [self._calls, self._rows, *work_metrics(engines, lambda: [self.engines])]
        self._executing = StepCounter("execute", lambda: False, longest_call_s(engines))
        self.liveness = Liveness(lambda: [self._executing], self._log.error)
        events.open_ring(args.name, self._log.warning)
        self._metrics = MetricsFlusher(
            pb_utils, args.name, [*counters, loaded, self.liveness.metric], self._log.warning
        )
        self._log.info(
            f"ready: bin {worker.bin or 'any'}, generation {args.generation}, {engines.provider} {engines.precision}"
        )

    def execute(self, requests: Sequence[InferenceRequest]) -> list[InferenceResponse]:
        """One response for each request; UNSUPPORTED where a text is longer than this worker's bin."""
        return [self._answer(request) for request in requests]

    def close(self) -> None:
        """Stop the background threads."""
        self.loader.close()
        self._metrics.close()
        events.close_ring()

    def _answer(self, request: InferenceRequest) -> InferenceResponse:
        with self._executing.running():
            return self._response(request)

    def _response(self, request: InferenceRequest) -> InferenceResponse:
        began = time.perf_counter_ns()
        try:
            outputs = self._compute(self._texts(request))
            requested = request.requested_output_names()
            tensors = [self._pb_utils.Tensor(name, outputs[name]) for name in self._outputs if name in requested]
            tensors.append(self._pb_utils.Tensor(STATE, self._state(time.perf_counter_ns() - began)))
            return self._pb_utils.InferenceResponse(output_tensors=tensors)
        except Exception as error:  # noqa: BLE001  a request that fails must not end the process
            return error_codes.error_response(self._pb_utils, error)
        finally:
            self._busy_ns += time.perf_counter_ns() - began

    def _state(self, took_ns: int) -> Array:
        """STATE of the request that runs."""
        busy_us = (self._busy_ns + took_ns) // 1000
        return np.array([*self._identity, took_ns // 1000, busy_us, self._version], dtype=np.int64)

    def _compute(self, texts: list[Ids]) -> dict[str, Array]:
        if not texts:
            return {
                name: np.zeros((0, *(max(width, 0) for width in self._widths[name])), np.float32)
                for name in self._outputs
            }
        for ids in texts:
            self._lengths_seen[len(ids)] += 1
        outputs = self.engines.run(texts)
        self._calls.add()
        self._rows.add(len(texts))
        return outputs

    def _texts(self, request: InferenceRequest) -> list[Ids]:
        ids, lengths = (self._input(request, name).as_numpy() for name in INPUTS)
        if ids.ndim != 1 or lengths.ndim != 1:
            raise InvalidInputError("INPUT_IDS, LENGTHS", [ids.ndim, lengths.ndim], "one axis each")
        if int(lengths.min(initial=1)) < 1 or int(lengths.sum(dtype=np.int64)) != len(ids):
            raise InvalidInputError("LENGTHS", lengths.tolist(), f"at least 1 each, {len(ids)} in all")
        if len(ids) > self._max_tokens:
            raise UnsupportedError(f"LENGTHS: {len(ids)} tokens in all; this worker takes {self._max_tokens}")
        if int(lengths.max(initial=0)) > self._longest:
            raise UnsupportedError(f"LENGTHS: a text of {lengths.max()} tokens; this worker takes {self._longest}")
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= self._vocabulary):
            raise InvalidInputError("INPUT_IDS", [int(ids.min()), int(ids.max())], f"0 to {self._vocabulary - 1}")
        ends = np.cumsum(lengths)
        return [ids[end - length : end] for end, length in zip(ends.tolist(), lengths.tolist(), strict=True)]

    def _input(self, request: InferenceRequest, name: str) -> Tensor:
        tensor = self._pb_utils.get_input_tensor_by_name(request, name)
        if tensor is None:
            raise InvalidInputError(name, None, "given")
        return tensor

    def _load(self, entry: EngineEntry) -> None:
        self.engines.add(self._runtime.engine(entry.tokens, entry.rows), entry)
