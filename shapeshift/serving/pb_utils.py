"""Types for Triton's module `triton_python_backend_utils`: the part of it that this project uses.

A backend passes the module itself, which only a server's process can import; `tests.fakes.PbUtils` stands in for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shapeshift.errors import UnsupportedError


class Tensor(Protocol):
    """An input or output with its values."""

    def name(self) -> str: ...

    def as_numpy(self) -> NDArray[Any]:
        """The values; of a request's input in memory that Triton frees once `execute` has returned."""
        ...

    def to_dlpack(self) -> Any:
        """A capsule of DLPack."""
        ...


class TritonError(Protocol):
    """The text and the code of a failure."""

    def message(self) -> str: ...

    def code(self) -> int: ...


class InferenceResponse(Protocol):
    """Outputs, or an error."""

    def output_tensors(self) -> Sequence[Tensor]: ...

    def has_error(self) -> bool: ...

    def error(self) -> TritonError | None: ...


class ResponseSender(Protocol):
    """Takes the responses to one request, from any thread."""

    def send(self, response: InferenceResponse, flags: int) -> None:
        """flags: TRITONSERVER_RESPONSE_COMPLETE_FINAL with the last response, else 0."""
        ...

    def is_cancelled(self) -> bool:
        """Whether the client has cancelled the request; not to be called after the last response (24.10)."""
        ...


class InferenceTrace(Protocol):
    """The trace of a request."""

    def get_context(self) -> str | None:
        """The W3C headers of the span that Triton has begun, as a JSON object; nothing where it traces no request."""
        ...


class InferenceRequest(Protocol):
    """A request that a backend receives."""

    def request_id(self) -> str: ...

    def inputs(self) -> Sequence[Tensor]: ...

    def parameters(self) -> str:
        """A JSON object, or an empty text."""
        ...

    def requested_output_names(self) -> Sequence[str]: ...

    def get_response_sender(self) -> ResponseSender: ...

    def trace(self) -> InferenceTrace | None: ...


Returned: TypeAlias = Sequence[InferenceResponse | None] | None
"""What `execute` returns: for each request its one response, or None where a sender answers it; None where senders
answer all, as always in a decoupled model."""


class BlsRequest(Protocol):
    """A request that a backend makes to another model; Triton's InferenceRequest too."""

    def exec(self) -> InferenceResponse:
        """The answer; blocks until it is there. Raises where the model is not loaded."""
        ...


class ModelConfig(Protocol):
    """What `auto_complete_config` reads and completes."""

    def as_dict(self) -> dict[str, Any]: ...

    def add_input(self, tensor: dict[str, Any]) -> None: ...

    def add_output(self, tensor: dict[str, Any]) -> None: ...

    def set_max_batch_size(self, size: int) -> None: ...

    def set_model_transaction_policy(self, policy: dict[str, bool]) -> None: ...


class MetricSeries(Protocol):
    """One series; Triton's Metric."""

    def increment(self, value: float) -> None: ...

    def set(self, value: float) -> None: ...


class MetricFamily(Protocol):
    """The series of one name."""

    def Metric(self, labels: Mapping[str, str]) -> MetricSeries: ...  # noqa: N802  Triton's name


class MetricFamilies(Protocol):
    """The class MetricFamily, which a server without metrics of backends lacks."""

    @property
    def COUNTER(self) -> Any: ...  # noqa: N802  Triton's name

    @property
    def GAUGE(self) -> Any: ...  # noqa: N802  Triton's name

    def __call__(self, name: str, description: str, kind: Any) -> MetricFamily: ...


class Tensors(Protocol):
    """The class Tensor."""

    def __call__(self, name: str, values: NDArray[Any], /) -> Tensor: ...

    def from_dlpack(self, name: str, capsule: Any, /) -> Tensor: ...


class TritonErrors(Protocol):
    """The class TritonError; its codes came over time, so that `getattr` looks for all but this one."""

    @property
    def INTERNAL(self) -> int: ...  # noqa: N802  Triton's name

    def __call__(self, message: str, code: int = ..., /) -> TritonError: ...


class Log(Protocol):
    """The server's log; Triton's Logger."""

    def log_info(self, message: str, /) -> None: ...

    def log_warn(self, message: str, /) -> None: ...

    def log_error(self, message: str, /) -> None: ...


# Inside the class below, these names are its members.
_Tensor: TypeAlias = Tensor
_InferenceResponse: TypeAlias = InferenceResponse
_InferenceRequest: TypeAlias = InferenceRequest
_TritonError: TypeAlias = TritonError


class PbUtils(Protocol):
    """The module. `MetricFamily` is not part of it: not every server has it, see `MetricFamilies`."""

    @property
    def TRITONSERVER_RESPONSE_COMPLETE_FINAL(self) -> int: ...  # noqa: N802  Triton's name

    @property
    def Logger(self) -> Log: ...  # noqa: N802  Triton's name

    @property
    def TritonError(self) -> TritonErrors: ...  # noqa: N802  Triton's name

    @property
    def TritonModelException(self) -> type[Exception]: ...  # noqa: N802  Triton's name

    @property
    def Tensor(self) -> Tensors: ...  # noqa: N802  Triton's name

    def InferenceResponse(  # noqa: N802  Triton's name
        self, output_tensors: Sequence[_Tensor] = ..., error: _TritonError | None = ...
    ) -> _InferenceResponse: ...

    def InferenceRequest(  # noqa: N802  Triton's name
        self,
        *,
        model_name: str,
        requested_output_names: Sequence[str],
        inputs: Sequence[_Tensor],
        parameters: Mapping[str, Any] = ...,
        model_version: int = ...,
    ) -> BlsRequest: ...

    def get_input_tensor_by_name(self, request: _InferenceRequest, name: str, /) -> _Tensor | None: ...


def require_numpy(pb_utils: PbUtils) -> None:
    """Raise UnsupportedError where Triton's stub reads this numpy's arrays wrongly: that of 24.10 does so with numpy 2,
    without an error."""
    sent = np.arange(3, dtype=np.int32)
    received = pb_utils.Tensor.from_dlpack("numpy", pb_utils.Tensor("numpy", sent).to_dlpack()).as_numpy()
    if not np.array_equal(received, sent):
        raise UnsupportedError(
            f"this server's Python stub reads arrays of numpy {np.__version__} wrongly; install numpy<2, or use a newer"
            " server"
        )
