"""Settings of the gateway."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from shapeshift.errors import InvalidInputError
from shapeshift.settings import require
from shapeshift.triton.settings import is_loopback

# As browsers write it.
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/?#@\sA-Z]+")


@dataclass(frozen=True)
class GatewaySettings:
    """How the gateway listens, which servers it asks, and what it bounds.

    triton             HOST:PORT of the gRPC interfaces
    metrics            URLs of their metrics pages, which /metrics passes on
    host, port         address to listen on; one that others can reach requires `api_keys`
    api_keys           file of hashed keys; None: no key is asked for
    cors_origins       origins whose pages a browser lets read answers; * for all
    registry           build folder whose adapters may be changed; None: the adapter routes are refused
    adapter_root       folder under which `lora_path` must lie
    max_body_bytes     longest body of a request
    max_requests       most requests in flight; a further one gets status 429
    max_connections    most connections; a further one gets status 429. Fewer where the process may open fewer files; no
                       option: `max_requests` is what a server is sized by
    request_timeout_s  most seconds that the servers may take for a request
    head_timeout_s     most seconds from the first byte of a connection or request to the end of its headers
    body_timeout_s     most seconds that a client may take to send its body
    stall_timeout_s    most seconds that a client may read nothing of its answer
    refresh_s          seconds between two looks at what the servers serve
    Raises InvalidInputError with the name of the field.
    """

    triton: tuple[str, ...] = ("localhost:8001",)
    metrics: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8080
    api_keys: Path | None = None
    cors_origins: tuple[str, ...] = ()
    registry: Path | None = None
    adapter_root: Path | None = None
    max_body_bytes: int = 32 << 20
    max_requests: int = 4096
    max_connections: int = 8192
    request_timeout_s: float = 600.0
    head_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    stall_timeout_s: float = 60.0
    refresh_s: float = 5.0

    def __post_init__(self) -> None:
        require(bool(self.triton), "triton", self.triton, "at least one HOST:PORT")
        for address in self.triton:
            host, _, port = address.rpartition(":")
            require(bool(host) and port.isdigit(), "triton", address, "HOST:PORT of a gRPC interface")
        require(0 < self.port < 65536, "port", self.port, "1 to 65535")
        for name in ("max_body_bytes", "max_requests", "max_connections"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        for name in ("request_timeout_s", "head_timeout_s", "body_timeout_s", "stall_timeout_s", "refresh_s"):
            require(getattr(self, name) > 0, name, getattr(self, name), "above 0")
        for origin in self.cors_origins:
            allowed = "* or an origin such as https://example.org, without a path"
            require(_ORIGIN.fullmatch(origin) is not None, "cors_origins", origin, allowed)
        if self.api_keys is None and not is_loopback(self.host):
            raise InvalidInputError(
                "host",
                self.host,
                "a loopback address without keys; --api-keys FILE allows others (see docs/gateway.md)",
            )
        if self.registry is not None:
            require(self.adapter_root is not None, "adapter_root", None, "a folder, given with registry")
            require(self.api_keys is not None, "adapter_root", str(self.adapter_root), "only together with api_keys")
