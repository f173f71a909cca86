"""The parts of a front that a technique may replace: model, admission and requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shapeshift.fused_decode import loading
from shapeshift.fused_decode.engine.blocks import BlockPool
from shapeshift.fused_decode.engine.loop import DecodeLoop
from shapeshift.fused_decode.engine.speculation import Speculator
from shapeshift.fused_decode.policy.admission import Admission, FirstComeFirstServed
from shapeshift.fused_decode.policy.class_order import ClassOrder
from shapeshift.fused_decode.request import Request
from shapeshift.serving.description import GENERATION, Description, checkpoint_name, checkpoint_version
from shapeshift.serving.metrics import Metric
from shapeshift.serving.model_args import Log, ModelArgs
from shapeshift.serving.parameters import RequestParameters
from shapeshift.serving.pb_utils import InferenceRequest

# HTTP clients name a request with `id`, which Triton's generate endpoints pass on as a parameter. A front that
# forwards sets `forwarded`: it needs the code of an error in the error's text.
OWN_PARAMETERS = ("id", "forwarded")


class DecodeService:
    """A model that serves its requests in order of arrival.

    own_parameters       request parameters that it knows beyond those of every front
    sampling_parameters  those of them that the input `sampling_parameters` may hold too
    request_type         the class of its requests
    pool                 the blocks of the cache
    """

    own_parameters: tuple[str, ...] = OWN_PARAMETERS
    sampling_parameters: tuple[str, ...] = ()
    request_type: type[Request] = Request

    def __init__(
        self,
        args: ModelArgs,
        log: Log,
        load_runtime: loading.Load = loading.load_runtime,
        further: Sequence[type] = (),
    ) -> None:
        """further: see `loading.load`."""
        self.loaded = loading.load(args, log, load_runtime, further)
        self._args = args
        runtime, settings = self.loaded.runtime, self.loaded.settings
        self.pool = BlockPool(runtime.blocks, caching=settings.enable_prefix_caching and runtime.shares_prefixes)

    def admission(self) -> Admission[Request]:
        """The admission policy; called once."""
        settings = self.loaded.settings
        order: ClassOrder[Request] = ClassOrder(settings.classes, settings.overtaken_requests)
        return FirstComeFirstServed(settings.queue_requests, settings.queue_tokens, order)

    def describe(self) -> Description:
        """What the model is."""
        loaded = self.loaded
        return Description(
            GENERATION,
            checkpoint=checkpoint_name(self._args.parameters),
            precision=self._args.parameters.get("precision"),
            max_tokens=loaded.runtime.max_length,
            chat_template=loaded.chat.text,
            tool_use_template=loaded.chat.tool_use,
            special_tokens=loaded.chat.special_tokens,
            stream=self._args.name,
            checkpoint_version=checkpoint_version(self._args.parameters),
        )

    def affinity(self, request: InferenceRequest) -> str:
        """What the node of a fleet that serves `request` should have in memory; empty: nothing that differs."""
        return ""

    def speculator(self) -> Speculator | None:
        """What proposes tokens; called once. None: nothing does."""
        settings = self.loaded.settings
        if not settings.num_speculative_tokens:
            return None
        return Speculator(settings.num_speculative_tokens, settings.prompt_lookup_min, settings.prompt_lookup_max)

    def prepare(self, request: Request, given: RequestParameters) -> None:
        """Called with a new request of `request_type` and its parameters. Raises ShapeshiftError."""
        request.slo_class = given.slo_class

    def complete(self, request: Request, text: bytes, submit: Callable[[], None]) -> None:
        """Find out what the admission needs to know of a prepared request, whose prompt is `text`; then call `submit`.

        Never blocks: what takes time is done, and `submit` called, on another thread.
        """
        submit()

    def exported(self) -> list[Metric]:
        """Metrics beside those of the front and the loop."""
        return []

    def open(self, loop: DecodeLoop) -> None:
        """The loop is about to start."""

    def forget(self, request: Request) -> None:
        """The last response of `request`, which was prepared, was sent. Any thread calls this."""

    def close(self) -> None:
        """The loop has ended."""
        self.loaded.runtime.close()
