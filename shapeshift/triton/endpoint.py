"""The address of a server's gRPC interface, and the certificates with which it is reached."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shapeshift.settings import require


@dataclass(frozen=True)
class Tls:
    """Files of mutual TLS, in PEM. ca: signs every node's certificate; certificate, key: those of this machine."""

    ca: Path
    certificate: Path
    key: Path


@dataclass(frozen=True)
class Endpoint:
    """address: HOST:PORT; tls: None for plain text. Raises InvalidInputError for what is no address."""

    address: str
    tls: Tls | None = None

    def __post_init__(self) -> None:
        host, _, port = self.address.rpartition(":")
        valid = bool(host) and "/" not in host and port.isdecimal() and 0 < int(port) < 65536
        require(valid, "grpc", self.address, "must be HOST:PORT of a gRPC interface")
