"""`shapeshift fleet`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from shapeshift.cli.main import main

FLEET = """
name = "demo"
[[nodes]]
name = "a"
grpc = "127.0.0.1:{port}"
metrics = "http://127.0.0.1:{port}/metrics"
"""


def test_nodes_that_do_not_answer_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], free_ports: Callable[[int], list[int]]
) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(FLEET.format(port=free_ports(1)[0]))
    assert main(["fleet", "status", str(file)]) == 2
    error = capsys.readouterr().err
    assert "a: no metrics at" in error
    assert error.count("\n") == 1


def test_the_sidecar_of_a_fleet_has_a_lock_and_a_switch_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(FLEET.format(port=1))
    assert main(["sidecar", "--fleet", str(file), "--build", str(tmp_path), "--freeze"]) == 0
    assert (tmp_path / "fleet" / "demo" / "sidecar.freeze").exists()
    assert not (tmp_path / "run").exists()


def test_a_fleet_file_and_a_server_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(FLEET.format(port=1))
    assert main(["sidecar", "--fleet", str(file), "--server", "127.0.0.1:1", "--build", str(tmp_path)]) == 2
    assert "fleet: got" in capsys.readouterr().err


def test_an_invalid_fleet_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text("nam = 1")
    assert main(["fleet", "status", str(file)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_missing_certificate_is_that_of_the_named_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "fleet.toml"
    tls = '[tls]\nca = "ca.pem"\ncertificate = "{node}.pem"\nkey = "{node}.key"\n'
    file.write_text(FLEET.format(port=1) + tls)
    (tmp_path / "ca.pem").touch()
    assert main(["fleet", "status", str(file), "--node", "operator"]) == 2
    assert "operator.pem" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    file = tmp_path / "fleet.toml"
    file.write_text('name = "demo"\n[ray]\nfolder = "file/x"\n')
    assert main(["fleet", "up", str(file)]) == 2
    error = capsys.readouterr().err
    assert f"{tmp_path}/file" in error and "Not a directory" in error and error.count("\n") == 1
