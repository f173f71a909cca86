"""Mutual TLS: one set of files for every connection of a process, to its own server and to other nodes.

Commands and the processes of a server learn of the files from three environment variables.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shapeshift.errors import InvalidInputError, NotFoundError, ShapeshiftError
from shapeshift.files import is_exposed
from shapeshift.triton.endpoint import Tls

CA_VARIABLE = "SHAPESHIFT_TLS_CA"
CERTIFICATE_VARIABLE = "SHAPESHIFT_TLS_CERTIFICATE"
KEY_VARIABLE = "SHAPESHIFT_TLS_KEY"
_VARIABLES = (CA_VARIABLE, CERTIFICATE_VARIABLE, KEY_VARIABLE)


def variables(tls: Tls) -> dict[str, str]:
    """The environment variables that name the files of `tls`."""
    files = (tls.ca, tls.certificate, tls.key)
    return {name: str(file.resolve()) for name, file in zip(_VARIABLES, files, strict=True)}


def from_environment(environment: Mapping[str, str] = os.environ) -> Tls | None:
    """The files that the environment names; None if it names none. Raises InvalidInputError if it names only some."""
    given = {name: environment[name] for name in _VARIABLES if environment.get(name)}
    if not given:
        return None
    for name in _VARIABLES:
        if name not in given:
            raise InvalidInputError(name, None, f"must be set together with {', '.join(given)}")
    return Tls(*(Path(given[name]) for name in _VARIABLES))


def require_files(tls: Tls) -> None:
    """Raise NotFoundError for a missing file, ShapeshiftError for a key that other users can read."""
    for name in ("ca", "certificate", "key"):
        file: Path = getattr(tls, name)
        if not file.is_file():
            raise NotFoundError(f"tls {name}: no file {file}")
    if is_exposed(tls.key):
        raise ShapeshiftError(f"tls key: other users can read {tls.key}; run `chmod 600` on it")


def client_options(tls: Tls | None) -> dict[str, Any]:
    """The arguments of tritonclient's gRPC clients for `tls`; none for plain text. Raises as `require_files` does."""
    if tls is None:
        return {}
    require_files(tls)
    return {
        "ssl": True,
        "root_certificates": str(tls.ca),
        "private_key": str(tls.key),
        "certificate_chain": str(tls.certificate),
    }


def client_context(tls: Tls) -> ssl.SSLContext:
    """For HTTPS to a server that the CA has signed and that asks for our certificate. Raises ShapeshiftError."""
    return _context(tls, ssl.PROTOCOL_TLS_CLIENT)


def server_context(tls: Tls) -> ssl.SSLContext:
    """For HTTPS from clients with a certificate that the CA has signed. Raises ShapeshiftError."""
    return _context(tls, ssl.PROTOCOL_TLS_SERVER)


def _context(tls: Tls, protocol: int) -> ssl.SSLContext:
    require_files(tls)
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(tls.ca)
        context.load_cert_chain(tls.certificate, tls.key)
    except (OSError, ssl.SSLError) as error:
        raise ShapeshiftError(f"tls: {tls.certificate} and {tls.key} cannot be used: {error}") from error
    return context
