"""`make engines`, run in this process for fronts with emulated engines."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from shapeshift import files
from shapeshift.build_engines.publish import publish_all
from shapeshift.build_engines.text import front as text_front
from shapeshift.cli import engines
from shapeshift.cli.main import main
from shapeshift.engines import failures, manifest
from shapeshift.triton import model_config
from tests.waiting import wait_for


class Project:
    """A project folder: `model_repository`, `checkpoint` and, once built, `build`."""

    def __init__(self, root: Path, add_front: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
        self.root = root
        self.repository = root / "model_repository"
        self.build = root / "build"
        self.checkpoint = root / "checkpoint"
        self._add_front = add_front
        self._capsys = capsys

    def add(self, name: str = "front", **parameters: object) -> Path:
        """Add a front, or replace its parameters."""
        return self._add_front(self.repository, name, **{"checkpoint": self.checkpoint, **parameters})

    def change_config(self, before: str, after: str, name: str = "front") -> None:
        file = self.repository / name / "config.pbtxt"
        text = file.read_text()
        assert before in text
        file.write_text(text.replace(before, after))

    def make(self, *models: str) -> tuple[int, str, str]:
        """Run the command: exit status, standard output, standard error."""
        status = main(["engines", "--repository", str(self.repository), "--build", str(self.build), *models])
        captured = self._capsys.readouterr()
        return status, captured.out, captured.err

    def engines(self, name: str = "front") -> Path:
        return self.build / "engines" / name

    def generated(self, name: str = "front") -> Path:
        return self.build / "repository" / name / "config.pbtxt"

    def stamp(self, name: str = "front") -> tuple[int, int]:
        """Changes when the engines are rebuilt."""
        state = (self.engines(name) / manifest.FILE_NAME).stat()
        return state.st_ino, state.st_mtime_ns


@pytest.fixture
def project(
    tmp_path: Path,
    light_checkpoint: Path,
    add_front: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Project:
    shutil.copytree(light_checkpoint, tmp_path / "checkpoint")
    monkeypatch.chdir(tmp_path)
    return Project(tmp_path, add_front, capsys)


def test_builds_and_generates_what_a_server_loads(project: Project) -> None:
    folder = project.add(bins="16,64", queue_rows=99)
    (folder / "how_to_call.txt").write_text("curl {host}")
    status, out, err = project.make()
    assert status == 0
    assert (project.generated().parent / "summary.txt").read_text().startswith("engines: emulated, f32")
    assert "front: built; emulated 2, f32" in out
    assert all(name in out for name in ("dynamic", " 16 ", " 64 "))
    assert "not published" not in err

    made = manifest.load(project.engines())
    made.check_files(project.engines())
    assert [entry.tokens for entry in made.engines] == [None, 16, 64]
    assert (made.model, made.provider, made.precision, made.max_tokens) == ("front", "emulated", "f32", 512)

    assert (project.generated().parent / "1").is_dir()
    assert (project.generated().parent / "how_to_call.txt").read_text() == "curl {host}"
    config = model_config.read(project.generated())
    parameters = model_config.parameters(config)
    assert (parameters["provider"], parameters["precision"], parameters["queue_rows"]) == ("emulated", "f32", "99")
    assert parameters["manifest_sha256"] == manifest.sha256(project.engines())
    assert parameters["checkpoint_sha256"] == made.checkpoint_sha256
    assert (project.generated().parent / parameters["engines"]).resolve() == project.engines()
    assert config.name == "front"
    assert [output.name for output in config.output] == ["EMBEDDING", "NUM_TOKENS", "TOKENS", "DESCRIPTION"]

    profile = json.loads(parameters["profile"])
    assert profile["hardware"] == made.hardware and profile["precision"] == "f32"
    assert [engine["tokens"] for engine in profile["engines"]] == [None, 16, 64]
    for engine, entry in zip(profile["engines"], made.engines, strict=True):
        assert engine["rows"] == entry.rows
        assert [point[:2] for point in engine["latency"]] == [[p.tokens, p.median_ms] for p in entry.latency]


def test_short_config_is_completed(project: Project) -> None:
    file = project.add(bins="16") / "config.pbtxt"
    project.make()
    whole, key = model_config.read(project.generated()), manifest.load(project.engines()).build_key
    text = file.read_text()
    file.write_text('backend: "polymorph"\n' + text[text.index("parameters {") :])
    assert "front: up to date" in project.make()[1]
    assert model_config.read(project.generated()) == whole
    # A tensor needs only its name.
    file.write_text(file.read_text() + '\noutput [ { name: "LOGITS" }, { name: "EMBEDDING" } ]')
    assert "front: built" in project.make()[1] and manifest.load(project.engines()).build_key != key
    outputs = model_config.as_json(model_config.read(project.generated()))["output"]
    assert outputs == [
        {"name": "LOGITS", "data_type": "TYPE_FP32", "dims": ["2"]},
        {"name": "EMBEDDING", "data_type": "TYPE_FP32", "dims": ["8"]},
        {"name": "NUM_TOKENS", "data_type": "TYPE_INT32", "dims": ["1"]},
        {"name": "TOKENS", "data_type": "TYPE_STRING", "dims": ["1"]},
        {"name": "DESCRIPTION", "data_type": "TYPE_STRING", "dims": ["1"]},
    ]


def test_auto_is_resolved_in_the_generated_config(project: Project, machine: Callable[..., None]) -> None:
    for has, settled in ((True, "bf16"), (False, "f32")):
        machine(bf16=has)
        project.add(precision="auto")
        assert project.make()[0] == 0
        assert model_config.parameters(model_config.read(project.generated()))["precision"] == settled
        assert manifest.load(project.engines()).precision == settled


def test_current_engines_are_not_rebuilt(project: Project) -> None:
    project.add()
    assert "front: built" in project.make()[1]
    stamp, config = project.stamp(), project.generated().read_bytes()
    folder = project.generated().parent.stat()
    status, out, _ = project.make()
    assert status == 0 and "front: up to date" in out
    assert project.stamp() == stamp
    assert project.generated().read_bytes() == config
    # A server may be reading it.
    assert project.generated().parent.stat().st_ino == folder.st_ino
    assert project.generated().parent.stat().st_mtime_ns == folder.st_mtime_ns


def test_changed_folder_is_rewritten(project: Project) -> None:
    project.add()
    project.make()
    config = project.generated().read_bytes()
    (project.generated().parent / "1" / "model.py").write_text("what nobody asked for")
    project.generated().write_text("torn")
    assert project.make()[0] == 0
    assert project.generated().read_bytes() == config
    assert list((project.generated().parent / "1").iterdir()) == []


def test_second_build_waits_for_the_first(project: Project) -> None:
    project.add()
    held, said = threading.Event(), io.StringIO()

    def build_first() -> bool:
        with files.exclusive_lock(project.build / engines.LOCK):
            held.set()
            wait_for(said.getvalue)
            return project.engines().exists()

    with ThreadPoolExecutor(1) as first, contextlib.redirect_stderr(said):
        building = first.submit(build_first)
        assert held.wait(120)
        assert project.make()[0] == 0
        assert not building.result(timeout=60)
    assert said.getvalue().startswith(f"waiting for another build in {project.build}\n")
    assert project.generated().is_file()


REBUILDS: dict[str, Callable[[Project], object]] = {
    "bins": lambda project: project.add(bins="16,32"),
    "max_tokens": lambda project: project.add(max_tokens=128),
    "packing": lambda project: project.add(packing=False),
    "latencies": lambda project: project.add(latency_ms=(0.2, 0.3)),
    "weights": lambda project: (project.checkpoint / "model.safetensors").write_bytes(b"other"),
    "tokenizer": lambda project: _append_space(project.checkpoint / "tokenizer.json"),
    "histogram": lambda project: _write(project.add(length_histogram="h.json") / "h.json", "[1, 2, 3]"),
    "an engine file that was cut": lambda project: (project.engines() / "emulated.json").write_text("{"),
    "an engine file that was changed": lambda project: _append_space(project.engines() / "tokenizer.json"),
    "an engine file that is gone": lambda project: (project.engines() / "emulated.json").unlink(),
    "a manifest that was cut": lambda project: (project.engines() / "manifest.json").write_text("{"),
    "no manifest": lambda project: (project.engines() / "manifest.json").unlink(),
}


def _append_space(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b" ")


def _write(file: Path, text: str) -> None:
    file.write_text(text)


@pytest.mark.parametrize("change", REBUILDS)
def test_changes_that_affect_engines_rebuild_them(project: Project, change: str) -> None:
    project.add()
    project.make()
    stamp = project.stamp() if (project.engines() / "manifest.json").exists() else None
    REBUILDS[change](project)
    status, out, _ = project.make()
    assert status == 0 and "front: built" in out
    assert project.stamp() != stamp
    manifest.load(project.engines()).check_files(project.engines())
    assert "front: up to date" in project.make()[1]


def test_serving_parameters_do_not_rebuild(project: Project) -> None:
    project.add(queue_rows=10)
    project.make()
    stamp = project.stamp()
    project.add(queue_rows=20, engine_threads=1)
    assert "front: up to date" in project.make()[1]
    assert project.stamp() == stamp
    assert model_config.parameters(model_config.read(project.generated()))["queue_rows"] == "20"


def test_the_reference_of_a_front_says_to_which_engines_it_belongs(project: Project) -> None:
    """The sidecar asks a server that may still have those of the build before."""
    project.add()
    project.make()
    (project.engines() / "reference.json").write_text('{"ids": [[1, 2]]}')
    project.make()
    reference = json.loads((project.generated().parent / "reference.json").read_text())
    assert reference == {"ids": [[1, 2]], "manifest_sha256": manifest.sha256(project.engines())}


def test_only_the_requested_models_are_built(project: Project) -> None:
    project.add("one")
    project.add("two")
    assert project.make("two")[0] == 0
    assert not project.engines("one").exists() and project.engines("two").exists()
    status, _, err = project.make("three")
    assert status == 2 and "no model three" in err and "there are: one, two" in err


@pytest.mark.parametrize(
    ("parameters", "tokens"),
    [
        ({"bins": "7,100,512"}, [None, 7, 100, 512]),
        ({"bins": "512"}, [None, 512]),
        ({"bins": "none"}, [None]),
        ({"bins": "16,32", "max_tokens": 32, "dynamic": False}, [16, 32]),
    ],
)
def test_explicit_bins_are_kept(project: Project, parameters: dict[str, Any], tokens: list[int | None]) -> None:
    project.add(**parameters)
    assert project.make()[0] == 0
    assert [entry.tokens for entry in manifest.load(project.engines()).engines] == tokens


def test_staircase_bins_end_where_the_latency_steps(project: Project) -> None:
    folder = project.add(bins="staircase", max_tokens=256)
    profile = {"lengths": [1, 64, 65, 128, 129, 256], "latency_ms": [1, 1, 2, 2, 3, 3]}
    (folder / "profile.json").write_text(json.dumps(profile))
    assert project.make()[0] == 0
    assert [entry.tokens for entry in manifest.load(project.engines()).engines] == [None, 64, 128, 256]


def test_histogram_bins_follow_the_models_own_lengths(project: Project) -> None:
    folder = project.add(bins="histogram", max_bins=2, max_tokens=64, length_histogram="h.json", latency_ms=(1, 100))
    (folder / "h.json").write_text(json.dumps([0] * 9 + [50] + [0] * 29 + [50]))
    assert project.make()[0] == 0
    assert [entry.tokens for entry in manifest.load(project.engines()).engines] == [None, 10, 64]


# Invalid fronts.


def parameter(name: str, value: object) -> str:
    """The parameter in a config.pbtxt."""
    return f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}'


BROKEN: dict[str, tuple[Callable[[Project], object], str]] = {
    "no batches": (
        lambda project: project.change_config("max_batch_size: 64", "max_batch_size: 0"),
        "front: max_batch_size: got 0; 1 or more, or left out for 64",
    ),
    "wrong type": (
        lambda project: project.change_config('"TEXT" data_type: TYPE_STRING', '"TEXT" data_type: TYPE_INT64'),
        "front: input TEXT: got ['TYPE_INT64', 1]; data_type: TYPE_STRING dims: [ 1 ]",
    ),
    "a GPU that is not there": (
        lambda project: project.change_config("KIND_CPU", "KIND_GPU"),
        "front: instance_group kind: got 'KIND_GPU'; KIND_CPU: this machine shows no NVIDIA GPU",
    ),
    "wrong dims": (
        lambda project: project.change_config("dims: [ 8 ]", "dims: [ 9 ]"),
        "output EMBEDDING: got ['TYPE_FP32', 9]; data_type: TYPE_FP32 dims: [ 8 ]",
    ),
    "unknown output": (
        lambda project: project.change_config('"EMBEDDING"', '"LOGITS"'),
        "output LOGITS: got ['TYPE_FP32', 8]; data_type: TYPE_FP32 dims: [ 2 ]",
    ),
    "unknown parameter": (
        lambda project: project.add(bin=3),
        "bin: got 'bin'; unknown parameter; did you mean bins? known: allocation, bins, ",
    ),
    "a parameter of generated configs": (
        lambda project: project.add(manifest_sha256="0"),
        "manifest_sha256: got 'manifest_sha256'; unknown parameter",
    ),
    "wrong name": (
        lambda project: project.change_config('name: "front"', 'name: "other"'),
        "name: got 'other'; the folder's name, front",
    ),
    "bad value": (lambda project: project.add(max_bins="many"), "max_bins: got 'many'; must be a whole number"),
    "bad serving value": (lambda project: project.add(queue_rows=0), "queue_rows: got 0; at least 1"),
    "no checkpoint": (
        lambda project: project.change_config(parameter("checkpoint", project.checkpoint), ""),
        "checkpoint: got None; this parameter is required",
    ),
    "checkpoint that is not there": (lambda project: project.add(checkpoint="absent"), "checkpoint: no folder absent"),
    "checkpoint without weights": (
        lambda project: (project.checkpoint / "model.safetensors").rename(project.checkpoint / "pytorch_model.bin"),
        "found only pytorch_model.bin, which can execute code",
    ),
    "no profile": (lambda project: project.add(profile_file=""), "profile_file: got ''; an emulated model needs"),
    "profile that is not there": (lambda project: project.add(profile_file="absent.json"), "profile_file: got "),
    "profile that is not JSON": (
        lambda project: (project.repository / "front" / "profile.json").write_text("{"),
        "profile_file: got ",
    ),
    "profile of another kind": (
        lambda project: (project.repository / "front" / "profile.json").write_text("[1]"),
        "profile_file: got 'profile.json'; lengths and latency_ms",
    ),
    "histogram of another kind": (
        lambda project: _write(project.add(length_histogram="h.json") / "h.json", '{"a": 1}'),
        "length_histogram: got ",
    ),
    "histogram of zeros": (
        lambda project: _write(project.add(length_histogram="h.json") / "h.json", "[0, 0]"),
        "not all zero",
    ),
    "histogram beyond the longest text": (
        lambda project: _write(project.add(length_histogram="h.json", max_tokens=2) / "h.json", "[1, 1, 1]"),
        "a list of 1 to 2 counts",
    ),
    "not a config": (
        lambda project: project.change_config("max_batch_size: 64", "max_batch_size: many"),
        "config.pbtxt:",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_invalid_fronts_are_named_and_not_published(project: Project, kind: str) -> None:
    project.add()
    change, said = BROKEN[kind]
    change(project)
    status, _, err = project.make()
    assert status == 1
    assert said in err
    assert not project.engines().exists() and not project.generated().exists()
    assert not list(project.build.glob("engines/.*"))


def test_failed_build_keeps_the_previous_engines(project: Project) -> None:
    project.add()
    project.make()
    stamp, config = project.stamp(), project.generated().read_bytes()
    project.change_config("dims: [ 8 ]", "dims: [ 9 ]")
    status, _, err = project.make()
    assert status == 1 and "not published: front" in err
    assert (project.stamp(), project.generated().read_bytes()) == (stamp, config)


def test_other_models_are_built_after_a_failure(project: Project) -> None:
    project.add("bad", checkpoint="absent")
    project.add("good")
    project.add("worse", profile_file="absent.json")
    status, out, err = project.make()
    assert status == 1
    assert "good: built" in out and project.engines("good").exists()
    assert err.rstrip().endswith("not published: bad, worse")


# The failure of one model.


def test_a_failure_is_kept_until_the_model_is_built(project: Project) -> None:
    project.add("good")
    project.add("bad", checkpoint="absent")
    assert project.make("--keep-going")[0] == 0
    assert failures.read(project.build) == {"bad": "checkpoint: " + failures.read(project.build)["bad"][12:]}
    assert "no folder absent" in failures.read(project.build)["bad"]
    # A build of another model says nothing of it.
    assert project.make("good")[0] == 0
    assert list(failures.read(project.build)) == ["bad"]
    project.add("bad")
    assert project.make("bad")[0] == 0
    assert failures.read(project.build) == {}


def test_a_failure_is_recorded_before_the_next_model_is_built(project: Project) -> None:
    project.add("bad", checkpoint="absent")
    project.add("good")
    project.build.mkdir()
    paths = engines.paths_of(argparse.Namespace(repository=project.repository, build=project.build))

    def killed(summary: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        publish_all(["bad", "good"], paths, killed, failed=lambda line: None)
    assert list(failures.read(project.build)) == ["bad"]


def test_failure_is_removed_with_the_folder(project: Project) -> None:
    project.add("good")
    folder = project.add("bad", checkpoint="absent")
    project.make()
    shutil.rmtree(folder)
    assert project.make()[0] == 0
    assert failures.read(project.build) == {}


def test_deleted_model_is_no_longer_published(project: Project) -> None:
    workers = {"placement": "resident", "workers": 2}
    project.add("kept", **workers)
    folder = project.add("gone", **workers)
    assert project.make()[0] == 0
    shutil.rmtree(folder)
    # Also where only another model is built.
    status, out, _ = project.make("kept")
    assert status == 0 and f"gone_w00: removed, it is not in {project.repository}" in out
    assert {path.name for path in project.generated().parent.parent.iterdir()} == {"kept", "kept_w00", "kept_w01"}


def test_empty_repository_removes_nothing(project: Project, tmp_path: Path) -> None:
    project.add("kept")
    project.make()
    (tmp_path / "other").mkdir()
    assert main(["engines", "--repository", str(tmp_path / "other"), "--build", str(project.build)]) == 2
    assert project.generated("kept").is_file()


def test_name_of_a_worker_fails_that_model_alone(project: Project) -> None:
    project.add("front")
    project.add("front_w00")
    status, out, err = project.make()
    assert status == 1 and "front: built" in out
    assert "front_w00: name: got 'front_w00'; another name: a worker of front may have this one" in err.splitlines()


def test_keep_going_needs_one_published_model(project: Project) -> None:
    project.add("bad", checkpoint="absent")
    assert project.make("--keep-going")[0] == 1
    project.add("good")
    assert project.make("--keep-going")[0] == 0
    assert project.make("--keep-going", "bad")[0] == 1
    assert project.make()[0] == 1


def test_unexpected_error_outside_of_a_model_is_one_line(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(*_: Any) -> Any:
        raise PermissionError(13, "Permission denied", "model_repository")

    monkeypatch.setattr(engines, "front_folders", unreadable)
    project.add("good")
    status, _, err = project.make()
    log = project.build / "engines.traceback"
    said = f"PermissionError: [Errno 13] Permission denied: 'model_repository' (traceback in {log})"
    assert status == 2 and err.splitlines() == [f"shapeshift engines: the build ended early: {said}"]
    assert "unreadable" in log.read_text()


def test_library_error_fails_one_model(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    def odd(planned: Any, *rest: Any) -> Any:
        if planned.front.name == "bad":
            raise ValueError("no such layer\nand more")
        return built(planned, *rest)

    built = text_front.build
    monkeypatch.setattr(text_front, "build", odd)
    project.add("bad")
    project.add("good")
    status, out, err = project.make()
    assert status == 1 and "good: built" in out
    said = f"bad: ValueError: no such layer (traceback in {project.build / 'bad.traceback'})"
    assert said in err.splitlines() and "Traceback" not in err
    assert "and more" in (project.build / "bad.traceback").read_text()
