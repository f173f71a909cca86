"""A server without Triton that answers model control over gRPC, and notes what it loads."""

from __future__ import annotations

import json
from concurrent import futures
from typing import Any

import grpc
from google.protobuf import json_format
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc


class FakeControl(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """models: that are loaded, by name their configuration as JSON. loads: names and configurations, in order.

    dead: models whose process has died, which are in the index, and not ready (25.12).
    """

    def __init__(self, models: dict[str, dict[str, Any]]) -> None:
        self.models = models
        self.dead: set[str] = set()
        self.loads: list[tuple[str, dict[str, Any] | None]] = []
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def close(self) -> None:
        self._server.stop(0).wait()

    def RepositoryIndex(self, request: Any, context: Any) -> Any:  # noqa: N802  Triton's name
        answer = service_pb2.RepositoryIndexResponse()
        for name in self.models:
            answer.models.add(name=name, version="1", state="READY")
        return answer

    def ModelReady(self, request: Any, context: Any) -> Any:  # noqa: N802  Triton's name
        return service_pb2.ModelReadyResponse(ready=request.name in self.models.keys() - self.dead)

    def ModelConfig(self, request: Any, context: Any) -> Any:  # noqa: N802  Triton's name
        config = json_format.ParseDict(self.models[request.name], model_config_pb2.ModelConfig())
        return service_pb2.ModelConfigResponse(config=config)

    def RepositoryModelLoad(self, request: Any, context: Any) -> Any:  # noqa: N802  Triton's name
        text = request.parameters["config"].string_param if "config" in request.parameters else ""
        self.loads.append((request.model_name, json.loads(text) if text else None))
        return service_pb2.RepositoryModelLoadResponse()
