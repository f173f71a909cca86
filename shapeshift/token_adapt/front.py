"""The front of a model that classifies images: Triton requests in, labels out, each within its own deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from shapeshift.errors import InvalidInputError, NotFoundError, OverloadedError
from shapeshift.serving import log, parameters
from shapeshift.serving.answers import Answers
from shapeshift.serving.cancellations import CancellationWatch
from shapeshift.serving.metrics import Counter, Gauge, Histogram, MetricsFlusher, RequestMeters
from shapeshift.serving.model_args import ModelArgs
from shapeshift.serving.sender import SenderThread
from shapeshift.token_adapt import images, loading
from shapeshift.token_adapt.adapter import TokenAdapter
from shapeshift.token_adapt.executor import Executor
from shapeshift.token_adapt.meters import ImageMeters
from shapeshift.token_adapt.request import ImageRequest, Wish, now_ms, tensors
from shapeshift.token_adapt.settings import GREATEST_UTILITY, LONGEST_LATENCY_MS

_OWN_PARAMETERS = ("task",)
Decode = Callable[[int], Any]


class ImageFront:
    """Owns the process' threads. `execute` never blocks and never raises; every request is answered once."""

    def __init__(self, pb_utils: Any, args: ModelArgs, open_model: loading.Open = loading.open_model) -> None:
        self._pb_utils = pb_utils
        self._log = log.of_model(pb_utils, args.name)
        loaded = loading.load(args, self._log, open_model)
        self._own, self._model = loaded.own, loaded.model
        self._outputs = args.outputs
        self._waiting = 0
        self._lock = threading.Lock()
        self._sender = SenderThread(pb_utils, self._log)
        self._watch = CancellationWatch(self._log)
        self._decoders = ThreadPoolExecutor(self._own.decode_threads, "decode")
        meters = ImageMeters(loaded.costs.gammas)
        adapter = TokenAdapter(loaded.costs, loaded.rules, now_ms())
        self._executor = Executor(self._model, adapter, meters, self._log)
        self._meters = RequestMeters("images", 1, self._own.slo_ms)
        self._answers = Answers(pb_utils, self._sender, self._meters)
        exported: list[Counter | Gauge | Histogram] = [
            self._meters.latency_ms,
            *self._meters.answered.values(),
            *meters.exported,
            Gauge("requests_waiting", "Images that wait", self._images_waiting),
            Gauge("requests_running", "Images that are computed or chosen next", lambda: self._executor.running),
            Gauge("tasks", "Tasks that are served", lambda: len(self._model.tasks)),
            Gauge("cost_factor", "What batches take over what the profile says", lambda: adapter.costs.factor),
        ]
        self._metrics = MetricsFlusher(pb_utils, args.name, exported, self._log)
        self._executor.start()

    def execute(self, requests: Sequence[Any]) -> None:
        """Let every request's images be decoded and wait; what cannot be served is answered with an error at once."""
        self._answers.start(requests, self._submit)

    def close(self) -> None:
        """Stop producers before consumers: decoding, execution, then the sender, then metrics."""
        self._watch.close()
        self._decoders.shutdown()
        self._executor.close()
        self._sender.close()
        self._metrics.close()

    def _submit(self, request: Any, sender: Any) -> None:
        wish = self._wish(parameters.parse(request.parameters(), _OWN_PARAMETERS))
        count, decode = self._inputs(request)
        wanted = [name for name in self._outputs if name in request.requested_output_names()]
        made = ImageRequest(wish, count, partial(self._finished, sender, wanted))
        self._take_room(count)
        self._watch.add(made, sender.is_cancelled, partial(self._executor.cancel, made))
        try:
            self._decoders.submit(self._decode, made, decode)
        except RuntimeError:
            made.fail(OverloadedError("the model is being unloaded; retry elsewhere"))

    def _wish(self, given: parameters.RequestParameters) -> Wish:
        tasks, own = self._model.tasks, self._own
        name = given.task or own.task or (next(iter(tasks)) if len(tasks) == 1 else "")
        known = ", ".join(sorted(tasks))
        if not name:
            raise InvalidInputError("parameter task", None, f"the name of a task: {known}")
        if name not in tasks:
            raise NotFoundError(f"parameter task: no task {name!r}; there are: {known}")
        task = tasks[name]
        latency_ms = given.latency_ms or own.latency_ms or task.latency_ms
        if latency_ms > LONGEST_LATENCY_MS:
            raise InvalidInputError("parameter latency_ms", latency_ms, f"at most {LONGEST_LATENCY_MS:g}")
        default = task.utility if own.utility is None else own.utility
        utility = default if given.utility is None else given.utility
        if not 0 <= utility <= GREATEST_UTILITY:
            raise InvalidInputError("parameter utility", utility, f"0 to {GREATEST_UTILITY:g}")
        return Wish(task, latency_ms, utility)

    def _inputs(self, request: Any) -> tuple[int, Decode]:
        """How many images the request has, and what makes the one of an index; checked as far as costs nothing."""
        files, pixels = (self._array(request, name) for name in ("IMAGE", "PIXELS"))
        if (files is None) == (pixels is None):
            what = "none" if files is None else "IMAGE and PIXELS"
            raise InvalidInputError("inputs", what, "either IMAGE or PIXELS")
        size, most = self._model.image_size, self._own.max_pixels
        if files is not None:
            if files.ndim != 2 or files.shape[1] != 1 or not len(files):
                raise InvalidInputError("IMAGE", list(files.shape), "shape [n, 1] with n at least 1")
            held = [_bytes(value, row) for row, value in enumerate(files[:, 0])]
            return len(held), lambda row: images.decode(held[row], size, most, row)
        if pixels.ndim != 4 or pixels.shape[3] != 3 or 0 in pixels.shape:
            raise InvalidInputError("PIXELS", list(pixels.shape), "shape [n, height, width, 3], none of them 0")
        # Copied: Triton's buffer is gone once `execute` has returned.
        kept = np.array(pixels, dtype=np.uint8)
        return len(kept), lambda row: images.fit(kept[row], size, most, row)

    def _array(self, request: Any, name: str) -> Any:
        tensor = self._pb_utils.get_input_tensor_by_name(request, name)
        return None if tensor is None else tensor.as_numpy()

    def _decode(self, request: ImageRequest, decode: Decode) -> None:
        try:
            squares = [decode(row) for row in range(request.images)]
        except Exception as error:  # noqa: BLE001  one bad image must not cost the other requests
            request.fail(error)
        else:
            self._executor.submit(request, squares)

    def _take_room(self, count: int) -> None:
        with self._lock:
            # An empty queue takes any request, so that no limit makes one impossible.
            if self._waiting and self._waiting + count > self._own.queue_images:
                held = f"{self._waiting} images wait, {count} more exceed {self._own.queue_images}"
                raise OverloadedError(f"the queue is full: {held}; retry later")
            self._waiting += count

    def _finished(self, sender: Any, wanted: list[str], request: ImageRequest) -> None:
        with self._lock:
            self._waiting -= request.images
        # On the sender's thread: it waits while Triton is being asked.
        before = partial(self._watch.remove, request)
        if request.error is not None:
            self._answers.fail(sender, request.error, before)
            return
        self._answers.send(sender, partial(self._response, request, wanted), request.arrived / 1e3, before=before)

    def _images_waiting(self) -> int:
        # Images of a request that is answered already, with an error, may still be running.
        return max(0, self._waiting - self._executor.running)

    def _response(self, request: ImageRequest, wanted: list[str]) -> Any:
        made = tensors(request)
        return self._pb_utils.InferenceResponse([self._pb_utils.Tensor(name, made[name]) for name in wanted])


def _bytes(value: Any, row: int) -> bytes:
    if isinstance(value, bytes):
        return value
    raise InvalidInputError("IMAGE", type(value).__name__, "the bytes of a JPEG or PNG file", row)
