"""The front model: Triton requests in, embeddings out, through the placement that config.pbtxt names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from shapeshift import settings
from shapeshift.engines import manifest
from shapeshift.engines.execution.loading import open_tokenizer
from shapeshift.engines.execution.request import TextRequest
from shapeshift.engines.manifest import Manifest
from shapeshift.engines.settings import GeneratedSettings, TextEngineSettings
from shapeshift.errors import EngineError, InvalidInputError
from shapeshift.polymorph.executor import open_executor
from shapeshift.polymorph.settings import PlacementSettings, PolymorphSettings
from shapeshift.serving import description, parameters
from shapeshift.serving.description import Description, describing
from shapeshift.serving.liveness import Liveness
from shapeshift.serving.metrics import Gauge, Metric, MetricsFlusher, RequestMetrics
from shapeshift.serving.model_args import ModelArgs, model_log
from shapeshift.serving.pb_utils import InferenceRequest, InferenceResponse, PbUtils, ResponseSender, Returned
from shapeshift.serving.responses import Responder
from shapeshift.serving.text_inputs import (
    ENGINE_MS,
    NUM_TOKENS,
    OFFSETS,
    TEXT_PAIR,
    Offsets,
    padded_offsets,
    rows_of_request,
    wanted_outputs,
)

PARAMETERS = settings.names(TextEngineSettings, PolymorphSettings, GeneratedSettings, PlacementSettings)
_OWN_PARAMETERS = ("prompt_name", "truncate")


class TextFront:
    """Owns the threads of the process. `execute` never blocks and never raises; every request is answered once."""

    def __init__(self, pb_utils: PbUtils, args: ModelArgs) -> None:
        self._pb_utils = pb_utils
        self._log = model_log(pb_utils, args.name)
        settings.refuse_unknown(args.parameters, PARAMETERS)
        own = settings.read(PolymorphSettings, args.parameters)
        generated = settings.read(GeneratedSettings, args.parameters)
        folder = args.folder / generated.engines
        if not generated.engines:
            raise InvalidInputError("engines", "", f"a folder of engines; {manifest.REBUILD}")
        made = manifest.load(folder, generated.manifest_sha256 or None)
        if generated.checkpoint_sha256 not in ("", made.checkpoint_sha256):
            raise EngineError(f"the engines in {folder} come from another checkpoint; {manifest.REBUILD}")
        made.check_files(folder, manifest.hashes_file(folder))
        self._outputs = args.outputs
        self._pairs = TEXT_PAIR in args.inputs
        self._vocabulary = made.vocabulary
        self._prompt = made.prompt
        self._tokenizer = open_tokenizer(folder, made)
        placement = settings.read(PlacementSettings, args.parameters)
        self._executor = open_executor(pb_utils, args.name, made, folder, own, placement, self._log, args.device)
        self._count_and_export(args.name, made.max_tokens, own.slo_ms)
        described = _describe(args, made, self._pairs)
        self._enter = describing(pb_utils, self._responder, args, lambda: described, self._submit)
        self._log(f"ready: {made.provider} {made.precision}, {len(made.engines)} engines, {own.placement}")

    def execute(self, requests: Sequence[InferenceRequest]) -> Returned:
        """Queue every request. A request that cannot be served is answered with an error at once."""
        return self._responder.start(requests, self._enter)

    def close(self) -> None:
        """Stop producers before consumers: engines, then the sender, then metrics."""
        self._executor.close()
        self._responder.close()
        self._metrics.close()

    def _submit(self, request: InferenceRequest, sender: ResponseSender) -> None:
        given = parameters.parse(request.parameters(), _OWN_PARAMETERS)
        self._executor.require_room(given.latency_ms)
        wanted = wanted_outputs(request, self._outputs)
        rows = rows_of_request(
            self._pb_utils,
            request,
            self._tokenizer,
            self._vocabulary,
            given.truncate,
            self._pairs,
            OFFSETS in wanted,
            self._prompt(given.prompt_name),
        )
        if given.prompt_name is not None and self._pb_utils.get_input_tensor_by_name(request, "TEXT") is None:
            raise InvalidInputError(
                "parameter prompt_name", given.prompt_name, "only with TEXT; INPUT_IDS are taken as they are"
            )
        for ids in rows.ids:
            self._request_metrics.lengths.observe(len(ids))
        finished = partial(self._reply, sender, wanted, rows.offsets)
        self._executor.submit(TextRequest(rows.ids, finished, given.latency_ms, sender.is_cancelled))

    def _reply(self, sender: ResponseSender, wanted: list[str], offsets: list[Offsets], request: TextRequest) -> None:
        if request.error is not None:
            self._responder.fail(sender, request.error)
            return
        self._responder.send(sender, partial(self._response, request, wanted, offsets), request.arrived)

    def _response(self, request: TextRequest, wanted: list[str], offsets: list[Offsets]) -> InferenceResponse:
        values = dict(request.outputs)
        if offsets:
            values[OFFSETS] = padded_offsets(offsets)
        if ENGINE_MS in wanted:
            values[ENGINE_MS] = request.engine_ms[:, None]
        if NUM_TOKENS.name in wanted:
            values[NUM_TOKENS.name] = np.array([[row.tokens] for row in request.rows], np.int32)
        tensors = [self._pb_utils.Tensor(name, values[name]) for name in wanted]
        return self._pb_utils.InferenceResponse(output_tensors=tensors)

    def _count_and_export(self, name: str, max_tokens: int, slo_ms: float) -> None:
        executor = self._executor
        self._request_metrics = RequestMetrics("texts", max_tokens, slo_ms)
        self._responder = Responder(self._pb_utils, self._request_metrics, self._log)
        exported: list[Metric] = [
            *self._request_metrics.exported,
            Gauge("requests_waiting", "Texts that wait", lambda: executor.waiting),
            Gauge("requests_running", "Texts that are computed", lambda: executor.running),
            *executor.metrics(),
            Liveness(lambda: [*self._responder.steps, *executor.steps], self._log).metric,
        ]
        self._metrics = MetricsFlusher(self._pb_utils, name, exported, self._log)


def _describe(args: ModelArgs, made: Manifest, pairs: bool) -> Description:
    sizes = {output.name: output.dims[-1] for output in made.outputs}
    kind, *also = _kinds(sizes, pairs, made.cross_encoder)
    return Description(
        kind,
        also or None,
        checkpoint=description.checkpoint_name(args.parameters),
        precision=made.precision,
        max_tokens=made.max_tokens,
        embedding_size=sizes.get("EMBEDDING"),
        labels=made.labels or None,
        activation=made.activation or None,
        pairs=pairs,
        only_pairs=(pairs and made.cross_encoder) or None,
        prompts=made.prompts or None,
        default_prompt=made.default_prompt or None,
        engines=description.engines_version(args.parameters.get("manifest_sha256", "")),
    )


def _kinds(sizes: Mapping[str, int], pairs: bool, cross_encoder: bool) -> list[str]:
    """What a front with these outputs serves as, the first one before all."""
    if "TOKEN_LOGITS" in sizes:
        return [description.TOKEN_CLASSIFICATION]
    if "LOGITS" not in sizes:
        return [description.EMBEDDING]
    if not pairs or sizes["LOGITS"] > 1:
        return [description.TEXT_CLASSIFICATION]
    # One score of a pair ranks, whatever it was trained for.
    kinds = [description.TEXT_CLASSIFICATION, description.RERANKING]
    return kinds[::-1] if cross_encoder else kinds
