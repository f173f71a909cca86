"""`shapeshift sidecar` and `shapeshift status` without a server."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from shapeshift.cli import main, sidecar
from shapeshift.cli.running import status
from shapeshift.sidecar import run_files
from shapeshift.sidecar.overview import overview
from shapeshift.triton import keys
from shapeshift.triton.embedded import run_record
from shapeshift.triton.embedded.process_tracker import ProcessTracker
from tests.sidecar.fakes import FakeServer, cumulative, samples
from tests.sidecar.fleet import single

RECORD = {
    "owner": {"pid": 1, "start": 1},
    "guard": {"pid": 1, "start": 1},
    "server": {"pid": 1, "start": 1},
    "prefix": "shapeshift_0123456789ab_",
    "members": [],
    "regions": [],
    "about": {"host": "0.0.0.0", "ports": {"http": 1, "grpc": 2, "metrics": 3}},
    "boot": run_record.boot_id(),
}


def test_freeze_and_thaw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["sidecar", "--build", str(tmp_path), "--freeze"]) == 0
    assert run_files.is_frozen(tmp_path / "run")
    assert capsys.readouterr().out == f"frozen: {tmp_path / 'run' / 'sidecar.freeze'}\n"
    assert main.main(["sidecar", "--build", str(tmp_path), "--thaw"]) == 0
    assert not run_files.is_frozen(tmp_path / "run")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["sidecar", "--plan-period", "0"], "plan_period_s: got 0.0; must be 0.05 to 86400 seconds"),
        (["status", "--seconds", "0"], "seconds: got 0.0"),
        (["status", "--metrics", "http://127.0.0.1:1/metrics"], "no metrics at http://127.0.0.1:1/metrics"),
        (["status", "--metrics", "127.0.0.1:1"], "must be http:// or https:// HOST:PORT/metrics"),
    ],
)
def test_known_errors_are_one_line(
    arguments: list[str], part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main([arguments[0], "--build", str(tmp_path), *arguments[1:]]) == 2
    error = capsys.readouterr().err
    assert part in error
    assert error.count("\n") == 1


def test_the_server_of_the_build_folder_is_found(tmp_path: Path) -> None:
    assert sidecar.running_at(tmp_path) is None
    (tmp_path / "server.json").write_text(json.dumps(RECORD))
    at = sidecar.running_at(tmp_path)
    assert at is not None and (at.grpc, at.metrics) == ("127.0.0.1:2", "http://127.0.0.1:3/metrics")
    (tmp_path / "server.json").write_text(json.dumps(RECORD | {"about": {"host": "x"}}))
    assert sidecar.running_at(tmp_path) is None


def test_the_key_comes_from_the_environment_or_the_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(keys.KEY_VARIABLE, raising=False)
    assert sidecar.server_key(tmp_path) == ""
    (tmp_path / "key").write_text("0" * 32)
    (tmp_path / "key").chmod(0o600)
    assert sidecar.server_key(tmp_path) == "0" * 32
    monkeypatch.setenv(keys.KEY_VARIABLE, "another")
    assert sidecar.server_key(tmp_path) == "another"


def test_status_of_a_server_without_a_sidecar(tmp_path: Path) -> None:
    server = FakeServer()
    server.add_front(models=4, placement_reason="two workers fit")
    server.add_front("bad", models=0, curve="none")
    for worker in ("enc_w00", "enc_w01"):
        server.load(worker)
    server.loaded["other"] = server.files["other"] = {"parameters": {}}
    no_pid = 4_194_304
    beats = iter(range(1, 10))

    def scrape() -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        beat = float(next(beats))
        return (
            samples(
                "enc",
                no_pid,
                beat,
                lengths=cumulative({32.0: 30 * beat, 512.0: 10 * beat}),
                latencies=cumulative({150.0: 40 * beat, 285.0: 0.0}),
                outstanding={"enc_w00": 2.0},
                timeouts={"enc_w00": 1.0},
                waiting={"": 3.0},
            )
            | samples("enc_w00", no_pid + 1, beat)
            | samples("enc_w01", no_pid + 2, 7.0)
        )

    found = overview(single(server, scrape), tmp_path, ProcessTracker(local=True), seconds=0.01)
    (front,) = found["fronts"]
    assert (front["name"], front["state"], front["workers"], front["waiting"]) == ("enc", "serving", 2, 3)
    assert front["p98_ms"] == pytest.approx(147)
    assert front["plan"] is None
    assert [(row["name"], row["state"], row["bin"], row["pid"]) for row in found["workers"]] == [
        ("enc_w00", "serving", 512, no_pid + 1),
        ("enc_w01", "dead", 512, no_pid + 2),
        ("enc_w02", "not loaded", None, None),
        ("enc_w03", "not loaded", None, None),
    ]
    assert (found["workers"][0]["outstanding"], found["workers"][0]["timeouts"]) == (2, 1)
    assert found["sidecar"] == {"pid": None, "frozen": False, "decisions": []}
    assert {model["name"] for model in found["models"]} == {"bad", "other"}
    assert "curve" in found["problems"]["bad"]
    json.dumps(found)

    text = status.format_overview(found)
    assert "sidecar: not running" in text
    assert "enc: serving, pid 4194304, partitioned (two workers fit), objective 300 ms" in text
    assert "  enc_w01  512  0           dead        4194306  0            0\n" in text
    assert "bad: ignored: curve" in text


def test_options_start_from_the_settings() -> None:
    parser = argparse.ArgumentParser()
    sidecar.add_arguments(parser)
    given = parser.parse_args([])
    assert given.plan_period == 120.0


@pytest.mark.parametrize("option", ["--hang-seconds=5", "--except=chat", "--most-reloads=3"])
def test_what_goes_with_watch_all_is_refused_without_it(
    tmp_path: Path, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["sidecar", f"--build={tmp_path}", option]) == 2
    assert f"{option.partition('=')[0]}: got" in capsys.readouterr().err
