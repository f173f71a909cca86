"""`python -m bench.fleet.stub_nodes NODES WORKERS`: stub nodes that speak /metrics and model control, and nothing else.

Each node has a front and its workers, which serve no request; their metrics pages have as many lines as real ones.
It prints the ports, JSON {"grpc": [..], "metrics": [..]}, and ends with its standard input.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from typing import Any

import grpc
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc

from bench.polymorph.emulated_server import SLO_MS, edges
from bench.polymorph.fleet import read_curve

FRONT = "encode"
_HOST = "127.0.0.1"
_PUBLISH_S = 1.0
# Texts a second of each length step of 8 tokens, at first and half a minute later.
_RATES = {64: 40.0, 128: 20.0, 256: 5.0, 512: 1.0}
_LATENCY_MS = (1, 2, 5, 10, 15, 20, 30, 50, 75, 100, 150, 200, 225, 300, 428, 500, 1000, 2000, 5000, 10000)


class StubNode(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """One node. number: of the node; workers: of its front, all loaded."""

    def __init__(self, number: int, workers: int) -> None:
        self._number = number
        self._seconds = 0
        front = {"placement": "partitioned", "slo_ms": SLO_MS, "bin_edges": json.dumps(edges()), **_profile()}
        self._configs: dict[str, dict[str, object]] = {
            FRONT: {**front, "workers": workers, "min_workers": workers},
        }
        for worker in range(workers):
            bin_ = edges()[(number + worker) % len(edges())]
            self._configs[f"{FRONT}_w{worker:02d}"] = {"worker_of": FRONT, "bin": bin_, "generation": 0}

    async def RepositoryIndex(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Every model, ready."""
        entry = service_pb2.RepositoryIndexResponse.ModelIndex
        return service_pb2.RepositoryIndexResponse(
            models=[entry(name=name, version="1", state="READY") for name in self._configs]
        )

    async def ModelConfig(self, request: Any, context: Any) -> Any:  # noqa: N802
        """The parameters of a model."""
        parameters = {
            name: model_config_pb2.ModelParameter(string_value=str(value))
            for name, value in self._configs[request.name].items()
        }
        config = model_config_pb2.ModelConfig(name=request.name, parameters=parameters)
        return service_pb2.ModelConfigResponse(config=config)

    async def RepositoryModelLoad(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Take over the parameters."""
        config = json.loads(request.parameters["config"].string_param)
        parameters = {name: value["string_value"] for name, value in config["parameters"].items()}
        self._configs[request.model_name] = parameters
        return service_pb2.RepositoryModelLoadResponse()

    async def metrics(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request for the metrics page."""
        await reader.readuntil(b"\r\n\r\n")
        body = "\n".join(self._lines()).encode() + b"\n"
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body)
        await writer.drain()
        writer.close()

    def tick(self) -> None:
        """One more second of heartbeats and traffic."""
        self._seconds += 1

    def _lines(self) -> Iterator[str]:
        seconds = self._seconds
        for place, name in enumerate(self._configs):
            labels = f'model="{name}",pid="{1000 + place}"'
            yield f"shapeshift_heartbeat_total{{{labels}}} {seconds}"
            for le in (*_LATENCY_MS, "+Inf"):
                yield f'shapeshift_request_latency_ms_bucket{{le="{le}",{labels}}} {seconds * 60}'
            for metric in ("success", "failure", "count", "exec_count", "duration_us", "queue_us", "compute_us"):
                yield f'nv_inference_{metric}{{model="{name}",version="1"}} {seconds * 60}'
            if name != FRONT:
                continue
            total = 0.0
            for edge in range(8, 520, 8):
                total += _RATES.get(edge, 0.0) * (1 + self._number % 3) * seconds
                yield f'shapeshift_request_tokens_bucket{{le="{edge}",{labels}}} {total}'
            for worker in self._configs:
                yield f'shapeshift_worker_outstanding{{worker="{worker}",{labels}}} 1'
                yield f'shapeshift_worker_timeouts{{worker="{worker}",{labels}}} 0'


def _profile() -> dict[str, str]:
    curve = read_curve()
    engines = [{"tokens": edge, "latency": [[edge, curve.at(edge)]]} for edge in edges()]
    return {"profile": json.dumps({"engines": engines})}


async def _serve(nodes: int, workers: int) -> None:
    stubs = [StubNode(number, workers) for number in range(nodes)]
    servers, ports = [], {"grpc": list[int](), "metrics": list[int]()}
    for stub in stubs:
        server = grpc.aio.server()
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(stub, server)
        ports["grpc"].append(server.add_insecure_port(f"{_HOST}:0"))
        await server.start()
        pages = await asyncio.start_server(stub.metrics, _HOST, 0)
        ports["metrics"].append(pages.sockets[0].getsockname()[1])
        servers.append((server, pages))
    print(json.dumps(ports), flush=True)
    ended = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    while not ended.done():
        await asyncio.wait([ended], timeout=_PUBLISH_S)
        for stub in stubs:
            stub.tick()
    for server, pages in servers:
        pages.close()
        await server.stop(None)


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), int(sys.argv[2])))
