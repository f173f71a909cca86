"""Checkpoints that config.pbtxt names by the id of a hub, from a hub on this machine."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from shapeshift.build_engines.hub import needed_files
from shapeshift.build_engines.hub.download import RECORD, HubId
from shapeshift.build_engines.hub.sources import base_names, find_checkpoint
from shapeshift.build_engines.paths import BuildPaths
from shapeshift.engines import manifest
from shapeshift.errors import EngineError, InvalidInputError, NotFoundError, ShapeshiftError, UnsupportedError
from tests.build_engines.hub_server import TOKEN, Hub, git_hash

PROJECT = Path(__file__).resolve().parents[2]
TRANSFORMER = {"path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NEEDED = ["1_Pooling/config.json", "config.json", "model.safetensors", "modules.json", "tokenizer.json"]


@pytest.fixture
def repository(tmp_path: Path, light_checkpoint: Path) -> Path:
    """A repository of sentence-transformers with the files that such repositories hold beside those that are needed."""
    folder = tmp_path / "published"
    shutil.copytree(light_checkpoint, folder)
    files = {
        "modules.json": json.dumps([TRANSFORMER, POOLING]),
        "1_Pooling/config.json": json.dumps({"pooling_mode_mean_tokens": True}),
        "pytorch_model.bin": "x",
        "consolidated.safetensors": "x",
        "onnx/model.onnx": "x",
        "onnx/config.json": "{}",
        "openvino/model.safetensors": "x",
        "README.md": "about",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def paths(tmp_path: Path, hub: Hub) -> BuildPaths:
    """The folders of a build."""
    return BuildPaths(tmp_path, tmp_path / "build", tmp_path / "model_repository")


def test_only_needed_files_are_fetched_and_a_later_build_asks_nobody(
    hub: Hub, repository: Path, paths: BuildPaths
) -> None:
    commit = hub.add("owner/model", repository)
    found = find_checkpoint("owner/model", paths)
    assert found.origin == f"owner/model@{commit}"
    assert sorted(file.relative_to(found.folder).as_posix() for file in found.folder.rglob("*.*")) == NEEDED
    assert sorted({*hub.downloaded()}) == NEEDED
    (repository / "config.json").write_text("{}")
    assert hub.add("owner/model", repository) != commit
    hub.asked.clear()
    assert find_checkpoint("owner/model", paths) == found
    assert hub.asked == []


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub: Hub, repository: Path, paths: BuildPaths) -> None:
    old = hub.add("owner/model", repository, "v1.0")
    newer = paths.root / "newer"
    shutil.copytree(repository, newer)
    (newer / "config.json").write_text('{"model_type": "newer"}')
    new = hub.add("owner/model", newer)
    for asked, commit in (("@v1.0", old), ("", new), (f"@{old}", old)):
        assert find_checkpoint(f"owner/model{asked}", paths).origin == f"owner/model@{commit}"


def test_an_emptied_cache_is_filled_with_the_recorded_commit(hub: Hub, repository: Path, paths: BuildPaths) -> None:
    commit = hub.add("owner/model", repository)
    found = find_checkpoint("owner/model", paths)
    shutil.rmtree(paths.root / "hf")
    newer = paths.root / "newer"
    shutil.copytree(repository, newer)
    (newer / "config.json").write_text("{}")
    hub.add("owner/model", newer)
    assert find_checkpoint("owner/model", paths) == found
    assert found.origin.endswith(commit) and (found.folder / "model.safetensors").is_file()


def test_offline_takes_what_the_cache_has(
    hub: Hub, repository: Path, paths: BuildPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    hub.add("owner/model", repository)
    found = find_checkpoint("owner/model", paths)
    (paths.build / RECORD).unlink()
    hub.asked.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert find_checkpoint("owner/model", paths) == found
    with pytest.raises(NotFoundError, match=r"other/model: .*HF_HUB_OFFLINE forbids to download it; unset"):
        find_checkpoint("other/model", paths)
    assert hub.asked == []


def test_a_gated_repository_needs_a_token(
    hub: Hub, repository: Path, paths: BuildPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("owner/gated", repository, gated=True)
    with pytest.raises(UnsupportedError, match=r"^hub id owner/gated: gated at .*accept its terms.*HF_TOKEN"):
        find_checkpoint("owner/gated", paths)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert find_checkpoint("owner/gated", paths).folder.is_dir()


def test_unknown_repositories_and_revisions(hub: Hub, repository: Path, paths: BuildPaths) -> None:
    hub.add("owner/model", repository)
    with pytest.raises(NotFoundError, match=r"^hub id owner/absent: .* no such repository, or it is private"):
        find_checkpoint("owner/absent", paths)
    with pytest.raises(NotFoundError, match=r"^hub id owner/model@v9: .* no such revision; give a branch"):
        find_checkpoint("owner/model@v9", paths)
    assert not (paths.build / RECORD).exists()


@pytest.mark.parametrize("name", ["absent", "./owner/absent", "/owner/absent", "../absent", "a/b/c", "owner/a@"])
def test_what_is_no_id_is_searched_on_disk_alone(hub: Hub, paths: BuildPaths, name: str) -> None:
    with pytest.raises(
        NotFoundError, match=r"no folder .*; give a folder, a file, or a hub id such as owner/model@revision"
    ):
        find_checkpoint(name, paths)
    assert hub.asked == []


def test_a_folder_goes_before_the_hub(hub: Hub, repository: Path, paths: BuildPaths) -> None:
    folder = paths.build / "checkpoints" / "owner" / "model"
    shutil.copytree(repository, folder)
    found = find_checkpoint("owner/model", paths)
    assert (found.folder, found.origin, hub.asked) == (folder, "", [])


def test_an_interrupted_download_is_told_and_continued(hub: Hub, repository: Path, paths: BuildPaths) -> None:
    (repository / "model.safetensors").write_bytes(bytes(range(256)) * 4096)
    hub.add("owner/model", repository)
    hub.cut.add("model.safetensors")
    with pytest.raises(EngineError, match=r"^hub id owner/model: the download .* ended early .*run the same"):
        find_checkpoint("owner/model", paths)
    assert not (paths.build / RECORD).exists()
    hub.cut.clear()
    found = find_checkpoint("owner/model", paths)
    assert (found.folder / "model.safetensors").read_bytes() == (repository / "model.safetensors").read_bytes()


SHA256 = "model.safetensors"


@pytest.mark.parametrize("name", ["config.json", "1_Pooling/config.json", SHA256])
def test_a_file_with_another_hash_than_the_hub_states_is_refused_and_removed(
    hub: Hub, repository: Path, paths: BuildPaths, name: str
) -> None:
    """Small files have the hash of Git, others SHA-256; every bad file is gone, and a later try gets the right ones."""
    whole = (repository / SHA256).read_bytes()
    hub.hashes[SHA256] = hashlib.sha256(whole).hexdigest()
    commit = hub.add("owner/model", repository)
    content = (repository / name).read_bytes()
    sent = content[:-2] + b" }" if name != SHA256 else content[:-4] + b"\0\0\0\0"
    hub.sent |= {name: sent, "tokenizer.json": b"{}"}
    stated = hub.hashes[SHA256] if name == SHA256 else git_hash(content)
    received = hashlib.sha256(sent).hexdigest() if name == SHA256 else git_hash(sent)
    with pytest.raises(InvalidInputError) as refused:
        find_checkpoint("owner/model", paths)
    assert f"hub id owner/model: {name}: got '{received}'; the hash that the hub states, {stated}" in str(refused.value)
    cached = [file for file in (paths.root / "hf").rglob("*") if file.is_file() and "blobs" in file.parts]
    assert cached and all(file.name in (git_hash(file.read_bytes()), hub.hashes[SHA256]) for file in cached)
    assert not (paths.build / RECORD).exists()
    hub.sent.clear()
    folder = find_checkpoint("owner/model", paths).folder
    assert folder.name == commit and (folder / SHA256).read_bytes() == whole
    assert (folder / name).read_bytes() == content


def test_a_file_of_which_the_hub_states_no_hash_is_refused(hub: Hub, repository: Path, paths: BuildPaths) -> None:
    hub.hashes[SHA256] = "version-3"
    hub.add("owner/model", repository)
    expected = "hub id owner/model: model.safetensors: got 'version-3'; a hub that states hashes of files"
    with pytest.raises(InvalidInputError, match=expected):
        find_checkpoint("owner/model", paths)
    assert not list((paths.root / "hf").rglob("version-3")) and not list((paths.root / "hf").rglob(SHA256))


def test_a_lie_that_leads_out_of_the_cache_removes_nothing_there(hub: Hub, repository: Path, paths: BuildPaths) -> None:
    precious = paths.root / "precious"
    precious.write_text("mine")
    hub.hashes["tokenizer.json"] = "../../../../precious"
    hub.add("owner/model", repository)
    with pytest.raises(InvalidInputError, match=r"tokenizer.json: got 'precious'; a hub that states hashes"):
        find_checkpoint("owner/model", paths)
    assert precious.read_text() == "mine"


def test_a_cache_without_links_is_refused(
    hub: Hub, repository: Path, paths: BuildPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_SYMLINKS", True)
    hub.add("owner/model", repository)
    with pytest.raises(InvalidInputError, match=r"json: got 'no link'; HF_HOME where links can be"):
        find_checkpoint("owner/model", paths)


def test_no_network(hub: Hub, paths: BuildPaths, monkeypatch: pytest.MonkeyPatch, free_ports: Any) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free_ports(1)[0]}")
    with pytest.raises(EngineError, match=r"cannot reach http://127.0.0.1:\d+ .*set HF_ENDPOINT to a mirror"):
        find_checkpoint("owner/model", paths)


@pytest.mark.parametrize("silent", ["owner/model", "/tree/", "everything"])
def test_a_hub_that_hangs(
    hub: Hub, repository: Path, paths: BuildPaths, monkeypatch: pytest.MonkeyPatch, silent: str
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    hub.add("owner/model", repository)
    hub.silent.add(silent)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        if silent == "everything":
            monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{listening.getsockname()[1]}")
        with pytest.raises(
            EngineError, match=r"127.0.0.1:\d+ sent nothing for HF_HUB_DOWNLOAD_TIMEOUT, 0.2 s; run the"
        ):
            find_checkpoint("owner/model", paths)
    hub.resumed.set()


def test_a_disk_that_is_or_becomes_full(
    hub: Hub, repository: Path, paths: BuildPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    hub.add("owner/model", repository)
    usage = shutil.disk_usage(paths.root)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10))
        with pytest.raises(EngineError, match=r"owner/model: \d+ MB to download, 0 MB free in .*set HF_HOME"):
            find_checkpoint("owner/model", paths)
    download = huggingface_hub.snapshot_download

    def full(*args: Any, **options: Any) -> Any:
        if options.get("dry_run"):
            return download(*args, **options)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    with pytest.raises(EngineError, match="owner/model: no space left in .*make room"):
        find_checkpoint("owner/model", paths)


def test_without_the_library(hub: Hub, paths: BuildPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(EngineError, match="needs huggingface_hub; run `pip install huggingface_hub`"):
        find_checkpoint("owner/model", paths)


INDEX = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})
SHARDS = ["model-1.safetensors", "model-2.safetensors", "model.safetensors.index.json"]


@pytest.mark.parametrize(
    ("names", "texts", "expected"),
    [
        (["config.json", *SHARDS, "extra.safetensors", "consolidated.safetensors"], {SHARDS[2]: INDEX}, SHARDS),
        (["config.json", "model.safetensors", *SHARDS], {}, ["model.safetensors"]),
        (["config.json", "weights.safetensors", "weights.fp16.safetensors"], {}, ["weights.safetensors"]),
        (["config.json", "model.safetensors", "merges.txt", "spiece.model", "original/consolidated.safetensors"], {},
         ["merges.txt", "model.safetensors", "spiece.model"]),
        (["config.json", "model.safetensors", "chat_template.jinja", "additional_chat_templates/a.jinja", "x.md"], {},
         ["additional_chat_templates/a.jinja", "chat_template.jinja", "model.safetensors"]),
    ],
)  # fmt: skip
def test_weights_are_chosen_once(names: list[str], texts: Mapping[str, str], expected: list[str]) -> None:
    read: Callable[[str], str] = texts.__getitem__
    assert needed_files.of_checkpoint(names, read) == sorted(["config.json", *expected])


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        (["config.json", "pytorch_model.bin"], r"pytorch_model.bin'; weights as \*.safetensors"),
        (["a-Q4_0.gguf", "a-Q8_0.gguf"], "owner/model:VARIANT of a hub .*a-Q4_0.*a-Q8_0"),
    ],
)
def test_repositories_without_what_is_needed(names: list[str], missing: str) -> None:
    with pytest.raises(InvalidInputError, match=missing):
        needed_files.of_checkpoint(names, lambda name: "{}")


@pytest.mark.parametrize(
    ("names", "variant", "expected"),
    [
        (["README.md", "a.gguf"], "", ["a.gguf"]),
        (["a-Q4_0.gguf", "a-Q8_0.gguf", "config.json"], "q8_0", ["a-Q8_0.gguf"]),
        (["a.Q4_0-00001-of-00002.gguf", "a.Q4_0-00002-of-00002.gguf", "a.F16.gguf"], "Q4_0",
         ["a.Q4_0-00001-of-00002.gguf", "a.Q4_0-00002-of-00002.gguf"]),
        (["config.json", "model.safetensors", "a.gguf"], "", ["config.json", "model.safetensors"]),
    ],
)  # fmt: skip
def test_a_gguf_model_is_chosen_by_its_variant(names: list[str], variant: str, expected: list[str]) -> None:
    assert needed_files.of_checkpoint(names, lambda name: "{}", variant) == expected


def test_a_record_that_cannot_be_read(hub: Hub, paths: BuildPaths) -> None:
    paths.build.mkdir()
    (paths.build / RECORD).write_text("{")
    with pytest.raises(ShapeshiftError, match=rf"{RECORD}: .*remove it"):
        find_checkpoint("owner/model", paths)


def test_names_of_the_base_model() -> None:
    assert HubId.parse("owner/model@v1") == HubId("owner/model", "v1")
    names = base_names("owner/model@v1", Path("/cache/snapshots/abc"), "further")
    assert names == {"owner/model@v1", "owner/model", "model", "abc", "further"}


# A real build, with what the user sets in the environment.


def test_a_build_from_the_hub(hub: Hub, repository: Path, tmp_path: Path, add_front: Callable[..., Path]) -> None:
    commit = hub.add("owner/model", repository, gated=True)
    add_front(tmp_path / "model_repository", "encode", checkpoint="owner/model@main", max_tokens=32, pooling="mean")
    environment = {"PATH": "/usr/bin:/bin", "HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path / "hf")}
    command = [sys.executable, "-m", "shapeshift.cli.main", "engines"]

    def build(**more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=tmp_path, env={**environment, **more}, capture_output=True, text=True, check=False
        )

    done = build()
    assert done.returncode == 0, done.stderr
    assert manifest.load(tmp_path / "build" / "engines" / "encode").checkpoint_origin == f"owner/model@{commit}"
    assert (tmp_path / "hf" / "hub" / "models--owner--model" / "snapshots" / commit / "config.json").exists()
    assert all("owner/model" in path for _, path in hub.asked), "nothing else is asked"
    hub.asked.clear()
    shutil.rmtree(tmp_path / "build" / "engines")
    done = build(HF_HUB_OFFLINE="1", HF_TOKEN="")
    assert (done.returncode, hub.asked) == (0, []), done.stderr
