from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shapeshift import files
from shapeshift.engines import manifest
from shapeshift.engines.manifest import EngineEntry, Latency, Manifest, Output
from shapeshift.errors import EngineError
from shapeshift.files import file_sha256


def point(tokens: int, ms: float) -> Latency:
    return Latency(tokens=tokens, rows=1, median_ms=ms, p99_ms=2 * ms, best_ms=ms)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two engine files and their manifest."""
    (tmp_path / "model.bin").write_bytes(bytes(range(256)) * 40)
    (tmp_path / "model.xml").write_text("<model/>")
    made = Manifest(
        model="encode",
        checkpoint_sha256="c" * 64,
        build_key="b" * 64,
        provider="emulated",
        provider_version="1",
        precision="f32",
        vocabulary=100,
        max_tokens=64,
        packs_rows=True,
        position_offset=0,
        reference="none",
        tolerance="none",
        hardware="some CPU",
        outputs=(Output("EMBEDDING", "TYPE_FP32", (8,)),),
        files=manifest.list_files(tmp_path),
        engines=(
            EngineEntry("model.xml", None, None, 1e-6, 0.999999, (point(8, 1.5), point(64, 9.0))),
            EngineEntry("model.xml", 32, 8, 1e-6, 0.999999, (point(32, 4.25),)),
        ),
    )
    made.save(tmp_path)
    return tmp_path


def test_round_trip(folder: Path) -> None:
    read = manifest.load(folder)
    assert [entry.name for entry in read.engines] == ["dynamic", "32"]
    assert read.engines[0].latency == (point(8, 1.5), point(64, 9.0))
    assert read.outputs == (Output("EMBEDDING", "TYPE_FP32", (8,)),)
    assert set(read.files) == {"model.bin", "model.xml"}
    read.check_files(folder)
    before = (folder / manifest.FILE_NAME).read_bytes()
    read.save(folder)
    assert (folder / manifest.FILE_NAME).read_bytes() == before
    assert manifest.load(folder, manifest.sha256(folder)) == read


def test_engines_whose_answers_may_be_mixed_have_one_version(folder: Path) -> None:
    read = manifest.load(folder)
    version = read.answers_version()
    assert 0 <= version < 2**63
    timed = [dataclasses.replace(entry, latency=(point(8, 7.0),)) for entry in read.engines]
    elsewhere = dataclasses.replace(
        read, hardware="another", build_key="a" * 64, note="x", engines=tuple(timed), files={}
    )
    assert elsewhere.answers_version() == version
    changes: list[dict[str, Any]] = [{"precision": "bf16"}, {"checkpoint_sha256": "d" * 64}, {"max_tokens": 63}]
    for change in [*changes, {"engines": read.engines[:1]}, {"outputs": ()}]:
        assert dataclasses.replace(read, **change).answers_version() != version


def test_replaced_manifest_is_rejected(folder: Path) -> None:
    expected = manifest.sha256(folder)
    read = manifest.load(folder)
    dataclasses.replace(read, max_tokens=63).save(folder)
    with pytest.raises(EngineError, match="not the one that the model's config names; run `shapeshift engines`"):
        manifest.load(folder, expected)
    assert manifest.load(folder).max_tokens == 63


def test_changed_files_are_named(folder: Path) -> None:
    read = manifest.load(folder)
    whole = (folder / "model.bin").read_bytes()
    (folder / "model.bin").write_bytes(whole[:-1])
    with pytest.raises(EngineError, match=r"model.bin: 10239 bytes, 10240 in the manifest; run `shapeshift engines`"):
        read.check_files(folder)
    (folder / "model.bin").write_bytes(whole[:-1] + b"\0")
    with pytest.raises(EngineError, match=r"model.bin: content differs from the manifest; run `shapeshift engines`"):
        read.check_files(folder)
    (folder / "model.bin").write_bytes(whole)
    read.check_files(folder)
    (folder / "model.xml").unlink()
    with pytest.raises(EngineError, match=r"model.xml is missing; run `shapeshift engines`"):
        read.check_files(folder)


def test_files_that_have_not_changed_are_hashed_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[str] = []

    def counted(path: Path) -> str:
        hashed.append(path.name)
        return file_sha256(path)

    monkeypatch.setattr(files, "file_sha256", counted)
    read, store = manifest.load(folder), folder.parent / "build" / "hashes.json"
    store.parent.mkdir()
    for name in read.files:
        os.utime(folder / name, (1e9, 1e9))
    for _ in range(2):
        read.check_files(folder, store)
        assert sorted(hashed) == ["model.bin", "model.xml"]
    whole = (folder / "model.bin").read_bytes()
    (folder / "model.bin").write_bytes(whole[:-1] + b"\0")
    with pytest.raises(EngineError, match=r"model.bin: content differs"):
        read.check_files(folder, store)
    assert manifest.hashes_file(store.parent / "engines" / "model") == store


def changed(**values: Any) -> Callable[[bytes], bytes]:
    return lambda content: json.dumps({**json.loads(content), **values}).encode()


BROKEN: dict[str, Callable[[bytes], bytes]] = {
    "cut short": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "not UTF-8": lambda content: b'{"format": "\xff"}',
    "a list": lambda content: b"[]",
    "a number": lambda content: b"3",
    "another format": changed(format=99),
    "no format": lambda content: b"{}",
    "unknown member": changed(surprise=1),
    "engines of another kind": changed(engines={"a": 1}),
    "engines without latency": changed(engines=[{"file": "x"}]),
    "files of another kind": changed(files=["model.bin"]),
    "outputs of another kind": changed(outputs=3),
    "point of another kind": changed(engines=[{"file": "x", "latency": [{"tokens": 1}]}]),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_unreadable_manifest_is_named(folder: Path, kind: str) -> None:
    file = folder / manifest.FILE_NAME
    file.write_bytes(BROKEN[kind](file.read_bytes()))
    with pytest.raises(EngineError, match=r"manifest\.json cannot be read .*; run `shapeshift engines`"):
        manifest.load(folder)


def test_unknown_format_is_reported(folder: Path) -> None:
    file = folder / manifest.FILE_NAME
    file.write_bytes(changed(format=99)(file.read_bytes()))
    with pytest.raises(EngineError, match=f"format 99, this version reads {manifest.FORMAT}"):
        manifest.load(folder)


def test_no_manifest(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(EngineError, match=r"no engine manifest .*manifest\.json; run `shapeshift engines`"):
            manifest.load(folder)
