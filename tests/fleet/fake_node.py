"""A node without Triton: a gRPC server in this process that speaks the used part of Triton's protocol."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import np_to_triton_dtype, triton_to_np_dtype

from shapeshift.triton.endpoint import Tls

Tensors = Mapping[str, np.ndarray]


class Refusal(Exception):  # noqa: N818  an answer of the protocol
    """Ends a call with a status of gRPC."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code


class FakeNode(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Answers for `models` by `infer(model, inputs)`, which may raise Refusal; `model/version` for a stated version.

    versions: that models have loaded, by default 1; asked: how often for the list of models; cut_off: calls that ended
    before `infer` had an answer; open: while it is not set, the list of models is not answered.
    """

    def __init__(
        self, models: set[str], infer: Callable[[str, Tensors], Tensors], port: int = 0, tls: Tls | None = None
    ) -> None:
        self.models = models
        self.versions: dict[str, Sequence[int]] = {}
        self.asked = self.cut_off = 0
        self.open = threading.Event()
        self.open.set()
        self._infer = infer
        self._server = grpc.server(futures.ThreadPoolExecutor(32), options=[("grpc.so_reuseport", 0)])
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._server)
        address = f"127.0.0.1:{port}"
        if tls is None:
            self.port = self._server.add_insecure_port(address)
        else:
            pair = (tls.key.read_bytes(), tls.certificate.read_bytes())
            credentials = grpc.ssl_server_credentials([pair], tls.ca.read_bytes(), require_client_auth=True)
            self.port = self._server.add_secure_port(address, credentials)
        self._server.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def close(self) -> None:
        """End; calls in flight are cut off."""
        self.open.set()
        self._server.stop(0).wait()

    def ModelStatistics(self, request: Any, context: Any) -> Any:  # noqa: N802  Triton's name
        self.asked += 1
        self.open.wait(30)
        if request.name and request.name not in self.models:
            context.abort(grpc.StatusCode.NOT_FOUND, f"requested model '{request.name}' is not found")
        found = [
            service_pb2.ModelStatistics(name=name, version=str(version))
            for name in ([request.name] if request.name else sorted(self.models))
            for version in self.versions.get(name, (1,))
        ]
        return service_pb2.ModelStatisticsResponse(model_stats=found)

    def ServerMetadata(self, request: Any, context: Any) -> Any:  # noqa: N802  Triton's name
        return service_pb2.ServerMetadataResponse(name="triton", version="2.51.0")

    def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: N802  Triton's name
        answered = threading.Event()
        context.add_callback(lambda: self._count(answered))
        inputs = {
            one.name: np.frombuffer(raw, triton_to_np_dtype(one.datatype)).reshape(list(one.shape))
            for one, raw in zip(request.inputs, request.raw_input_contents, strict=True)
        }
        try:
            outputs = self._infer("/".join(filter(None, (request.model_name, request.model_version))), inputs)
        except Refusal as refused:
            answered.set()
            context.abort(refused.code, str(refused))
        answered.set()
        answer = service_pb2.ModelInferResponse(model_name=request.model_name)
        for name, values in outputs.items():
            answer.outputs.add(name=name, datatype=np_to_triton_dtype(values.dtype), shape=values.shape)
            answer.raw_output_contents.append(values.tobytes())
        return answer

    def _count(self, answered: threading.Event) -> None:
        self.cut_off += not answered.is_set()
