"""Settings of the gateway, and its limits."""

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
    """How the gateway listens, and which servers it asks.

    triton             HOST:PORT of the gRPC interfaces
    metrics            URLs of their metrics pages, which /metrics passes on
    host, port         address to listen on; one that others can reach requires `api_keys`
    api_keys           file of hashed keys; None: no key is asked for
    cors_origins       origins whose pages a browser lets read answers; * for all
    build              folder of generated files, whose adapters may be changed
    adapter_root       folder under which `lora_path` must lie, requires `api_keys`; None: adapters are not changed
    max_requests       most requests in flight; a further one gets status 429
    request_timeout_s  most seconds that the servers may take for a request
    requests_per_minute, tokens_per_minute  of a key whose line states none, see `api_keys`; None: as many as it sends
    Raises InvalidInputError with the name of the field.
    """

    triton: tuple[str, ...] = ("localhost:8001",)
    metrics: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8080
    api_keys: Path | None = None
    cors_origins: tuple[str, ...] = ()
    build: Path = Path("build")
    adapter_root: Path | None = None
    max_requests: int = 4096
    request_timeout_s: float = 600.0
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None

    def __post_init__(self) -> None:
        require(bool(self.triton), "triton", self.triton, "at least one HOST:PORT")
        for address in self.triton:
            host, _, port = address.rpartition(":")
            require(bool(host) and port.isdigit(), "triton", address, "HOST:PORT of a gRPC interface")
        require(0 < self.port < 65536, "port", self.port, "1 to 65535")
        require(self.max_requests >= 1, "max_requests", self.max_requests, "at least 1")
        require(self.request_timeout_s > 0, "request_timeout_s", self.request_timeout_s, "above 0")
        for origin in self.cors_origins:
            allowed = "* or an origin such as https://example.org, without a path"
            require(_ORIGIN.fullmatch(origin) is not None, "cors_origins", origin, allowed)
        if self.api_keys is None and not is_loopback(self.host):
            raise InvalidInputError(
                "host",
                self.host,
                "a loopback address without keys; --api-keys FILE allows others (see docs/gateway.md)",
            )
        for name in ("requests_per_minute", "tokens_per_minute"):
            if (most := getattr(self, name)) is not None:
                require(1 <= most < 10**9, name, most, "1 to 999999999")
                require(self.api_keys is not None, name, most, "only together with api_keys")
        if self.adapter_root is not None:
            require(self.api_keys is not None, "adapter_root", str(self.adapter_root), "only together with api_keys")


@dataclass(frozen=True)
class Limits:
    """What a gateway of any size gets by with, so that no option sets it.

    max_body_bytes   longest body of a request
    max_connections  most connections; beyond them the status is 503. Fewer where the process may open fewer files
    body_timeout_s   most seconds that a client may take to send its body
    refresh_s        seconds between two looks at what the servers serve
    """

    max_body_bytes: int = 32 << 20
    max_connections: int = 8192
    body_timeout_s: float = 30.0
    refresh_s: float = 5.0
