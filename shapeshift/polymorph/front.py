"""The front model: Triton requests in, embeddings out, through the placement that config.pbtxt names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from shapeshift import settings
from shapeshift.engines import manifest
from shapeshift.engines.execution.executor import EngineExecutor
from shapeshift.engines.execution.request import TextRequest
from shapeshift.engines.interfaces import Ids
from shapeshift.engines.manifest import GeneratedSettings, Manifest
from shapeshift.engines.settings import TextEngineSettings
from shapeshift.engines.text.tokenizer import FILE_NAME, TextTokenizer
from shapeshift.errors import CancelledRequestError, EngineError, InvalidInputError, OverloadedError
from shapeshift.polymorph import answers
from shapeshift.polymorph.settings import ENTITIES, SPARSE_OUTPUTS, PlacementSettings, PolymorphSettings
from shapeshift.serving import description
from shapeshift.serving.description import Description
from shapeshift.serving.front import Client, Front, RequestLine
from shapeshift.serving.liveness import StepCounter
from shapeshift.serving.metrics import Gauge, Metric, RequestMetrics
from shapeshift.serving.model_args import ModelArgs
from shapeshift.serving.parameters import RequestParameters
from shapeshift.serving.pb_utils import InferenceRequest, InferenceResponse, PbUtils
from shapeshift.serving.text_inputs import (
    ENGINE_MS,
    NUM_TOKENS,
    OFFSETS,
    TEXT_PAIR,
    Offsets,
    padded_offsets,
    rows_of_request,
    texts_of_request,
    wanted_outputs,
)
from shapeshift.settings import Choices

PARAMETERS = settings.names(TextEngineSettings, PolymorphSettings, GeneratedSettings, PlacementSettings)


# What reaches workers. Placement `inline`, in this process, needs nothing of it.
ROUTERS: Choices[Callable[..., Any]] = Choices(
    "placement",
    dict.fromkeys(("resident", "partitioned", "auto"), "shapeshift.polymorph.router.placement:open_router"),
)


class Executor(Protocol):
    """Takes requests and completes them on its own threads."""

    @property
    def waiting(self) -> int:
        """Texts that wait."""

    @property
    def running(self) -> int:
        """Texts that are being computed."""

    def require_room(self, latency_ms: float | None, slo_class: str | None) -> None:
        """Raise OverloadedError where any such request would be refused: before its texts are read."""

    def submit(self, request: TextRequest) -> None:
        """Queue all rows of `request`. Raises OverloadedError where they do not fit."""

    @property
    def steps(self) -> list[StepCounter]:
        """The steps of its threads."""

    def metrics(self) -> Sequence[Metric]:
        """The executor's metrics, exported beside the front's own."""

    def close(self) -> None:
        """Answer waiting texts with UNAVAILABLE, let running calls end, stop the threads."""


class TextJob(TextRequest):
    """One request. output_names: those requested; offsets: of its texts, where they are needed.

    lora_name: its adapter; holds: whether that stays in the cache's table for it.
    """

    holds = False

    def __init__(
        self,
        client: Client,
        texts: Sequence[Ids],
        output_names: Sequence[str],
        offsets: Sequence[Offsets],
        sources: Sequence[bytes],
        done: Callable[[TextJob], None],
        params: RequestParameters,
    ) -> None:
        super().__init__(texts, done, params.latency_ms, params.slo_class)  # type: ignore[arg-type]
        self.client, self.trace = client, client.trace
        self.output_names = output_names
        self.offsets = offsets
        self.sources = sources
        self.lora_name = params.lora_name
        self.strategy = params.aggregation_strategy or answers.NONE


class TextFront(Front[TextJob]):
    """Reads texts and has them computed by engines, in this process or in workers."""

    parameters: ClassVar[Set[str]] = PARAMETERS
    """Settings that config.pbtxt may have."""
    takes: ClassVar[Sequence[str]] = (
        "checkpoint",
        "prompt_name",
        "truncate",
        "truncate_prompt_tokens",
        "aggregation_strategy",
    )
    # Workers of other nodes compute its texts instead.
    any_node = False

    def __init__(self, pb_utils: PbUtils, args: ModelArgs) -> None:
        super().__init__(pb_utils, args)
        settings.refuse_unknown(args.parameters, self.parameters)
        polymorph = settings.read(PolymorphSettings, args.parameters)
        generated = settings.read(GeneratedSettings, args.parameters)
        folder = args.folder / generated.engines
        if not generated.engines:
            raise InvalidInputError("engines", "", f"a folder of engines; {manifest.REBUILD}")
        engines = manifest.load(folder, generated.manifest_sha256 or None)
        if generated.checkpoint_sha256 not in ("", engines.checkpoint_sha256):
            raise EngineError(f"the engines in {folder} come from another checkpoint; {manifest.REBUILD}")
        engines.check_files(folder, manifest.hashes_file(folder))
        self._engines = engines
        self._pairs = TEXT_PAIR in args.inputs
        self._dimensions = polymorph.dimensions or engines.dimensions
        self._tokenizer = TextTokenizer(
            folder / FILE_NAME,
            engines.max_tokens,
            type_stride=engines.type_stride,
            vocab_size=engines.vocabulary,
        )
        self.executor: Executor
        self.executor = self.open_executor(engines, folder, polymorph)
        self.begin(RequestMetrics("texts", engines.max_tokens, polymorph.slo_ms))
        self.log.info(
            f"ready: {engines.provider} {engines.precision}, {len(engines.engines)} engines, {polymorph.placement}"
        )

    def open_executor(self, engines: Manifest, folder: Path, polymorph: PolymorphSettings) -> Executor:
        """What computes the texts. folder: of the engines."""
        args, placement = self.args, settings.read(PlacementSettings, self.args.parameters)
        if polymorph.placement == "inline":
            return EngineExecutor(engines, folder, polymorph, self.log.warning, args.device)
        router = ROUTERS[polymorph.placement]
        executor: Executor = router(self.pb_utils, args.name, engines, polymorph, placement, self.log)
        return executor

    def admit(self, params: RequestParameters) -> None:
        checkpoint = self._engines.checkpoint_sha256
        if params.checkpoint not in (None, checkpoint):
            reason = f"this model has {checkpoint} since it was loaded; retry later"
            raise OverloadedError(f"parameter checkpoint: got {params.checkpoint!r}; {reason}")
        self.executor.require_room(params.latency_ms, params.slo_class)

    def parse(self, request: InferenceRequest, params: RequestParameters, client: Client) -> TextJob:
        output_names = wanted_outputs(request, self.args.outputs)
        finds = ENTITIES in output_names
        if params.aggregation_strategy not in (None, *(answers.STRATEGIES if ENTITIES in self.args.outputs else ())):
            allowed = f"one of {', '.join(answers.STRATEGIES)}, of a model with the output {ENTITIES}"
            raise InvalidInputError("parameter aggregation_strategy", params.aggregation_strategy, allowed)
        if finds and self._pairs and self.pb_utils.get_input_tensor_by_name(request, TEXT_PAIR) is not None:
            raise InvalidInputError(TEXT_PAIR, "given", f"left out for the output {ENTITIES}: it is of one text")
        limit, tokenizer = params.truncate_prompt_tokens, self._tokenizer
        rows = rows_of_request(
            self.pb_utils,
            request,
            tokenizer if limit is None else tokenizer.limited(limit),
            self._engines.vocabulary,
            params.truncate or limit is not None,
            self._pairs,
            finds or OFFSETS in output_names,
            self._engines.prompt(params.prompt_name),
            self._engines.pair_template(params.prompt_name),
        )
        sources = [text for (text,) in texts_of_request(self.pb_utils, request, pairs=False)] if finds else []
        if params.prompt_name is not None and self.pb_utils.get_input_tensor_by_name(request, "TEXT") is None:
            raise InvalidInputError(
                "parameter prompt_name", params.prompt_name, "only with TEXT; INPUT_IDS are taken as they are"
            )
        for ids in rows.ids if params.check is None else ():
            self.request_metrics.lengths.observe(len(ids))
        return TextJob(client, rows.ids, output_names, rows.offsets, sources, self.done, params)

    def tokens(self, request: InferenceRequest) -> NDArray[np.object_]:
        prompt = self._engines.prompt(self.read(request).prompt_name)
        texts = texts_of_request(self.pb_utils, request, pairs=False)
        listed = [[self._tokenizer.listed(text, row, prompt)] for row, (text,) in enumerate(texts)]
        return np.array(listed, dtype=object)

    def start(self, job: TextJob) -> None:
        self.executor.submit(job)

    def cancel(self, job: TextJob) -> None:
        job.fail(CancelledRequestError("the caller cancelled the request"))

    def respond(self, job: TextJob) -> InferenceResponse:
        values = dict(job.outputs)
        if OFFSETS in job.output_names:
            values[OFFSETS] = padded_offsets(job.offsets)
        if {*SPARSE_OUTPUTS} & {*job.output_names}:
            values |= answers.sparse(job.outputs, [row.ids for row in job.rows], self._engines.type_stride)
        if ENTITIES in job.output_names:
            values[ENTITIES] = np.array([[self._entities(job, row)] for row in range(len(job.rows))], dtype=object)
        if ENGINE_MS in job.output_names:
            values[ENGINE_MS] = job.engine_ms[:, None]
        if NUM_TOKENS.name in job.output_names:
            values[NUM_TOKENS.name] = np.array([[row.tokens] for row in job.rows], np.int32)
        return self.response({name: values[name] for name in job.output_names})

    def _entities(self, job: TextJob, row: int) -> bytes:
        ids = job.rows[row].ids
        text = job.offsets[row], job.sources[row]
        logits = job.outputs["TOKEN_LOGITS"][row, : len(ids)]
        return answers.entities(logits, ids, *text, self._engines.labels, self._tokenizer, job.strategy)

    def facts(self, job: TextJob) -> RequestLine:
        return {
            "tokens": sum(row.tokens for row in job.rows),
            "texts": len(job.rows),
            "bins": sorted({row.size for row in job.rows if row.done}),
            "predicted_ms": job.predicted_ms,
            "compute_ms": float(job.engine_ms.max(initial=0.0)),
        }

    def recorded(self, job: TextJob) -> Sequence[RequestLine]:
        limits = {"latency_ms": job.latency_ms or 0.0, "slo_class": job.slo_class or ""}
        return [{"length": row.tokens, **limits} for row in job.rows]

    def describe(self) -> Description:
        return _describe(self.args, self._engines, self._pairs, self._dimensions)

    @property
    def waiting(self) -> int:
        """Texts that wait."""
        return self.executor.waiting

    def load(self) -> float:
        return self.waiting + self.executor.running

    def metrics(self) -> Sequence[Metric]:
        executor = self.executor
        return [
            Gauge("requests_waiting", "Texts that wait", lambda: self.waiting),
            Gauge("requests_running", "Texts that are computed", lambda: executor.running),
            *executor.metrics(),
        ]

    def steps(self) -> Sequence[StepCounter]:
        return self.executor.steps

    def stop(self) -> None:
        self.executor.close()


def _describe(args: ModelArgs, engines: Manifest, pairs: bool, dimensions: str) -> Description:
    widths = dimensions if dimensions in ("", "any") else [int(width) for width in dimensions.split(",")]
    sizes = {output.name: output.dims[-1] for output in engines.outputs}
    kind, *also = _kinds(sizes, pairs, engines.cross_encoder)
    return Description(
        kind,
        also or None,
        checkpoint=description.checkpoint_name(args.parameters),
        precision=engines.precision,
        max_tokens=engines.max_tokens,
        embedding_size=sizes.get("EMBEDDING"),
        dimensions=widths or None,
        pooling=args.parameters.get("pooling") if "EMBEDDING" in sizes else None,
        labels=engines.labels or None,
        activation=engines.activation or None,
        pairs=pairs,
        only_pairs=(pairs and engines.cross_encoder) or None,
        prompts=engines.prompts or None,
        default_prompt=engines.default_prompt or None,
        engines=description.engines_version(args.parameters.get("manifest_sha256", "")),
    )


def _kinds(sizes: Mapping[str, int], pairs: bool, cross_encoder: bool) -> list[str]:
    """What a front with these outputs serves as, the first one before all."""
    if "TOKEN_LOGITS" in sizes:
        return [description.TOKEN_CLASSIFICATION]
    if "LOGITS" not in sizes:
        by_output = {
            "EMBEDDING": description.EMBEDDING,
            "TOKEN_WEIGHTS": description.SPARSE_EMBEDDING,
            "TERM_WEIGHTS": description.SPARSE_EMBEDDING,
            "TOKEN_EMBEDDING": description.TOKEN_EMBEDDING,
        }
        return [kind for name, kind in by_output.items() if name in sizes] or [description.EMBEDDING]
    if not pairs or sizes["LOGITS"] > 1:
        return [description.TEXT_CLASSIFICATION]
    # One score of a pair ranks, whatever it was trained for.
    kinds = [description.TEXT_CLASSIFICATION, description.RERANKING]
    return kinds[::-1] if cross_encoder else kinds
