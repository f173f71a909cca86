"""The front of a model that classifies images: Triton requests in, labels out, each by its own deadline."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from shapeshift.errors import InvalidInputError, NotFoundError, OverloadedError
from shapeshift.fleet.forwarding.front import Front, open_entry
from shapeshift.serving import description, parameters
from shapeshift.serving.bounds import Bound
from shapeshift.serving.cancellations import CancellationWatch
from shapeshift.serving.description import Description, describing
from shapeshift.serving.liveness import Liveness
from shapeshift.serving.metrics import Gauge, Metric, MetricsFlusher, RequestMetrics
from shapeshift.serving.model_args import ModelArgs, model_log
from shapeshift.serving.pb_utils import InferenceRequest, InferenceResponse, PbUtils, ResponseSender, Returned
from shapeshift.serving.responses import Responder
from shapeshift.token_adapt import image_decoding, loading
from shapeshift.token_adapt.decoder_pool import Decode, DecoderPool
from shapeshift.token_adapt.executor import Executor
from shapeshift.token_adapt.metrics import ImageMetrics
from shapeshift.token_adapt.policy.image_scheduler import ImageScheduler
from shapeshift.token_adapt.request import ImageRequest, ImageRequestOptions, RequestImage, now_ms, output_tensors
from shapeshift.token_adapt.settings import MAX_LATENCY_MS, MAX_UTILITY

_OWN_PARAMETERS = ("task",)
_CHANNELS = 3


class ImageFront:
    """Owns the threads of the process. `execute` never blocks and never raises; every request gets one response."""

    def __init__(self, pb_utils: PbUtils, args: ModelArgs, open_model: loading.Open = loading.open_model) -> None:
        self._pb_utils = pb_utils
        self._log = model_log(pb_utils, args.name)
        loaded = loading.load(args, self._log, open_model)
        self._settings, self._model, self._follower = loaded.settings, loaded.model, loaded.follower
        self._outputs = args.outputs
        self._images_bound = Bound("queue_images", self._settings.queue_images, "images")
        self._memory_bound = Bound("queue_mb", self._settings.queue_mb, "MiB")
        # Images of unanswered requests, and their bytes, as received and as decoded.
        self._num_unanswered, self._num_bytes = 0, 0
        self._lock = threading.Lock()
        self._watch = CancellationWatch(self._log)
        self._gammas = loaded.costs.gammas
        image_metrics = ImageMetrics(self._gammas)
        scheduler: ImageScheduler[RequestImage] = ImageScheduler(loaded.costs, loaded.scheduler, now_ms())
        self._executor = Executor(self._model, scheduler, image_metrics, self._log)
        self._decoders = DecoderPool(self._settings.decode_threads, self._executor)
        request_metrics = RequestMetrics("images", 1, self._settings.slo_ms)
        self._responder = Responder(pb_utils, request_metrics, self._log)
        describe = partial(self._describe, args.parameters)
        self._entry = open_entry(
            Front(pb_utils, args, self._responder, self._log, self._submit, describe, lambda: self._num_unanswered)
        )
        self._enter = describing(pb_utils, self._responder, args, self._entry.describe, self._entry.submit)
        steps = [*self._responder.steps, self._decoders.steps, *self._executor.steps, *self._entry.steps]
        exported: list[Metric] = [
            request_metrics.latency_ms,
            *request_metrics.answered.values(),
            *image_metrics.exported,
            Gauge("requests_waiting", "Images waiting", self._images_waiting),
            Gauge("requests_running", "Images in the running and the next batch", lambda: self._executor.num_running),
            Gauge("tasks", "Tasks served", lambda: len(self._model.tasks)),
            Gauge("cost_factor", "Measured over profiled time of recent batches", lambda: scheduler.costs.factor),
            *self._entry.metrics,
            *self._follower.metrics,
            Liveness(lambda: steps, self._log).metric,
        ]
        self._metrics = MetricsFlusher(pb_utils, args.name, exported, self._log)
        self._executor.start()

    def execute(self, requests: Sequence[InferenceRequest]) -> Returned:
        """Queue the images of each request for decoding; invalid and refused requests get an error at once."""
        return self._responder.start(requests, self._enter)

    def close(self) -> None:
        """Stop producers before consumers: what other nodes serve, decoding, execution, responses, metrics."""
        self._entry.close()
        self._follower.close()
        self._watch.close()
        self._decoders.close()
        self._executor.close()
        self._responder.close()
        self._metrics.close()

    def _submit(self, request: InferenceRequest, sender: ResponseSender) -> None:
        options = self._options(parameters.parse(request.parameters(), _OWN_PARAMETERS))
        num_images, num_bytes, decode = self._images(request)
        num_bytes += num_images * self._model.preprocessing.size**2 * _CHANNELS
        outputs = [name for name in self._outputs if name in request.requested_output_names()]
        image_request = ImageRequest(options, num_images, partial(self._respond, sender, outputs, num_bytes))
        self._admit(num_images, num_bytes)
        self._watch.add(image_request, sender.is_cancelled, partial(self._executor.cancel, image_request))
        try:
            self._decoders.submit(image_request, decode)
        except OverloadedError as error:
            image_request.fail(error)

    def _options(self, given: parameters.RequestParameters) -> ImageRequestOptions:
        """The request's own parameters, completed by the model's settings and then by the task's."""
        tasks, settings = self._model.tasks, self._settings
        name = given.task or self._default_task()
        registered = ", ".join(sorted(tasks))
        if not name:
            raise InvalidInputError("parameter task", None, f"the name of a registered task ({registered})")
        if name not in tasks:
            raise NotFoundError(f"parameter task: no task {name!r}; registered tasks: {registered}")
        task = tasks[name]
        if task.accuracy.keys().isdisjoint(self._gammas):
            gammas = ", ".join(map(str, self._gammas))
            raise InvalidInputError("parameter task", name, f"a task with prompts: use_gammas is {gammas}")
        latency_ms = given.latency_ms or settings.latency_ms or task.latency_ms
        if latency_ms > MAX_LATENCY_MS:
            raise InvalidInputError("parameter latency_ms", latency_ms, f"at most {MAX_LATENCY_MS:g}")
        own = task.utility if settings.utility is None else settings.utility
        utility = own if given.utility is None else given.utility
        if not 0 <= utility <= MAX_UTILITY:
            raise InvalidInputError("parameter utility", utility, f"0 to {MAX_UTILITY:g}")
        return ImageRequestOptions(task, latency_ms, utility)

    def _default_task(self) -> str:
        """The task of requests that name none; empty where they must name one."""
        tasks = self._model.tasks
        own = next((task.name for task in tasks.values() if task.is_default or len(tasks) == 1), "")
        return self._settings.task or own

    def _describe(self, parameters: Mapping[str, str]) -> Description:
        tasks = self._model.tasks
        default = tasks.get(self._default_task())
        return Description(
            description.IMAGE_CLASSIFICATION,
            checkpoint=description.checkpoint_name(parameters),
            precision=parameters.get("precision"),
            labels=None if default is None else default.labels,
            tasks=sorted(tasks),
            checkpoint_version=description.checkpoint_version(parameters),
            engines=description.engines_version(parameters.get("manifest_sha256", "")),
            registry=description.registry_version({name: task.sha256 for name, task in tasks.items()}),
        )

    def _images(self, request: InferenceRequest) -> tuple[int, int, Decode]:
        """The number of images, their bytes, and a function that decodes the image of a row.

        Checks shapes, types and the size of PIXELS only.
        """
        files, pixels = (self._array(request, name) for name in ("IMAGE", "PIXELS"))
        if (files is None) == (pixels is None):
            given = "none" if files is None else "IMAGE and PIXELS"
            raise InvalidInputError("inputs", given, "either IMAGE or PIXELS")
        wanted, max_pixels = self._model.preprocessing, self._settings.max_pixels
        if files is not None:
            if files.ndim != 2 or files.shape[1] != 1 or not len(files):
                raise InvalidInputError("IMAGE", list(files.shape), "shape [n, 1] with n at least 1")
            contents = [_bytes(value, row) for row, value in enumerate(files[:, 0])]
            num_bytes = sum(map(len, contents))
            return len(contents), num_bytes, lambda row: image_decoding.decode(contents[row], wanted, max_pixels, row)
        if pixels.ndim != 4 or pixels.shape[3] != _CHANNELS or 0 in pixels.shape:
            raise InvalidInputError("PIXELS", list(pixels.shape), "shape [n, height, width, 3], all above 0")
        image_decoding.require_size(pixels.shape[2], pixels.shape[1], max_pixels, 0)
        # Triton frees its buffer when `execute` returns.
        copied = np.array(pixels, dtype=np.uint8)
        return len(copied), copied.nbytes, lambda row: image_decoding.fit(copied[row], wanted, max_pixels, row)

    def _array(self, request: InferenceRequest, name: str) -> Any:
        tensor = self._pb_utils.get_input_tensor_by_name(request, name)
        return None if tensor is None else tensor.as_numpy()

    def _admit(self, num_images: int, num_bytes: int) -> None:
        with self._lock:
            self._images_bound.require_unless_empty(self._num_unanswered, num_images)
            self._memory_bound.require_unless_empty(_mebibytes(self._num_bytes), _mebibytes(num_bytes))
            self._num_unanswered += num_images
            self._num_bytes += num_bytes

    def _respond(self, sender: ResponseSender, outputs: list[str], num_bytes: int, request: ImageRequest) -> None:
        with self._lock:
            self._num_unanswered -= request.num_images
            self._num_bytes -= num_bytes
        # Called on the response thread, because it blocks while the watch asks Triton.
        before = partial(self._watch.remove, request)
        if request.error is not None:
            self._responder.fail(sender, request.error, before)
            return
        self._responder.send(sender, partial(self._response, request, outputs), request.arrival / 1e3, before=before)

    def _images_waiting(self) -> int:
        # Running images can belong to a failed request that is answered already.
        return max(0, self._num_unanswered - self._executor.num_running)

    def _response(self, request: ImageRequest, outputs: list[str]) -> InferenceResponse:
        tensors = output_tensors(request)
        return self._pb_utils.InferenceResponse([self._pb_utils.Tensor(name, tensors[name]) for name in outputs])


def _mebibytes(num_bytes: int) -> int:
    return -(-num_bytes // 2**20)


def _bytes(value: Any, row: int) -> bytes:
    if isinstance(value, bytes):
        return value
    raise InvalidInputError("IMAGE", type(value).__name__, "the bytes of a JPEG or PNG file", row)
