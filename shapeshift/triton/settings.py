"""Settings of a server that this project starts."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path

from shapeshift.errors import InvalidInputError
from shapeshift.settings import require
from shapeshift.triton.names import check_model_name

ALLOW_PUBLIC = "SHAPESHIFT_ALLOW_PUBLIC"
GRPC_URL = "SHAPESHIFT_GRPC_URL"
KNOWN_VULNERABILITIES = "CVE-2025-23310, -23316, -23317, -23319, -23320 and -23334"


@dataclass(frozen=True)
class ServerSettings:
    """How a server is started.

    repositories, backend_directories  folders; relative ones are allowed
    models                             loaded before the server is ready
    triton                             folder of the server
    run_directory                      folder of the key, the log and the record of the run
    host                               address to bind to; one that others can reach requires both `allow_public` and
                                       SHAPESHIFT_ALLOW_PUBLIC=1 in the environment
    log_file                           default: server.log in the run directory
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
    exit_timeout_s: int = 5
    log_file: Path | None = None
    allow_public: bool = False

    def __post_init__(self) -> None:
        require(bool(self.repositories), "repositories", self.repositories, "must name at least one folder")
        for model in self.models:
            check_model_name(model)
        ports = list(self.ports.values())
        for name, port in self.ports.items():
            require(0 < port < 65536, f"{name}_port", port, "must be 1 to 65535")
            require(ports.count(port) == 1, f"{name}_port", port, "must differ from the other ports")
        require(0 < self.exit_timeout_s <= 5, "exit_timeout_s", self.exit_timeout_s, "must be 1 to 5 seconds")
        if self.is_public and not (self.allow_public and os.environ.get(ALLOW_PUBLIC) == "1"):
            raise InvalidInputError(
                "host",
                self.host,
                f"this server version has known vulnerabilities ({KNOWN_VULNERABILITIES}): stay on 127.0.0.1, use an"
                f" official container 26.03 or newer, or set both --allow-public and {ALLOW_PUBLIC}=1",
            )

    @property
    def ports(self) -> dict[str, int]:
        """The port of each protocol: http, grpc, metrics."""
        return {"http": self.http_port, "grpc": self.grpc_port, "metrics": self.metrics_port}

    @property
    def is_public(self) -> bool:
        """Whether other machines can reach the server."""
        return not is_loopback(self.host)

    @property
    def address(self) -> str:
        """The address that the server binds to."""
        return "127.0.0.1" if self.host == "localhost" else self.host

    @property
    def reachable(self) -> str:
        """The address at which this machine reaches the server."""
        return "127.0.0.1" if self.address == "0.0.0.0" else self.address

    @property
    def log(self) -> Path:
        """The file for the server's output."""
        return self.log_file or self.run_directory / "server.log"

    @property
    def record(self) -> Path:
        """The file that lists the processes and shared-memory regions of the run."""
        return self.run_directory / "server.json"

    @property
    def key_file(self) -> Path:
        """The file with the key for the restricted interfaces."""
        return self.run_directory / "key"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address. Raises InvalidInputError for what is no address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.IPv4Address(host).is_loopback
    except ValueError:
        raise InvalidInputError("host", host, "must be an IPv4 address or localhost") from None


def own_grpc_url(stated: str = "") -> str:
    """HOST:PORT of the gRPC interface of the server that this process, a backend's, belongs to.

    `stated`, else the variable that `command_line.environment` sets for the server, else Triton's default.
    """
    return stated or os.environ.get(GRPC_URL) or "localhost:8001"
