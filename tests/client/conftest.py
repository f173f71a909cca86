"""Fake inference servers over gRPC and HTTP that delay and fail on request."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
import numpy as np
import pytest
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc

VECTOR = 384


class FakeTriton(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Answers EMBEDDING rows filled with the size of the first input's content.

    Request parameters control it: `delay_s` (wait, in parallel), `service_s` (wait, one request at a time), `fail`
    (abort with this status). `failures` holds statuses for the next requests. `received`: all requests in order.
    `config`: of every model.
    """

    def __init__(self) -> None:
        self.received: list[service_pb2.ModelInferRequest] = []
        self.failures: deque[grpc.StatusCode] = deque()
        self.config = model_config_pb2.ModelConfig()
        self._one_at_a_time = threading.Lock()
        self._stopping = threading.Event()
        self._server = grpc.server(ThreadPoolExecutor(max_workers=100))
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._server)
        self.url = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def stop(self) -> None:
        self._stopping.set()
        self._server.stop(grace=None).wait(10)

    def ServerLive(self, request: object, context: grpc.ServicerContext) -> object:  # noqa: N802
        return service_pb2.ServerLiveResponse(live=True)

    def ModelConfig(self, request: object, context: grpc.ServicerContext) -> object:  # noqa: N802
        return service_pb2.ModelConfigResponse(config=self.config)

    def ModelInfer(  # noqa: N802
        self, request: service_pb2.ModelInferRequest, context: grpc.ServicerContext
    ) -> service_pb2.ModelInferResponse:
        self.received.append(request)
        parameters = dict(request.parameters)
        if "delay_s" in parameters:
            self._stopping.wait(parameters["delay_s"].double_param)
        if "service_s" in parameters:
            with self._one_at_a_time:
                self._stopping.wait(parameters["service_s"].double_param)
        if "fail" in parameters:
            name = parameters["fail"].string_param
            context.abort(grpc.StatusCode[name], f"fake failure {name}")
        if self.failures:
            context.abort(self.failures.popleft(), "fake failure of the next request")
        rows = request.inputs[0].shape[0]
        answer = service_pb2.ModelInferResponse(model_name=request.model_name, id=request.id)
        answer.outputs.add(name="EMBEDDING", datatype="FP32", shape=[rows, VECTOR])
        size = len(request.raw_input_contents[0])
        answer.raw_output_contents.append(np.full((rows, VECTOR), size, dtype=np.float32).tobytes())
        return answer


class FakeTritonHttp(ThreadingHTTPServer):
    """Answers JSON with EMBEDDING rows.

    `failures` holds HTTP statuses for the next requests; `bodies` the JSON part of all requests.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"127.0.0.1:{self.server_address[1]}"
        self.failures: deque[int] = deque()
        self.bodies: list[dict[str, object]] = []
        self.paths: list[str] = []


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeTritonHttp

    def do_POST(self) -> None:  # noqa: N802
        body = self.rfile.read(int(self.headers["Content-Length"]))
        body = body[: int(self.headers.get("Inference-Header-Content-Length", len(body)))]
        self.server.paths.append(self.path)
        self.server.bodies.append(json.loads(body))
        status = self.server.failures.popleft() if self.server.failures else 200
        answer: dict[str, object] = {"error": f"fake failure {status}"}
        if status == 200:
            rows = self.server.bodies[-1]["inputs"][0]["shape"][0]  # type: ignore[index]
            data = [0.5] * (rows * VECTOR)
            output = {"name": "EMBEDDING", "datatype": "FP32", "shape": [rows, VECTOR], "data": data}
            answer = {"model_name": "encode", "model_version": "1", "outputs": [output]}
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[FakeTriton]:
    fake = FakeTriton()
    yield fake
    fake.stop()


@pytest.fixture
def http_server() -> Iterator[FakeTritonHttp]:
    fake = FakeTritonHttp()
    thread = threading.Thread(target=fake.serve_forever, daemon=True)
    thread.start()
    yield fake
    fake.shutdown()
    fake.server_close()
    thread.join(10)
