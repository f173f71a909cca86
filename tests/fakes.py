"""Triton's Python interface as a backend sees it, without a server: enough to run `backends/*/model.py`.

Every response is recorded, and so is every breach of the rules that a real server enforces or suffers from:
a response after the last one, more than one from a model that is not decoupled, a question whether a request
was cancelled after its last response, a metric whose family was collected.
"""

from __future__ import annotations

import copy
import json
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, Protocol, TypeVar, overload

import numpy as np

from shapeshift.serving import pb_utils as triton

FINAL = 1


class TritonError:
    """A text and a code."""

    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        self._message = message
        self._code = code

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code


class TritonModelException(Exception):  # noqa: N818  Triton's name
    """What a backend raises when its model cannot be loaded."""


class ModelConfig:
    """What `auto_complete_config` gets; as Triton's, it refuses unknown properties, and other values of a tensor."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = copy.deepcopy(config)

    def as_dict(self) -> dict[str, Any]:
        return self._config

    def add_input(self, tensor: dict[str, Any]) -> None:
        self._add("input", tensor, {"name", "data_type", "dims", "optional"})

    def add_output(self, tensor: dict[str, Any]) -> None:
        self._add("output", tensor, {"name", "data_type", "dims"})

    def set_max_batch_size(self, size: int) -> None:
        if self._config["max_batch_size"] > size:
            raise ValueError("max_batch_size")
        self._config["max_batch_size"] = size

    def set_model_transaction_policy(self, policy: dict[str, bool]) -> None:
        if self._config.setdefault("model_transaction_policy", dict(policy)) != policy:
            raise ValueError("model_transaction_policy")

    def _add(self, kind: str, tensor: dict[str, Any], properties: set[str]) -> None:
        if not set(tensor) <= properties:
            raise ValueError(f"{kind} {tensor}")
        found = next((one for one in self._config[kind] if one["name"] == tensor["name"]), None)
        if found is None:
            self._config[kind].append(tensor)
        elif found["data_type"] in ("TYPE_INVALID", tensor["data_type"]) and found["dims"] in ([], tensor["dims"]):
            found |= tensor
        else:
            raise ValueError(f"{kind} {tensor}")


class Tensor:
    """A name and an array."""

    def __init__(self, name: str, values: np.ndarray) -> None:
        assert isinstance(name, str) and isinstance(values, np.ndarray), (name, type(values))
        self._name = name
        self._values = values

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._values

    def to_dlpack(self) -> np.ndarray:
        return self._values

    @classmethod
    def from_dlpack(cls, name: str, capsule: np.ndarray) -> Tensor:
        return cls(name, capsule)


class InferenceResponse:
    """Output tensors, or an error."""

    def __init__(self, output_tensors: Sequence[triton.Tensor] = (), error: triton.TritonError | None = None) -> None:
        assert all(isinstance(tensor, Tensor) for tensor in output_tensors)
        self._tensors = list(output_tensors)
        self._error = error

    def output_tensors(self) -> list[triton.Tensor]:
        return self._tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> triton.TritonError | None:
        return self._error


class Logger:
    """Keeps what was logged. levels: of the lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.levels: list[str] = []

    def log_info(self, text: str, level: str = "info") -> None:
        self.lines.append(text)
        self.levels.append(level)

    def log_warn(self, text: str) -> None:
        self.log_info(text, "warn")

    def log_error(self, text: str) -> None:
        self.log_info(text, "error")

    def requests(self, count: int) -> list[dict[str, Any]]:
        """What the lines say of requests, once so many have one."""
        end = time.monotonic() + 30
        while True:
            lines = [line.partition(": request ")[2] for line in list(self.lines)]
            values = [json.loads(line) for line in lines if line]
            if len(values) >= count:
                return values
            assert time.monotonic() < end, self.lines
            time.sleep(0.005)


class _Lines(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())


def logger(lines: list[str] | None = None) -> logging.Logger:
    """A log whose lines, of all levels, go to `lines`."""
    log = logging.Logger("test")
    log.addHandler(_Lines([] if lines is None else lines))
    return log


class Metric:
    """One series. Raises once its family was collected, as Triton's does."""

    def __init__(self, family: MetricFamily, labels: Mapping[str, str], values: dict[Any, float]) -> None:
        self._family = weakref.ref(family)
        self._kind = family.kind
        self._key = (family.name, frozenset(labels.items()))
        self._values = values
        assert self._key not in family.living, f"{self._key} was made twice"
        family.living[self._key] = self
        values[self._key] = 0.0

    def increment(self, amount: float) -> None:
        self._require_family()
        assert amount >= 0, f"{self._key} was made smaller"
        self._values[self._key] += amount

    def set(self, value: float) -> None:
        self._require_family()
        assert self._kind == "GAUGE", f"{self._key} is a counter"
        self._values[self._key] = value

    def _require_family(self) -> None:
        if self._family() is None:
            raise RuntimeError(f"the family of {self._key} was collected")


class MetricFamily:
    """A named kind of metric; `of(values)` makes the class for one process, with its series in `values`."""

    COUNTER = "COUNTER"
    GAUGE = "GAUGE"
    values: dict[Any, float]
    made: weakref.WeakValueDictionary[str, MetricFamily]
    living: weakref.WeakValueDictionary[Any, Metric]

    @classmethod
    def of(cls, values: dict[Any, float]) -> type[MetricFamily]:
        return type(
            "MetricFamily",
            (cls,),
            {"values": values, "made": weakref.WeakValueDictionary(), "living": weakref.WeakValueDictionary()},
        )

    def __init__(self, name: str, description: str, kind: str) -> None:
        assert description and kind in (self.COUNTER, self.GAUGE)
        assert name not in self.made, f"family {name} was made twice"
        self.made[name] = self
        self.name = name
        self.kind = kind
        # As Triton's does: a series lives as long as its family, whoever else forgets it.
        self._series: list[Metric] = []

    def Metric(self, labels: Mapping[str, str]) -> Metric:  # noqa: N802  Triton's name
        self._series.append(Metric(self, labels, self.values))
        return self._series[-1]


class PbUtils:
    """Stands in for the module `triton_python_backend_utils`; `metrics` is what /metrics would show.

    models: those that an InferenceRequest reaches, by name, or name/version where it states one.
    """

    TRITONSERVER_RESPONSE_COMPLETE_FINAL = FINAL

    def __init__(self, with_metrics: bool = True) -> None:
        self.metrics: dict[Any, float] = {}
        self.models: dict[str, Any] = {}
        self.Logger = Logger()
        self.InferenceResponse = InferenceResponse
        self.Tensor: triton.Tensors = Tensor
        self.TritonError: triton.TritonErrors = TritonError
        self.TritonModelException = TritonModelException
        self.InferenceRequest: Callable[..., triton.BlsRequest] = partial(InferenceRequest, self)
        self.get_input_tensor_by_name = get_input_tensor_by_name
        if with_metrics:
            self.MetricFamily = MetricFamily.of(self.metrics)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the series `name` that carry at least these labels; KeyError where there is none."""
        wanted = frozenset(labels.items())
        found = [value for (series, own), value in dict(self.metrics).items() if series == name and wanted <= own]
        if not found:
            raise KeyError(f"{name} {labels}")
        return sum(found)


class ResponseSender:
    """Records what was sent; `answer` and `stream` wait for the final response."""

    def __init__(self, fail: Exception | None = None, decoupled: bool = False) -> None:
        self.responses: list[triton.InferenceResponse] = []
        self.breaches: list[str] = []
        self.cancelled = False
        self._fail = fail
        self._decoupled = decoupled
        self._ended = threading.Event()

    def send(self, response: triton.InferenceResponse, flags: int = 0) -> None:
        if self._fail is not None:
            raise self._fail
        if self._ended.is_set():
            self.breaches.append("a response after the final one")
        if flags != FINAL and not (self._decoupled and flags == 0):
            self.breaches.append(f"flags {flags}")
        self.responses.append(response)
        if flags == FINAL or not self._decoupled:
            self._ended.set()

    @property
    def has_ended(self) -> bool:
        """Whether the final response was sent."""
        return self._ended.is_set()

    def is_cancelled(self) -> bool:
        if self._ended.is_set():
            self.breaches.append("asked after the final response")
        return self.cancelled

    def answer(self, timeout_s: float = 30.0) -> triton.InferenceResponse:
        """The one response; AssertionError where there was none or more than one."""
        (response,) = self.stream(timeout_s)
        return response

    def stream(self, timeout_s: float = 30.0) -> list[triton.InferenceResponse]:
        """All responses once the last one was sent; AssertionError where none was the last."""
        assert self._ended.wait(timeout_s), "the request was not answered"
        assert not self.breaches, self.breaches
        return self.responses


class Trace:
    """The trace of a request; header: W3C's of the span that the server has begun, empty where it traces none."""

    def __init__(self, header: str) -> None:
        self._header = header

    def get_context(self) -> str | None:
        return json.dumps({"traceparent": self._header}) if self._header else None


class Request:
    """One inference request with inputs by name; `outputs` are the names that the caller wants.

    trace_header: see `Trace`.
    """

    trace_header = ""

    def __init__(
        self,
        outputs: Sequence[str] = ("EMBEDDING",),
        parameters: Mapping[str, Any] | None = None,
        request_id: str = "",
        decoupled: bool = False,
        **inputs: np.ndarray,
    ) -> None:
        self.tensors = {name: Tensor(name, values) for name, values in inputs.items()}
        self.sender = ResponseSender(decoupled=decoupled)
        self._parameters = json.dumps(dict(parameters)) if parameters else ""
        self._outputs = list(outputs)
        self._request_id = request_id

    def get_response_sender(self) -> ResponseSender:
        return self.sender

    def trace(self) -> Trace:
        return Trace(self.trace_header)

    def inputs(self) -> list[triton.Tensor]:
        return list(self.tensors.values())

    def parameters(self) -> str:
        return self._parameters

    def request_id(self) -> str:
        return self._request_id

    def requested_output_names(self) -> list[str]:
        return self._outputs

    def vectors(self, name: str = "EMBEDDING") -> np.ndarray:
        """The named output of the answer; AssertionError with its text where it is an error."""
        return values_of(self.sender.answer())[name]

    def refusal(self) -> tuple[int, str]:
        """Code and text of the answer, which must be an error."""
        error = self.sender.answer().error()
        assert error is not None, "the request was served"
        return error.code(), error.message()


class InferenceRequest:
    """A request from one model to another, which stands in `pb_utils.models` with a method `execute`."""

    def __init__(
        self,
        pb_utils: PbUtils,
        model_name: str,
        inputs: Sequence[triton.Tensor],
        requested_output_names: Sequence[str],
        request_id: str = "",
        parameters: Mapping[str, Any] | None = None,
        model_version: int = -1,
    ) -> None:
        versioned = f"{model_name}/{model_version}"
        self._model = pb_utils.models.get(model_name if model_version < 0 else versioned)
        self._name = model_name
        named = {tensor.name(): tensor.as_numpy() for tensor in inputs}
        self._request = Request(requested_output_names, parameters, request_id, True, **named)

    @overload
    def exec(self, decoupled: Literal[False] = False) -> triton.InferenceResponse: ...

    @overload
    def exec(self, decoupled: Literal[True]) -> Iterator[triton.InferenceResponse]: ...

    def exec(self, decoupled: bool = False) -> Iterator[triton.InferenceResponse] | triton.InferenceResponse:
        if self._model is None:
            raise RuntimeError(f"Model '{self._name}' is not ready.")
        assert getattr(self._model, "decoupled", True) is decoupled, "the model is decoupled, or it is not"
        answered = self._model.execute([self._request])
        if answered:
            return answered[0]
        return iter([self._request.sender.answer()]) if decoupled else self._request.sender.answer()


def send_returned(requests: Sequence[Request], returned: triton.Returned) -> None:
    """Give what `execute` has returned to the requests' senders: clients see no difference."""
    for request, response in zip(requests, returned or [None] * len(requests), strict=True):
        if response is not None:
            request.sender.send(response, FINAL)


class Executing(Protocol):
    """A front."""

    def execute(self, requests: Sequence[triton.InferenceRequest], /) -> triton.Returned: ...


Front = TypeVar("Front", bound=Executing)


def as_served(front: Front) -> Front:
    """`front`, whose `execute` does `send_returned` by itself."""
    execute = front.execute
    front.execute = lambda requests: send_returned(requests, execute(requests))  # type: ignore
    return front


def values_of(response: triton.InferenceResponse) -> dict[str, np.ndarray]:
    """The outputs of a response by name; AssertionError with its text where it is an error."""
    error = response.error()
    assert error is None, error.message()
    return {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}


def get_input_tensor_by_name(request: triton.InferenceRequest, name: str) -> Tensor | None:
    assert isinstance(request, Request)
    return request.tensors.get(name)


def text_request(*texts: str | bytes, **others: Any) -> Request:
    """A request of so many texts, as TEXT [n, 1]."""
    rows = [[text.encode() if isinstance(text, str) else text] for text in texts]
    return Request(TEXT=np.array(rows, dtype=object).reshape(len(rows), 1), **others)


def ids_request(*rows: Sequence[int], **others: Any) -> Request:
    """A request of so many rows of ids, padded to one length, with their mask."""
    length = max(map(len, rows))
    ids = np.array([[*row, *[0] * (length - len(row))] for row in rows], dtype=np.int64)
    mask = np.array([[1] * len(row) + [0] * (length - len(row)) for row in rows], dtype=np.int64)
    return Request(INPUT_IDS=ids, ATTENTION_MASK=mask, **others)
