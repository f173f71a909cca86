from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from shapeshift.errors import InvalidInputError, NotFoundError, ShapeshiftError
from shapeshift.triton import keys
from shapeshift.triton.names import check_model_name
from shapeshift.triton.settings import ALLOW_PUBLIC, ServerSettings

REPOSITORIES = (Path("repository"),)


@pytest.mark.parametrize("name", ["encode", "polymorph_w00", "a", "v1.2-b", "0"])
def test_ordinary_model_names_pass(name: str) -> None:
    assert check_model_name(name) == name


@pytest.mark.parametrize(
    "name", ["", "../encode", "a/b", "a..b", ".hidden", "a b", "a;b", "a\n", "*", "-x", "é", "a" * 129]
)
def test_other_model_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidInputError, match="model: got"):
        check_model_name(name)


@pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3", "8.8.8.8"])
def test_a_public_address_needs_a_word_of_the_environment(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ALLOW_PUBLIC, raising=False)
    with pytest.raises(InvalidInputError, match=r"host.*CVE-2025-23310.*26\.03 or newer"):
        ServerSettings(REPOSITORIES, host=host)
    monkeypatch.setenv(ALLOW_PUBLIC, "1")
    assert ServerSettings(REPOSITORIES, host=host).address == host


def test_loopback_needs_no_permission() -> None:
    assert ServerSettings(REPOSITORIES, host="localhost").address == "127.0.0.1"
    assert ServerSettings(REPOSITORIES, host="127.0.0.2").reachable == "127.0.0.2"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("repositories", ()),
        ("models", ("../x",)),
        ("http_port", 0),
        ("metrics_port", 65536),
        ("grpc_port", 8000),
        ("host", "example.org"),
        ("traces", "localhost:4318"),
        ("traces", "http://localhost:4318/v1/traces,rate=1"),
        ("trace_rate", 0),
        ("host", "::1"),
    ],
)
def test_bad_values_are_refused(field: str, value: object) -> None:
    with pytest.raises(InvalidInputError):
        ServerSettings(**({"repositories": REPOSITORIES} | {field: value}))  # type: ignore[arg-type]


def test_key_is_made_once_and_private(tmp_path: Path) -> None:
    path = tmp_path / "run" / "key"
    key = keys.ensure_key(path)
    assert len(key) == 32
    assert int(key, 16) >= 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert keys.ensure_key(path) == key == keys.read_key(path)
    assert [file.name for file in path.parent.iterdir()] == ["key"]


def test_invalid_keys_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    with pytest.raises(NotFoundError):
        keys.read_key(path)
    keys.ensure_key(path)
    path.chmod(0o640)
    with pytest.raises(ShapeshiftError, match="chmod 600"):
        keys.ensure_key(path)
    path.chmod(0o600)
    path.write_text("short\n")
    with pytest.raises(ShapeshiftError, match="32 hexadecimal"):
        keys.ensure_key(path)


@pytest.mark.parametrize("mode", [0o644, 0o440])
def test_a_key_of_a_mounted_volume_has_the_mode_of_the_volume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    key = keys.ensure_key(tmp_path / "..2026" / "node-0")
    (tmp_path / "..2026" / "node-0").chmod(mode)
    (tmp_path / "node-0").symlink_to("..data/node-0")
    with pytest.raises(NotFoundError):
        keys.read_key(tmp_path / "node-0")
    # As Kubernetes lays out the files of a Secret.
    (tmp_path / "..data").symlink_to("..2026")
    assert keys.read_key(tmp_path / "node-0") == key
    (tmp_path / "..data").unlink()
    with pytest.raises(ShapeshiftError, match="chmod 600"):
        keys.read_key(tmp_path / "..2026" / "node-0")
    read_only = os.statvfs_result((*os.statvfs(tmp_path)[:8], os.ST_RDONLY, 255, 0))
    monkeypatch.setattr(os, "statvfs", lambda path: read_only)
    assert keys.read_key(tmp_path / "..2026" / "node-0") == key
