"""Settings of a server that this project starts."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shapeshift.errors import InvalidInputError
from shapeshift.serving.events import TRACE_RATE_VARIABLE, TRACES_VARIABLE
from shapeshift.settings import require
from shapeshift.triton.endpoint import Tls
from shapeshift.triton.names import check_model_name

ALLOW_PUBLIC = "SHAPESHIFT_ALLOW_PUBLIC"
_URL = re.compile(r"https?://[^\s,=]+")
KNOWN_VULNERABILITIES = "CVE-2025-23310, -23316, -23317, -23319, -23320 and -23334"


@dataclass(frozen=True)
class ServerSettings:
    """How a server is started.

    repositories, backend_directories  folders; relative ones are allowed
    models                             loaded before the server is ready
    triton                             folder of the server
    run_directory                      folder of the key, the log and the record of the run
    host                               address to bind to; one that others can reach requires SHAPESHIFT_ALLOW_PUBLIC=1
                                       in the environment
    grpc_host                          address to bind gRPC to, where it is not `host`; one that others can reach
                                       requires `tls`, or what `host` requires
    tls                                files of mutual TLS for gRPC; None for plain text
    control_key                        file of the key for model control; default: key in the run directory
    variables                          of the environment of the server's processes, beside those of this process
    complete_configs                   whether the server completes what configurations leave out; for that it starts
                                       each Python model's process once more, and ends it, at every load
    traces                             URL that traces are sent to, by OTLP over HTTP; empty: nothing is traced
    trace_rate                         how many requests come to one that is traced
    keep_going                         whether the server serves the models that load although others do not; else it
                                       ends
    Raises InvalidInputError with the name of the field.
    """

    repositories: tuple[Path, ...]
    models: tuple[str, ...] = ()
    backend_directories: tuple[Path, ...] = ()
    triton: Path = Path("build/triton")
    run_directory: Path = Path("build/run")
    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    grpc_host: str = ""
    tls: Tls | None = None
    control_key: Path | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    complete_configs: bool = True
    keep_going: bool = False
    traces: str = ""
    trace_rate: int = 1000

    def __post_init__(self) -> None:
        require(bool(self.repositories), "repositories", self.repositories, "must name at least one folder")
        for model in self.models:
            check_model_name(model)
        allowed = "a URL such as http://localhost:4318/v1/traces"
        require(not self.traces or _URL.fullmatch(self.traces) is not None, "traces", self.traces, allowed)
        require(self.trace_rate >= 1, "trace_rate", self.trace_rate, "at least 1")
        ports = list(self.ports.values())
        for name, port in self.ports.items():
            require(0 < port < 65536, f"{name}_port", port, "must be 1 to 65535")
            require(ports.count(port) == 1, f"{name}_port", port, "must differ from the other ports")
        if self.is_public and os.environ.get(ALLOW_PUBLIC) != "1":
            raise InvalidInputError(
                "grpc_host" if is_loopback(self.host) else "host",
                self.grpc_host if is_loopback(self.host) else self.host,
                f"this server version has known vulnerabilities ({KNOWN_VULNERABILITIES}): stay on 127.0.0.1, use an"
                f" official container 26.03 or newer, or set {ALLOW_PUBLIC}=1 in the environment",
            )

    @property
    def ports(self) -> dict[str, int]:
        """The port of each protocol: http, grpc, metrics."""
        return {"http": self.http_port, "grpc": self.grpc_port, "metrics": self.metrics_port}

    @property
    def is_public(self) -> bool:
        """Whether other machines can reach the server without a certificate."""
        grpc = self.grpc_address
        is_local = grpc == "[::1]" if grpc.startswith("[") else is_loopback(grpc)
        return not is_loopback(self.host) or (self.tls is None and not is_local)

    @property
    def address(self) -> str:
        """The address that the server binds to."""
        return "127.0.0.1" if self.host == "localhost" else self.host

    @property
    def reachable(self) -> str:
        """The address at which this machine reaches the server."""
        return "127.0.0.1" if self.address == "0.0.0.0" else self.address

    @property
    def grpc_address(self) -> str:
        """The address that gRPC binds to."""
        return "127.0.0.1" if self.grpc_host == "localhost" else self.grpc_host or self.address

    @property
    def grpc_url(self) -> str:
        """HOST:PORT at which this machine reaches gRPC."""
        host = "127.0.0.1" if self.grpc_address == "0.0.0.0" else self.grpc_address
        return f"{host}:{self.grpc_port}"

    @property
    def metrics_url(self) -> str:
        """The URL of the metrics page on this machine."""
        return f"http://{self.reachable}:{self.metrics_port}/metrics"

    @property
    def shared_variables(self) -> dict[str, str]:
        """`variables`, and those for `tls` and traces: for the server's processes and those beside it."""
        secured = {} if self.tls is None else self.tls.variables
        traced = {TRACES_VARIABLE: self.traces, TRACE_RATE_VARIABLE: str(self.trace_rate)} if self.traces else {}
        return {**secured, **traced, **self.variables}

    @property
    def log(self) -> Path:
        """The file for the server's output."""
        return self.run_directory / "server.log"

    @property
    def events(self) -> Path:
        """The folder of what the models' processes did last, see `serving.events`."""
        return self.run_directory.resolve() / "events"

    @property
    def record(self) -> Path:
        """The file that lists the processes and shared-memory regions of the run."""
        return self.run_directory / "server.json"

    @property
    def key_file(self) -> Path:
        """The file with the key for the restricted interfaces."""
        return self.control_key or self.run_directory / "key"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address. Raises InvalidInputError for what is no address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.IPv4Address(host).is_loopback
    except ValueError:
        raise InvalidInputError("host", host, "must be an IPv4 address or localhost") from None
