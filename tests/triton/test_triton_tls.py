"""Addresses, the files of mutual TLS, and the wheels that are downloaded: what is taken, what is refused by name."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from shapeshift.errors import EngineError, InvalidInputError, NotFoundError, ShapeshiftError
from shapeshift.triton.embedded import wheels
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


# Wheels.


def test_pins_and_hashes_are_read_and_comments_are_not(tmp_path: Path) -> None:
    file = tmp_path / "pins.txt"
    file.write_text("# a comment\n\n#other==1 --hash=sha256:0\na-b==1.2 --hash=sha256:abc\nc==3 --hash=sha256:def\n")
    assert wheels.read_pins(file) == {"a-b": "1.2", "c": "3"}
    assert wheels.read_hashes(file) == {"a-b": "abc", "c": "def"}


def test_wheels_are_found_by_project_and_version(tmp_path: Path) -> None:
    for name in ("a_b-1.2-py3-none-1.whl", "a_b-1.2-py3-none-2.whl", "a_b-1.3-py3-none-9.whl", "c-3.tar.gz"):
        (tmp_path / name).touch()
    found = wheels.find({"a-b": "1.2", "c": "3", "d": "1"}, tmp_path)
    assert found == {"a-b": tmp_path / "a_b-1.2-py3-none-2.whl"}


def test_a_wheel_that_is_another_file_is_named(tmp_path: Path) -> None:
    first, second = tmp_path / "a.whl", tmp_path / "b.whl"
    for file in (first, second):
        file.write_text(file.name)
    hashes = {file.stem: hashlib.sha256(file.name.encode()).hexdigest() for file in (first, second)}
    wheels.check({"a": first, "b": second}, hashes)
    with pytest.raises(EngineError, match=f"^{second} is not the file that is pinned"):
        wheels.check({"a": first, "b": second}, hashes | {"b": "0"})


@pytest.mark.parametrize("status", [0, 1])
def test_what_cannot_be_downloaded_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\necho "$@"\nexit {status}\n')
    program.chmod(0o700)
    monkeypatch.setattr(wheels.sys, "executable", str(program))
    folder, log = tmp_path / "w" / "w", tmp_path / "l" / "log"
    if status:
        with pytest.raises(
            NotFoundError, match="^a==1 and b==2 could not be downloaded .pip ended with status 1.; see"
        ):
            wheels.download(["a==1", "b==2"], folder, log)
    else:
        wheels.download(["a==1", "b==2"], folder, log)
    assert folder.is_dir() and log.read_text().strip().endswith(f"--dest {folder} a==1 b==2")
    assert "download --no-deps --only-binary :all:" in log.read_text()
