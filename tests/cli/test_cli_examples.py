"""`shapeshift examples` without a server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shapeshift.cli import main
from shapeshift.triton.embedded import run_record

MODELS = {
    "encode": {
        "config.pbtxt": "",
        "how_to_call.txt": "curl {host}:{http_port} -d '{}' # {grpc_port} {gateway_port}\n",
        "summary.txt": "f32\n",
    },
    "encode_w00": {"config.pbtxt": ""},
    "other": {"config.pbtxt": ""},
}


@pytest.fixture
def build(tmp_path: Path) -> Path:
    for model, files in MODELS.items():
        (tmp_path / "repository" / model).mkdir(parents=True)
        for name, text in files.items():
            (tmp_path / "repository" / model / name).write_text(text)
    return tmp_path


def test_each_model_has_its_line_and_its_calls(build: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["examples", "--build", str(build)]) == 0
    encode, other = capsys.readouterr().out.split("\n\n")
    assert encode == "encode  f32\ncurl 127.0.0.1:8000 -d '{}' # 8001 8080"
    assert other == "other\ncurl -i http://127.0.0.1:8000/v2/models/other/ready\n", "a worker is not called"
    given = ["--host", "far", "--http-port", "9", "--grpc-port", "10", "encode"]
    assert main.main(["examples", "--build", str(build), *given]) == 0
    assert capsys.readouterr().out == "encode  f32\ncurl far:9 -d '{}' # 10 8080\n"


def test_the_ports_are_those_of_the_server(build: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = {"pid": 1, "start": 1}
    about = {"host": "0.0.0.0", "ports": {"http": 81, "grpc": 82, "metrics": 83}}
    record = {"owner": one, "guard": one, "server": one, "prefix": "shapeshift_0123456789ab_", "members": []}
    (build / "run").mkdir()
    record |= {"regions": [], "about": about, "boot": run_record.boot_id()}
    (build / "run" / "server.json").write_text(json.dumps(record))
    (build / "run" / "gateway.port").write_text("83\n")
    assert main.main(["examples", "--build", str(build), "encode"]) == 0
    assert "curl 127.0.0.1:81 -d '{}' # 82 83" in capsys.readouterr().out


def test_a_model_that_is_not_there_is_named(build: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["examples", "--build", str(build), "encoder"]) == 2
    said = "shapeshift examples: no model encoder in the repositories; they have: encode, other\n"
    assert capsys.readouterr().err == said
    assert main.main(["examples", "--build", str(build / "absent")]) == 2
    assert "name its folder with --build" in capsys.readouterr().err
