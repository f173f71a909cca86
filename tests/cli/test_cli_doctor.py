"""`shapeshift doctor`: what it finds, and when it ends with 1."""

from __future__ import annotations

import importlib.metadata
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shapeshift.cli import doctor
from shapeshift.cli.doctor import MISSING, NOTE, OK
from shapeshift.cli.main import main
from shapeshift.engines import hardware
from shapeshift.engines.providers import lookup


def findings(capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, dict[str, tuple[str, str]]]:
    status = main(["doctor", "--json", *more])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["usable"] is (status == 0)
    return status, {one["name"]: (one["state"], one["text"]) for one in found["findings"]}


def unpacked(build: Path) -> Path:
    for name in ("bin/tritonserver", "backends/python/model.py"):
        (build / "triton" / name).parent.mkdir(parents=True, exist_ok=True)
        (build / "triton" / name).touch()
    return build


def test_without_the_servers_files_it_says_how_to_get_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, found = findings(capsys)
    assert status == 1
    assert found["server"] == (
        MISSING,
        "no build/triton/bin/tritonserver; run `shapeshift setup`, or name it: --build or --triton DIR",
    )
    assert not list(tmp_path.iterdir())
    status, found = findings(capsys, "--build", str(unpacked(tmp_path / "elsewhere")))
    assert status == 0, found
    (tmp_path / "elsewhere" / "triton").rename(tmp_path / "own")
    status, found = findings(capsys, "--triton", str(tmp_path / "own"))
    assert status == 0, found
    assert {state for state, _ in found.values()} <= {OK, NOTE}


def test_text_has_a_line_for_each_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, found = findings(capsys, "--build", str(tmp_path))
    main(["doctor", "--build", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(found)
    for line, (name, (state, _)) in zip(lines, found.items(), strict=True):
        assert line.startswith(f"{state:8}{name}")


def test_tokens_are_not_shown() -> None:
    text = doctor.hub({"HF_TOKEN": "hf_secret", "HF_ENDPOINT": "https://me:hf_other@hub.example/v1"}).text
    assert text == "HF_ENDPOINT=https://hub.example/v1, HF_TOKEN is set"


def test_packages_are_held_against_the_pins(tmp_path: Path) -> None:
    numpy = importlib.metadata.version("numpy")
    pins = tmp_path / "lock.txt"
    states = []
    for text in (f"numpy=={numpy}\n", "numpy==0.1\n", f"numpy=={numpy}\nabsent-package==1\n"):
        pins.write_text(text)
        states.append(doctor.packages(pins))
    assert [one.state for one in states] == [OK, NOTE, MISSING]
    assert f"numpy {numpy}, not 0.1" in states[1].text and "absent-package" in states[2].text
    # As in a wheel.
    pins.unlink()
    needed = doctor.packages(pins)
    assert needed.state == OK and "it pins no versions" in needed.text


def test_the_default_provider_is_needed_and_others_are_not(tmp_path: Path) -> None:
    for name in ("openvino", "onnxruntime", "tensorrt"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('badly installed')\n")
    command = [sys.executable, "-m", "shapeshift.cli.main", "doctor", "--json", "--build", str(tmp_path)]
    variables = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=False)
    states = {one["name"]: one["state"] for one in json.loads(done.stdout)["findings"]}
    default = lookup.resolve("auto", range(hardware.gpus()))
    for name in ("openvino", "onnxruntime", "tensorrt"):
        assert states[f"provider {name}"] == (MISSING if name == default else NOTE), name


def test_ports_disk_and_shared_memory(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        assert (doctor.ports([number]).state, str(number) in doctor.ports([number]).text) == (NOTE, True)
    assert [doctor.shared_memory(free << 20).state for free in (1, 64, 1024)] == [MISSING, NOTE, OK]
    (disk,) = [one.text for one in doctor.check(tmp_path / "absent" / "build") if one.name == "disk"]
    assert str(tmp_path) in disk and "absent" not in disk
    for free_mib, state in ((500, MISSING), (3000, NOTE), (20_000, OK)):
        assert doctor.disk(tmp_path, free_mib << 20, 100 << 30).state == state
