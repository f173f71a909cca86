"""The address of a server's gRPC interface, and the certificates with which it is reached."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shapeshift.errors import NotFoundError, ShapeshiftError
from shapeshift.files import is_exposed
from shapeshift.settings import require

GRPC_URL = "SHAPESHIFT_GRPC_URL"
CA_VARIABLE = "SHAPESHIFT_TLS_CA"
CERTIFICATE_VARIABLE = "SHAPESHIFT_TLS_CERTIFICATE"
KEY_VARIABLE = "SHAPESHIFT_TLS_KEY"
_LOOPBACK = ("127.", "localhost:", "[::1]:")
_VARIABLES = (CA_VARIABLE, CERTIFICATE_VARIABLE, KEY_VARIABLE)


@dataclass(frozen=True)
class Tls:
    """Mutual TLS: one set of files for every connection of a process, to its own server and to other nodes.

    The files are in PEM. ca: signs every node's certificate; certificate, key: those of this machine. All but
    `variables` raise NotFoundError for a missing file, ShapeshiftError for a key that other users can read.
    """

    ca: Path
    certificate: Path
    key: Path

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables by which commands and the processes of a server learn of the files."""
        files = (self.ca, self.certificate, self.key)
        return {name: str(file.resolve()) for name, file in zip(_VARIABLES, files, strict=True)}

    def require_files(self) -> None:
        """Raise unless the files can be used."""
        for name in ("ca", "certificate", "key"):
            file: Path = getattr(self, name)
            if not file.is_file():
                raise NotFoundError(f"tls {name}: no file {file}")
        if is_exposed(self.key):
            raise ShapeshiftError(f"tls key: other users can read {self.key}; run `chmod 600` on it")

    def stamp(self) -> tuple[int, ...]:
        """Another one after the files were replaced. Raises NotFoundError for a missing file."""
        try:
            return tuple(file.stat().st_mtime_ns for file in (self.ca, self.certificate, self.key))
        except OSError as error:
            raise NotFoundError(f"tls: no file {error.filename}") from None

    def client_options(self) -> dict[str, Any]:
        """The arguments of tritonclient's gRPC clients."""
        self.require_files()
        return {
            "ssl": True,
            "root_certificates": str(self.ca),
            "private_key": str(self.key),
            "certificate_chain": str(self.certificate),
        }

    def client_context(self) -> ssl.SSLContext:
        """For HTTPS to a server that the CA has signed and that asks for our certificate."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def server_context(self) -> ssl.SSLContext:
        """For HTTPS from clients with a certificate that the CA has signed."""
        return self._context(ssl.PROTOCOL_TLS_SERVER)

    def _context(self, protocol: int) -> ssl.SSLContext:
        self.require_files()
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(self.ca)
            context.load_cert_chain(self.certificate, self.key)
        except (OSError, ssl.SSLError) as error:
            raise ShapeshiftError(f"tls: {self.certificate} and {self.key} cannot be used: {error}") from error
        return context


def tls_from_environment(environment: Mapping[str, str] = os.environ) -> Tls | None:
    """The files that the environment names; None if it names none. Raises InvalidInputError if it names only some."""
    files = {name: Path(environment[name]) for name in _VARIABLES if environment.get(name)}
    if not files:
        return None
    for name in _VARIABLES:
        require(name in files, name, None, f"must be set together with {', '.join(files)}")
    return Tls(*files.values())


def bracketed(host: str) -> str:
    """`host` as it stands before a port: an address of IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host


@dataclass(frozen=True)
class Endpoint:
    """address: HOST:PORT; tls: None for plain text. Raises InvalidInputError for what is no address."""

    address: str
    tls: Tls | None = None

    def __post_init__(self) -> None:
        host, _, port = self.address.rpartition(":")
        valid = bool(host) and "/" not in host and port.isdecimal() and 0 < int(port) < 65536
        allowed = "must be HOST:PORT of a gRPC interface, an address of IPv6 in brackets"
        require(valid and host == bracketed(self.host), "grpc", self.address, allowed)

    @property
    def host(self) -> str:
        """The host of the address, without brackets."""
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def is_local(self) -> bool:
        """Whether the server's processes may be visible here: its address is a loopback one."""
        return self.address.startswith(_LOOPBACK)


def own_endpoint(address: str = "") -> Endpoint:
    """The gRPC interface of the server that this process, a backend's, belongs to.

    Its address is `address`, else the variable that `command_line.environment` sets for the server, else Triton's
    default. Raises InvalidInputError for what is no address.
    """
    return Endpoint(address or os.environ.get(GRPC_URL) or "localhost:8001", tls_from_environment())
