"""Addresses and the files of mutual TLS: what is taken, what is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from shapeshift.errors import InvalidInputError, NotFoundError, ShapeshiftError
from shapeshift.triton.endpoint import Endpoint, Tls, tls_from_environment

NAMES = ("SHAPESHIFT_TLS_CA", "SHAPESHIFT_TLS_CERTIFICATE", "SHAPESHIFT_TLS_KEY")


@pytest.fixture
def files(tmp_path: Path) -> Tls:
    made = Tls(*(tmp_path / name for name in ("ca", "certificate", "key")))
    for file in (made.ca, made.certificate, made.key):
        file.write_text("no certificate")
        file.chmod(0o600)
    return made


@pytest.mark.parametrize("address", ["a:1", "10.0.0.1:65535", "[::1]:8001", "localhost:8001"])
def test_an_address_is_a_host_and_a_port(address: str) -> None:
    assert Endpoint(address).address == address


@pytest.mark.parametrize("address", ["", "a", ":1", "a:", "a:0", "a:65536", "a:-1", "a:x", "http://a:1", "a:1.5"])
def test_other_addresses_are_refused(address: str) -> None:
    with pytest.raises(InvalidInputError, match="^grpc: got .*must be HOST:PORT"):
        Endpoint(address)


def test_the_environment_names_all_files_or_none(files: Tls) -> None:
    stated = files.variables
    assert stated == dict(zip(NAMES, map(str, (files.ca, files.certificate, files.key)), strict=True))
    assert tls_from_environment(stated) == files
    assert tls_from_environment({}) is None and tls_from_environment(dict.fromkeys(NAMES, "")) is None
    for name in NAMES:
        others = [other for other in NAMES if other != name]
        with pytest.raises(InvalidInputError, match=f"^{name}: got .*; must be set together with {', '.join(others)}"):
            tls_from_environment({other: stated[other] for other in others})


@pytest.mark.parametrize("name", ["ca", "certificate", "key"])
def test_a_file_that_is_missing_is_named(files: Tls, name: str) -> None:
    files.require_files()
    file: Path = getattr(files, name)
    file.unlink()
    with pytest.raises(NotFoundError, match=f"^tls {name}: no file {file}$"):
        files.require_files()


@pytest.mark.parametrize(
    ("mode", "taken"), [(0o600, True), (0o700, True), (0o640, False), (0o604, False), (0o601, False)]
)
def test_a_key_is_its_owners_alone(files: Tls, mode: int, taken: bool) -> None:
    files.key.chmod(mode)
    if taken:
        files.require_files()
        return
    with pytest.raises(ShapeshiftError, match="other users can read .*; run `chmod 600` on it"):
        files.require_files()


def test_clients_get_the_files(files: Tls) -> None:
    assert files.client_options() == {
        "ssl": True,
        "root_certificates": str(files.ca),
        "private_key": str(files.key),
        "certificate_chain": str(files.certificate),
    }
    files.ca.unlink()
    with pytest.raises(NotFoundError):
        files.client_options()


def test_files_that_are_no_certificates_are_named(files: Tls) -> None:
    for make in (files.client_context, files.server_context):
        with pytest.raises(ShapeshiftError, match=f"^tls: {files.certificate} and {files.key} cannot be used"):
            make()
