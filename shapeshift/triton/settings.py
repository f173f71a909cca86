"""How a server is started."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path

from shapeshift.errors import InvalidInputError
from shapeshift.settings import require
from shapeshift.triton.names import check_model_name

ALLOW_PUBLIC = "SHAPESHIFT_ALLOW_PUBLIC"
KNOWN_FLAWS = "CVE-2025-23310, -23316, -23317, -23319, -23320 and -23334"


@dataclass(frozen=True)
class ServerSettings:
    """How a server is started. Folders may be relative; `models` are loaded before it is ready.

    A `host` that others can reach takes both `allow_public` and SHAPESHIFT_ALLOW_PUBLIC=1 in the environment.
    `log_file` is server.log in the run directory unless given. Raises InvalidInputError naming the field.
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
        require(bool(self.repositories), "repositories", self.repositories, "at least one folder is needed")
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
                f"this old server has known flaws ({KNOWN_FLAWS}): stay on 127.0.0.1, use an official"
                f" container 26.03 or newer, or insist with --allow-public and the variable {ALLOW_PUBLIC}=1",
            )

    @property
    def ports(self) -> dict[str, int]:
        """The ports by protocol: http, grpc, metrics."""
        return {"http": self.http_port, "grpc": self.grpc_port, "metrics": self.metrics_port}

    @property
    def is_public(self) -> bool:
        """Whether others than this machine reach the server."""
        return not _is_loopback(self.host)

    @property
    def address(self) -> str:
        """The address that the server binds to."""
        return "127.0.0.1" if self.host == "localhost" else self.host

    @property
    def reachable(self) -> str:
        """An address at which this machine reaches the server."""
        return "127.0.0.1" if self.address == "0.0.0.0" else self.address

    @property
    def log(self) -> Path:
        """Where the server's output goes."""
        return self.log_file or self.run_directory / "server.log"

    @property
    def record(self) -> Path:
        """Where the run's processes and regions are kept."""
        return self.run_directory / "server.json"

    @property
    def key_file(self) -> Path:
        """Where the key to the restricted interfaces lies."""
        return self.run_directory / "key"


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.IPv4Address(host).is_loopback
    except ValueError:
        raise InvalidInputError("host", host, "must be an IPv4 address or localhost") from None
