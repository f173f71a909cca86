"""The front of a model that classifies images: Triton requests in, labels out, each by its own deadline.

What would be too late is refused or not decoded.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shapeshift import settings
from shapeshift.engines import hardware
from shapeshift.engines.manifest import GeneratedSettings
from shapeshift.errors import InvalidInputError, NotFoundError, OverloadedError
from shapeshift.serving import description
from shapeshift.serving.bounds import Bound
from shapeshift.serving.description import Description
from shapeshift.serving.front import Client, Front, RequestLine
from shapeshift.serving.liveness import StepCounter
from shapeshift.serving.metrics import Gauge, Metric, RequestMetrics
from shapeshift.serving.model_args import ModelArgs
from shapeshift.serving.parameters import RequestParameters
from shapeshift.serving.pb_utils import InferenceRequest, InferenceResponse, PbUtils
from shapeshift.settings import Choices, require
from shapeshift.token_adapt import image_decoding
from shapeshift.token_adapt.executor import Executor, ImageModel
from shapeshift.token_adapt.image_decoding import Decode, DecoderPool
from shapeshift.token_adapt.policy import plan
from shapeshift.token_adapt.policy.costs import Costs, GammaProfile, efficient_batch_size
from shapeshift.token_adapt.policy.image_scheduler import ImageScheduler
from shapeshift.token_adapt.request import (
    EMBEDDING,
    IN_TIME,
    ImageRequest,
    ImageRequestOptions,
    RequestImage,
    now_ms,
    output_values,
)
from shapeshift.token_adapt.settings import (
    EMULATED,
    MAX_LATENCY_MS,
    MAX_UTILITY,
    EmulatedSettings,
    ImageEngineSettings,
    TokenAdaptSettings,
)

_CHANNELS = 3
# What requests of the task EMBEDDING are answered, and those of all others.
_OF_VECTORS, _OF_LABELS = {"EMBEDDING"}, {"LABEL", "PROBABILITIES"}
# Of a batch whose size nobody states: at most so many images, and no more than for this share of the best throughput.
_MOST_IMAGES, _THROUGHPUT_SHARE = 64, 0.9
_PARAMETERS = settings.names(
    TokenAdaptSettings,
    EmulatedSettings,
    ImageEngineSettings,
    GeneratedSettings,
)
Open = Callable[[ModelArgs, TokenAdaptSettings], ImageModel]
_EMULATED: Choices[Callable[[Path], ImageModel]] = Choices(
    "provider", {EMULATED: "shapeshift.token_adapt.model.emulated:read"}
)


@dataclass(frozen=True)
class Images:
    """The images of a request as they were received. decode: of a row, decoded."""

    count: int
    num_bytes: int
    decode: Decode


class ImageJob(ImageRequest):
    """One request. outputs: that its client asks for; num_bytes: of its images, as received and as decoded."""

    def __init__(
        self,
        client: Client,
        options: ImageRequestOptions,
        images: Images,
        outputs: Sequence[str],
        num_bytes: int,
        done: Callable[[ImageJob], None],
    ) -> None:
        super().__init__(options, images.count, done)  # type: ignore[arg-type]
        self.client, self.trace = client, client.trace
        self.images: Images | None = images
        self.outputs = outputs
        self.num_bytes = num_bytes


class ImageFront(Front[ImageJob]):
    """Has images decoded, and computed in batches with as many tokens as their deadlines allow."""

    takes = ("task",)

    def __init__(self, pb_utils: PbUtils, args: ModelArgs, open_model: Open | None = None) -> None:
        super().__init__(pb_utils, args)
        settings.refuse_unknown(args.parameters, _PARAMETERS)
        self._settings = serving = settings.read(TokenAdaptSettings, args.parameters)
        self._model = (open_model or open_vision_model)(args, serving)
        for message in self._model.reload_tasks():
            self.log.warning(message)
        self._costs = costs_of(self._model, serving, args.device)
        self._memory_bound = Bound("queue_mb", self._settings.queue_mb, "MiB")
        # Images of unanswered requests, and their bytes.
        self._num_unanswered, self._num_bytes = 0, 0
        self._lock = threading.Lock()
        scheduler: ImageScheduler[RequestImage] = ImageScheduler(self._costs, serving, now_ms())
        self._classes = scheduler.classes
        self._executor = Executor(self._model, scheduler, self.log)
        self._decoders = DecoderPool(self._settings.decode_threads, self._executor)
        if serving.algorithm in plan.ALGORITHMS:
            # Import and compile the solver now, not during the first request.
            plan.solve(plan.PlanProblem.of(0.0, [2.0], [[1.0]], [[1.0]]), serving.algorithm)
        self.begin(RequestMetrics("images", 0, serving.slo_ms))
        self._executor.start()
        self.log.info(
            f"ready: {len(self._model.tasks)} tasks, gammas {', '.join(map(str, self._costs.gammas))}, "
            f"batches of up to {self._costs.max_size}, algorithm {serving.algorithm}"
        )

    def parse(self, request: InferenceRequest, params: RequestParameters, client: Client) -> ImageJob:
        outputs = [name for name in self.args.outputs if name in request.requested_output_names()]
        options = self._options(params, {*outputs} & (_OF_VECTORS | _OF_LABELS))
        images = self._images(request)
        num_bytes = images.num_bytes + images.count * self._model.preprocessing.size**2 * _CHANNELS
        return ImageJob(client, options, images, outputs, num_bytes, self._settled)

    def start(self, job: ImageJob) -> None:
        with self._lock:
            self._memory_bound.require_unless_empty(_mebibytes(self._num_bytes), _mebibytes(job.num_bytes))
            self._count(job, 1)
        # The job outlives the images as they were received.
        images, job.images = job.images, None
        assert images is not None, "a job is started once"
        try:
            self._decoders.submit(job, images.decode)
        except OverloadedError:
            with self._lock:
                self._count(job, -1)
            raise

    def cancel(self, job: ImageJob) -> None:
        self._executor.cancel(job)

    def respond(self, job: ImageJob) -> InferenceResponse:
        values = output_values(job)
        return self.response({name: values[name] for name in job.outputs if name in values})

    def facts(self, job: ImageJob) -> RequestLine:
        return {
            "task": job.options.task.name,
            "images": job.num_images,
            "gammas": np.unique(job.gammas[job.batch_sizes > 0]).tolist(),
            "images_in_time": job.outcomes.count(IN_TIME),
            "compute_ms": job.compute_ms,
        }

    def recorded(self, job: ImageJob) -> Sequence[RequestLine]:
        options = job.options
        worth = {"task": options.task.name, "latency_ms": options.latency_ms, "utility": options.utility}
        return [{"length": 1, **worth, "slo_class": options.slo_class or ""}] * job.num_images

    def describe(self) -> Description:
        tasks, parameters = self._model.tasks, self.args.parameters
        default = tasks.get(self._default_task())
        vectors = tasks.get(EMBEDDING)
        kinds = [description.IMAGE_CLASSIFICATION] if vectors is None or len(tasks) > 1 else []
        kinds += [description.IMAGE_EMBEDDING] if vectors is not None else []
        similarity = json.loads(parameters.get("similarity") or "null")
        return Description(
            kinds[0],
            kinds[1:] or None,
            checkpoint=description.checkpoint_name(parameters),
            precision=parameters.get("precision"),
            embedding_size=vectors.embedding_size if vectors is not None else None,
            labels=None if default is None else default.labels or None,
            text_model=self._settings.text_model or None,
            similarity=similarity,
            tasks=sorted(tasks),
            checkpoint_version=description.checkpoint_version(parameters),
            engines=description.engines_version(parameters.get("manifest_sha256", "")),
            registry=description.registry_version({name: task.sha256 for name, task in tasks.items()}),
        )

    def load(self) -> float:
        return self._num_unanswered

    def metrics(self) -> Sequence[Metric]:
        # Running images can belong to a failed request that is answered already.
        waiting: Callable[[], int] = lambda: max(0, self._num_unanswered - self._executor.num_running)  # noqa: E731
        return [
            *self._executor.metrics.exported,
            *self._classes.metrics(),
            Gauge("requests_waiting", "Images waiting", waiting),
            Gauge("requests_running", "Images in the running and the next batch", lambda: self._executor.num_running),
            Gauge("tasks", "Tasks served", lambda: len(self._model.tasks)),
            Gauge("cost_factor", "Measured over profiled time of recent batches", lambda: self._costs.factor),
        ]

    def steps(self) -> Sequence[StepCounter]:
        return [self._decoders.steps, *self._executor.steps]

    def stop(self) -> None:
        self._decoders.close()
        self._executor.close()

    def _settled(self, job: ImageJob) -> None:
        with self._lock:
            self._count(job, -1)
        self.done(job)

    def _count(self, job: ImageJob, sign: int) -> None:
        self._num_unanswered += sign * job.num_images
        self._num_bytes += sign * job.num_bytes

    def _options(self, parameters: RequestParameters, outputs: set[str]) -> ImageRequestOptions:
        """The request's own parameters, completed by the model's settings and then by the task's.

        outputs: those that it wants, of _OF_VECTORS and _OF_LABELS.
        """
        tasks, serving = self._model.tasks, self._settings
        name = parameters.task or (EMBEDDING if outputs == _OF_VECTORS else self._default_task())
        registered = ", ".join(sorted(tasks))
        if not name:
            raise InvalidInputError("parameter task", None, f"the name of a registered task ({registered})")
        if name not in tasks:
            raise NotFoundError(f"parameter task: no task {name!r}; registered tasks: {registered}")
        task = tasks[name]
        served = _OF_VECTORS if task.embedding_size else _OF_LABELS
        if outputs and not outputs & served:
            allowed = f"{', '.join(sorted(served))}, which task {name} has"
            raise InvalidInputError("outputs", ", ".join(sorted(outputs)), allowed)
        if task.accuracy.keys().isdisjoint(self._costs.gammas):
            gammas = ", ".join(map(str, self._costs.gammas))
            raise InvalidInputError("parameter task", name, f"a task with prompts: use_gammas is {gammas}")
        latency_ms = parameters.latency_ms or serving.latency_ms or task.latency_ms
        if latency_ms > MAX_LATENCY_MS:
            raise InvalidInputError("parameter latency_ms", latency_ms, f"at most {MAX_LATENCY_MS:g}")
        utility = task.utility if parameters.utility is None else parameters.utility
        if not 0 <= utility <= MAX_UTILITY:
            raise InvalidInputError("parameter utility", utility, f"0 to {MAX_UTILITY:g}")
        return ImageRequestOptions(task, latency_ms, utility, parameters.slo_class)

    def _default_task(self) -> str:
        """The task of requests that name none; empty where they must name one."""
        labelled = [task for task in self._model.tasks.values() if task.labels]
        default = next((task.name for task in labelled if task.is_default or len(labelled) == 1), "")
        of_vectors = EMBEDDING if EMBEDDING in self._model.tasks and not labelled else ""
        return self._settings.task or default or of_vectors

    def _images(self, request: InferenceRequest) -> Images:
        """The images of a request. Checks shapes, types and the size of PIXELS only."""
        files, pixels = (self._array(request, name) for name in ("IMAGE", "PIXELS"))
        if (files is None) == (pixels is None):
            inputs = "none" if files is None else "IMAGE and PIXELS"
            raise InvalidInputError("inputs", inputs, "either IMAGE or PIXELS")
        preprocessing, max_pixels = self._model.preprocessing, self._settings.max_pixels
        if files is not None:
            if files.ndim != 2 or files.shape[1] != 1 or not len(files):
                raise InvalidInputError("IMAGE", list(files.shape), "shape [n, 1] with n at least 1")
            contents = [_bytes(value, row) for row, value in enumerate(files[:, 0])]
            num_bytes = sum(map(len, contents))
            return Images(
                len(contents),
                num_bytes,
                lambda row: image_decoding.decode(contents[row], preprocessing, max_pixels, row),
            )
        if pixels.ndim != 4 or pixels.shape[3] != _CHANNELS or 0 in pixels.shape:
            raise InvalidInputError("PIXELS", list(pixels.shape), "shape [n, height, width, 3], all above 0")
        image_decoding.require_size(pixels.shape[2], pixels.shape[1], max_pixels, 0)
        # Triton frees its buffer when `execute` returns.
        copied = np.array(pixels, dtype=np.uint8)
        return Images(
            len(copied), copied.nbytes, lambda row: image_decoding.fit(copied[row], preprocessing, max_pixels, row)
        )

    def _array(self, request: InferenceRequest, name: str) -> Any:
        tensor = self.pb_utils.get_input_tensor_by_name(request, name)
        return None if tensor is None else tensor.as_numpy()


def _mebibytes(num_bytes: int) -> int:
    return -(-num_bytes // 2**20)


def _bytes(value: Any, row: int) -> bytes:
    if isinstance(value, bytes):
        return value
    raise InvalidInputError("IMAGE", type(value).__name__, "the bytes of a JPEG or PNG file", row)


# From the parameters of a model to the model and its costs.


def open_vision_model(args: ModelArgs, serving: TokenAdaptSettings) -> ImageModel:
    """The model that the parameters name."""
    emulation = settings.read(EmulatedSettings, args.parameters)
    if emulation.provider == EMULATED:
        return _EMULATED[EMULATED](args.folder / emulation.profile_file)
    # Imports the engine libraries.
    from shapeshift.token_adapt.model import vision_model

    generated = settings.read(GeneratedSettings, args.parameters)
    if not generated.engines:
        raise InvalidInputError("engines", "", "a folder of engines; run `shapeshift engines`")
    engines, tasks = ((args.folder / path).resolve() for path in (generated.engines, serving.tasks_dir))
    return vision_model.open_model(engines, tasks, serving.threads, generated.manifest_sha256 or None, args.device)


def costs_of(model: ImageModel, serving: TokenAdaptSettings, device: int | None) -> Costs:
    """What batches cost at the gammas to choose from. device: the GPU that computes them, None for the CPU.

    Raises InvalidInputError for gammas that the model does not have, and where the memory takes no image.
    """
    gammas = serving.gammas(model.gammas)
    available = ", ".join(map(str, model.gammas))
    for gamma in gammas:
        require(gamma in model.gammas, "use_gammas", gamma, f"gammas of the model: {available}")
    memory_mb = float(serving.memory_mb) or _available_mb(device)
    batch_size = _batch_size([model.profiles[gamma] for gamma in gammas], serving, memory_mb)
    return Costs(model.profiles, gammas, batch_size, memory_mb)


def _available_mb(device: int | None) -> float:
    """MiB that batches may take: of the GPU's memory, without one of this machine's."""
    return hardware.available_mb() if device is None else hardware.DEVICE_MEMORY["cuda"](device)[0]


def _batch_size(profiles: Sequence[GammaProfile], serving: TokenAdaptSettings, memory_mb: float) -> int:
    """The largest batch: limited by memory, and by `batch_size` or what the throughput needs."""
    smallest_mb = min(profile.memory_mb for profile in profiles)
    limit = serving.batch_size or _MOST_IMAGES
    if smallest_mb > 0:
        limit = int(min(limit, memory_mb / smallest_mb - 1e-9))
    require(limit >= 1, "memory_mb", memory_mb, f"above {smallest_mb:g}, the memory of one image")
    if serving.batch_size:
        return limit
    return efficient_batch_size(min(profiles, key=lambda profile: abs(profile.gamma)), limit, _THROUGHPUT_SHARE)
