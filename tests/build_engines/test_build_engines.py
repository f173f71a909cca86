"""`make engines`, run in this process over front models with emulated engines."""

from __future__ import annotations

import json
import queue
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from build_engines import __main__ as command
from shapeshift import files
from shapeshift.engines import failures, manifest, precision
from shapeshift.triton import modelconfig


class House:
    """A project folder of its own: `model_repository`, `checkpoint` and, once built, `build`."""

    def __init__(self, root: Path, add_front: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
        self.root = root
        self.repository = root / "model_repository"
        self.build = root / "build"
        self.checkpoint = root / "checkpoint"
        self._add_front = add_front
        self._capsys = capsys

    def add(self, name: str = "front", **parameters: object) -> Path:
        """A front model, or the same one with other parameters."""
        return self._add_front(self.repository, name, **{"checkpoint": self.checkpoint, **parameters})

    def change_config(self, before: str, after: str, name: str = "front") -> None:
        file = self.repository / name / "config.pbtxt"
        text = file.read_text()
        assert before in text
        file.write_text(text.replace(before, after))

    def make(self, *models: str) -> tuple[int, str, str]:
        """Run the command: exit status, standard output, standard error."""
        sys.argv = ["build_engines", "--repository", str(self.repository), "--build", str(self.build), *models]
        status = command.main()
        captured = self._capsys.readouterr()
        return status, captured.out, captured.err

    def engines(self, name: str = "front") -> Path:
        return self.build / "engines" / name

    def generated(self, name: str = "front") -> Path:
        return self.build / "repository" / name / "config.pbtxt"

    def stamp(self, name: str = "front") -> tuple[int, int]:
        """Changes whenever the engines were built anew."""
        state = (self.engines(name) / manifest.FILE_NAME).stat()
        return state.st_ino, state.st_mtime_ns


@pytest.fixture
def house(
    tmp_path: Path,
    light_checkpoint: Path,
    add_front: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> House:
    shutil.copytree(light_checkpoint, tmp_path / "checkpoint")
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.chdir(tmp_path)
    return House(tmp_path, add_front, capsys)


def test_builds_and_generates_what_a_server_loads(house: House) -> None:
    folder = house.add(bins="16,64", queue_rows=99)
    (folder / "how_to_call.txt").write_text("curl {host}")
    status, out, err = house.make()
    assert status == 0
    assert "front: built; emulated 1, f32" in out
    assert all(name in out for name in ("dynamic", " 16 ", " 64 "))
    assert "not published" not in err

    made = manifest.load(house.engines())
    made.check_files(house.engines())
    assert [entry.tokens for entry in made.engines] == [None, 16, 64]
    assert (made.model, made.provider, made.precision, made.max_tokens) == ("front", "emulated", "f32", 512)

    assert (house.generated().parent / "1").is_dir()
    assert (house.generated().parent / "how_to_call.txt").read_text().endswith("curl {host}")
    config = modelconfig.read(house.generated())
    stated = modelconfig.parameters(config)
    assert (stated["provider"], stated["precision"], stated["queue_rows"]) == ("emulated", "f32", "99")
    assert stated["manifest_sha256"] == manifest.sha256(house.engines())
    assert stated["checkpoint_sha256"] == made.checkpoint_sha256
    assert (house.generated().parent / stated["engines"]).resolve() == house.engines()
    assert config.name == "front" and [output.name for output in config.output] == ["EMBEDDING"]

    profile = json.loads(stated["profile"])
    assert profile["hardware"] == made.hardware and profile["precision"] == "f32"
    assert [engine["tokens"] for engine in profile["engines"]] == [None, 16, 64]
    for engine, entry in zip(profile["engines"], made.engines, strict=True):
        assert engine["rows"] == entry.rows
        assert [point[:2] for point in engine["latency"]] == [[p.tokens, p.median_ms] for p in entry.latency]


def test_auto_is_settled_in_what_is_generated(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    for has, settled in ((True, "bf16"), (False, "f32")):
        monkeypatch.setattr(precision, "cpu_has_bf16", lambda has=has: has)
        house.add(precision="auto")
        assert house.make()[0] == 0
        assert modelconfig.parameters(modelconfig.read(house.generated()))["precision"] == settled
        assert manifest.load(house.engines()).precision == settled


def test_what_is_current_is_not_built_again(house: House) -> None:
    house.add()
    assert "front: built" in house.make()[1]
    stamp, config = house.stamp(), house.generated().read_bytes()
    folder = house.generated().parent.stat()
    status, out, _ = house.make()
    assert status == 0 and "front: up to date" in out
    assert house.stamp() == stamp
    assert house.generated().read_bytes() == config
    # A server may be reading it.
    assert house.generated().parent.stat().st_ino == folder.st_ino
    assert house.generated().parent.stat().st_mtime_ns == folder.st_mtime_ns


def test_a_folder_that_was_changed_is_made_anew(house: House) -> None:
    house.add()
    house.make()
    config = house.generated().read_bytes()
    (house.generated().parent / "1" / "model.py").write_text("what nobody asked for")
    house.generated().write_text("torn")
    assert house.make()[0] == 0
    assert house.generated().read_bytes() == config
    assert list((house.generated().parent / "1").iterdir()) == []


def test_two_at_once_take_turns(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    house.add()
    said: queue.Queue[str] = queue.Queue()
    monkeypatch.setattr(command, "_say", said.put)
    with ThreadPoolExecutor(1) as second:
        with files.exclusive(house.build / command.LOCK):
            made = second.submit(house.make)
            assert said.get(timeout=60) == f"waits for another one in {house.build}"
            assert not made.done() and not house.engines().exists()
        assert made.result(timeout=60)[0] == 0
    assert house.generated().is_file()


REBUILDS: dict[str, Callable[[House], object]] = {
    "bins": lambda house: house.add(bins="16,32"),
    "max_tokens": lambda house: house.add(max_tokens=128),
    "time_scale": lambda house: house.add(time_scale=2.0),
    "packing": lambda house: house.add(packing=False),
    "latencies": lambda house: house.add(latency_ms=(0.2, 0.3)),
    "weights": lambda house: (house.checkpoint / "model.safetensors").write_bytes(b"other"),
    "tokenizer": lambda house: _append_space(house.checkpoint / "tokenizer.json"),
    "histogram": lambda house: _write(house.add(length_histogram="h.json") / "h.json", "[1, 2, 3]"),
    "an engine file that was cut": lambda house: (house.engines() / "emulated.json").write_text("{"),
    "an engine file that was changed": lambda house: _append_space(house.engines() / "tokenizer.json"),
    "an engine file that is gone": lambda house: (house.engines() / "emulated.json").unlink(),
    "a manifest that was cut": lambda house: (house.engines() / "manifest.json").write_text("{"),
    "no manifest": lambda house: (house.engines() / "manifest.json").unlink(),
}


def _append_space(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b" ")


def _write(file: Path, text: str) -> None:
    file.write_text(text)


@pytest.mark.parametrize("change", REBUILDS)
def test_what_changes_the_engines_builds_them_again(house: House, change: str) -> None:
    house.add()
    house.make()
    stamp = house.stamp() if (house.engines() / "manifest.json").exists() else None
    REBUILDS[change](house)
    status, out, _ = house.make()
    assert status == 0 and "front: built" in out
    assert house.stamp() != stamp
    manifest.load(house.engines()).check_files(house.engines())
    assert "front: up to date" in house.make()[1]


def test_what_only_serving_reads_builds_nothing(house: House) -> None:
    house.add(queue_rows=10)
    house.make()
    stamp = house.stamp()
    house.add(queue_rows=20, engine_threads=1)
    assert "front: up to date" in house.make()[1]
    assert house.stamp() == stamp
    assert modelconfig.parameters(modelconfig.read(house.generated()))["queue_rows"] == "20"


def test_only_the_models_asked_for(house: House) -> None:
    house.add("one")
    house.add("two")
    assert house.make("two")[0] == 0
    assert not house.engines("one").exists() and house.engines("two").exists()
    status, _, err = house.make("three")
    assert status == 1 and "no model three" in err and "there are: one, two" in err


@pytest.mark.parametrize(
    ("parameters", "tokens"),
    [
        ({"bins": "7,100,512"}, [None, 7, 100, 512]),
        ({"bins": "512"}, [None, 512]),
        ({"bins": "none"}, [None]),
        ({"bins": "16,32", "max_tokens": 32, "dynamic": False}, [16, 32]),
    ],
)
def test_explicit_bins_are_kept(house: House, parameters: dict[str, object], tokens: list[int | None]) -> None:
    house.add(**parameters)
    assert house.make()[0] == 0
    assert [entry.tokens for entry in manifest.load(house.engines()).engines] == tokens


def test_staircase_bins_end_where_the_latency_steps(house: House) -> None:
    folder = house.add(bins="staircase", max_tokens=256)
    profile = {"lengths": [1, 64, 65, 128, 129, 256], "latency_ms": [1, 1, 2, 2, 3, 3]}
    (folder / "profile.json").write_text(json.dumps(profile))
    assert house.make()[0] == 0
    assert [entry.tokens for entry in manifest.load(house.engines()).engines] == [None, 64, 128, 256]


def test_histogram_bins_follow_the_models_own_lengths(house: House) -> None:
    folder = house.add(bins="histogram", max_bins=2, max_tokens=64, length_histogram="h.json", latency_ms=(1, 100))
    (folder / "h.json").write_text(json.dumps([0] * 9 + [50] + [0] * 29 + [50]))
    assert house.make()[0] == 0
    assert [entry.tokens for entry in manifest.load(house.engines()).engines] == [None, 10, 64]


def test_time_scale_is_in_the_profile(house: House) -> None:
    house.add(bins="512", latency_ms=(10, 20), time_scale=0.5)
    house.make()
    assert manifest.load(house.engines()).engines[1].latency[0].median_ms == pytest.approx(10)


# What cannot be built.


def parameter(name: str, value: object) -> str:
    """As it stands in a front's config.pbtxt."""
    return f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}'


BROKEN: dict[str, tuple[Callable[[House], object], str]] = {
    "wrong dims": (
        lambda house: house.change_config("dims: [ 8 ]", "dims: [ 9 ]"),
        "output EMBEDDING: got ['TYPE_FP32', 9]; data_type: TYPE_FP32 dims: [ 8 ] for this checkpoint",
    ),
    "unknown output": (
        lambda house: house.change_config('"EMBEDDING"', '"LOGITS"'),
        "output LOGITS: got ['TYPE_FP32', 8]; data_type: TYPE_FP32 dims: [ 2 ] for this checkpoint",
    ),
    "unknown parameter": (
        lambda house: house.add(bin=3),
        "bin: got 'bin'; unknown parameter; known: allocation, bins, ",
    ),
    "a parameter of generated configs": (
        lambda house: house.add(manifest_sha256="0"),
        "manifest_sha256: got 'manifest_sha256'; unknown parameter",
    ),
    "wrong name": (
        lambda house: house.change_config('name: "front"', 'name: "other"'),
        "name: got 'other'; the folder's name, front",
    ),
    "bad value": (lambda house: house.add(max_bins="many"), "max_bins: got 'many'; must be a whole number"),
    "bad serving value": (lambda house: house.add(queue_rows=0), "queue_rows: got 0; at least 1"),
    "no checkpoint": (
        lambda house: house.change_config(parameter("checkpoint", house.checkpoint), ""),
        "checkpoint: got None; this parameter is required",
    ),
    "checkpoint that is not there": (lambda house: house.add(checkpoint="absent"), "checkpoint: no folder absent"),
    "checkpoint without weights": (
        lambda house: (house.checkpoint / "model.safetensors").rename(house.checkpoint / "pytorch_model.bin"),
        "found only pytorch_model.bin, which can execute code",
    ),
    "no profile": (lambda house: house.add(profile_file=""), "profile_file: got ''; an emulated model needs"),
    "profile that is not there": (lambda house: house.add(profile_file="absent.json"), "profile_file: got "),
    "profile that is not JSON": (
        lambda house: (house.repository / "front" / "profile.json").write_text("{"),
        "profile_file: got ",
    ),
    "profile of another kind": (
        lambda house: (house.repository / "front" / "profile.json").write_text("[1]"),
        "profile_file: got 'profile.json'; lengths and latency_ms",
    ),
    "histogram of another kind": (
        lambda house: _write(house.add(length_histogram="h.json") / "h.json", '{"a": 1}'),
        "length_histogram: got ",
    ),
    "histogram of zeros": (
        lambda house: _write(house.add(length_histogram="h.json") / "h.json", "[0, 0]"),
        "not all zero",
    ),
    "histogram beyond the longest text": (
        lambda house: _write(house.add(length_histogram="h.json", max_tokens=2) / "h.json", "[1, 1, 1]"),
        "a list of 1 to 2 counts",
    ),
    "not a config": (lambda house: house.change_config("max_batch_size: 64", "max_batch_size: many"), "config.pbtxt:"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_what_cannot_be_built_is_named_and_nothing_is_published(house: House, kind: str) -> None:
    house.add()
    change, said = BROKEN[kind]
    change(house)
    status, _, err = house.make()
    assert status == 1
    assert said in err
    assert not house.engines().exists() and not house.generated().exists()
    assert not list(house.build.glob("engines/.*"))


def test_a_failed_build_leaves_what_was_there(house: House) -> None:
    house.add()
    house.make()
    stamp, config = house.stamp(), house.generated().read_bytes()
    house.change_config("dims: [ 8 ]", "dims: [ 9 ]")
    status, _, err = house.make()
    assert status == 1 and "not published: front" in err
    assert (house.stamp(), house.generated().read_bytes()) == (stamp, config)


def test_other_models_are_built_all_the_same(house: House) -> None:
    house.add("bad", checkpoint="absent")
    house.add("good")
    house.add("worse", profile_file="absent.json")
    status, out, err = house.make()
    assert status == 1
    assert "good: built" in out and house.engines("good").exists()
    assert err.rstrip().endswith("make engines: not published: bad, worse")


# One model's failure and the others.


def test_a_failure_is_kept_until_the_model_is_built(house: House) -> None:
    house.add("good")
    house.add("bad", checkpoint="absent")
    assert house.make("--keep-going")[0] == 0
    assert failures.read(house.build) == {"bad": "checkpoint: " + failures.read(house.build)["bad"][12:]}
    assert "no folder absent" in failures.read(house.build)["bad"]
    # A build of another model says nothing of it.
    assert house.make("good")[0] == 0
    assert list(failures.read(house.build)) == ["bad"]
    house.add("bad")
    assert house.make("bad")[0] == 0
    assert failures.read(house.build) == {}


def test_a_failure_is_forgotten_with_its_folder(house: House) -> None:
    house.add("good")
    folder = house.add("bad", checkpoint="absent")
    house.make()
    shutil.rmtree(folder)
    assert house.make()[0] == 0
    assert failures.read(house.build) == {}


def test_to_keep_going_takes_one_model_that_was_built(house: House) -> None:
    house.add("bad", checkpoint="absent")
    assert house.make("--keep-going")[0] == 1
    house.add("good")
    assert house.make("--keep-going")[0] == 0
    assert house.make("--keep-going", "bad")[0] == 1
    assert house.make()[0] == 1


def test_what_a_library_raises_ends_one_model(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    def odd(planned: Any, *rest: Any) -> Any:
        if planned.front.name == "bad":
            raise ValueError("no such layer\nand more")
        return built(planned, *rest)

    built = command.build
    monkeypatch.setattr(command, "build", odd)
    house.add("bad")
    house.add("good")
    status, out, err = house.make()
    assert status == 1 and "good: built" in out
    said = f"bad: ValueError: no such layer (traceback in {house.build / 'bad.traceback'})"
    assert said in err.splitlines() and "Traceback" not in err
    assert "and more" in (house.build / "bad.traceback").read_text()
