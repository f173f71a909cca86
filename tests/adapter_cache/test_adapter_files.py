"""Adapters on disk: supported ones, refused ones and their errors, and the registry."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from shapeshift.adapter_cache.registry import peft, store
from shapeshift.adapter_cache.registry.peft import BaseModel
from shapeshift.errors import InvalidInputError, NotFoundError
from shapeshift.fused_decode.model.architecture import Architecture, from_config
from shapeshift.registry import FolderWatch, Registry
from tests.adapter_cache.lora_models import ATTENTION, Spec, make_adapter, save_adapter
from tests.fused_decode.checkpoints import make_checkpoint
from tests.fused_decode.families import CASES

SPEC = Spec(4, ATTENTION)
NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("base") / "small")


@pytest.fixture(scope="module")
def base(checkpoint: Path) -> BaseModel:
    return BaseModel.of_decoder(Architecture.read(checkpoint), {"small"}, 16, checkpoint)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")


# Supported adapters.


def let_a_minute_pass(folder: Path) -> None:
    """What was removed so far is so old that its files go."""
    file = folder / "registry.json"
    content = json.loads(file.read_text())
    content["removed"] = {place: at - 61 for place, at in content["removed"].items()}
    file.write_text(json.dumps(content))


def test_ranks_and_scales_are_read(checkpoint: Path, base: BaseModel, tmp_path: Path) -> None:
    found = peft.read(make_adapter(tmp_path / "a", checkpoint, SPEC), base)
    assert found.rank == 4 and len(found.factors) == 8
    assert {factor.scale for factor in found.factors} == {2.0}
    found = peft.read(make_adapter(tmp_path / "b", checkpoint, Spec(4, rslora=True, alpha=6)), base)
    assert {factor.scale for factor in found.factors} == {3.0}


def test_patterns_of_ranks_and_alphas(checkpoint: Path, base: BaseModel, tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "a", checkpoint, SPEC)
    changed = tensors(folder)
    for name in [name for name in changed if "k_proj" in name]:
        axis = 0 if "lora_A" in name else 1
        changed[name] = changed[name].narrow(axis, 0, 2).contiguous()
    patterns = {"rank_pattern": {"k_proj": 2}, "alpha_pattern": {"model.layers.1.self_attn.q_proj": 12}}
    found = peft.read(save_adapter(tmp_path / "b", checkpoint, SPEC, changed, **patterns), base)
    assert {factor.rank for factor in found.factors if factor.part == 1} == {2}
    scales = {(factor.layer, factor.linear, factor.part): factor.scale for factor in found.factors}
    assert (scales[0, 0, 0], scales[1, 0, 0], scales[0, 0, 1]) == (2.0, 3.0, 4.0)
    with pytest.raises(InvalidInputError, match="rank_pattern"):
        peft.read(save_adapter(tmp_path / "c", checkpoint, SPEC, changed, rank_pattern={".*k_proj": 2}), base)


# Refused adapters.


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"peft_type": "IA3"}, r"peft_type: got 'IA3'; LORA"),
        ({"use_dora": True}, r"lora_magnitude_vector with use_dora alone"),
        ({"use_dora": "yes"}, r"use_dora: got 'yes'; true or false"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save"),
        ({"bias": "all"}, r"bias: got 'all'"),
        ({"something_new": 3}, r"something_new: got 3"),
        ({"init_lora_weights": "pissa_niter_4"}, r"init_lora_weights: got 'pissa_niter_4'"),
        (
            {"base_model_name_or_path": "owner/other"},
            r"base_model_name_or_path: got 'owner/other'; .*: small.*\(base_names in config.pbtxt adds one\)",
        ),
        ({"r": "4"}, r"r: got '4'; a whole number"),
        ({"r": 8}, r"r: got 8; the rank of the factors of .*, 4"),
        ({"lora_alpha": None}, r"lora_alpha: got None; a finite number"),
        ({"lora_alpha": 10**400}, r"lora_alpha: got 1000+.*; a finite number"),
        ({"use_rslora": "yes"}, r"use_rslora: got 'yes'; true or false"),
        ({"x\ud800": 1}, r"x\\ud800: got 1"),
    ],
)
def test_unsupported_configurations_are_refused(
    checkpoint: Path, base: BaseModel, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    folder = make_adapter(tmp_path / "a", checkpoint, SPEC, **changes)
    with pytest.raises(InvalidInputError, match=said):
        peft.read(folder, base)


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        (NAME, torch.zeros(4, 65), r"q_proj.lora_A.*shape must be \(rank, 64\)"),
        (NAME, torch.zeros(3, 64), r"q_proj.lora_B.*shape must be \(64, 3\)"),
        (NAME.replace("q_proj", "z_proj"), torch.zeros(4, 64), r"z_proj.*a linear of the base model"),
        (NAME.replace("layers.0", "layers.7"), torch.zeros(4, 64), r"the base model has 2 layers"),
        (NAME.replace("layers.0", "layers." + "1" * 5000), torch.zeros(4, 64), r"the name of a LoRA factor"),
        (NAME.replace("lora_A.weight", "lora_magnitude_vector"), torch.zeros(64), r"with use_dora alone"),
        (NAME.replace("lora_A", "lora_B"), None, r"both factors"),
        (NAME, torch.zeros(4, 64, dtype=torch.int8), r"I8.*one of F32"),
    ],
)
def test_mismatched_tensors_are_refused(
    checkpoint: Path, base: BaseModel, tmp_path: Path, name: str, tensor: torch.Tensor | None, said: str
) -> None:
    changed = tensors(make_adapter(tmp_path / "a", checkpoint, SPEC))
    changed.pop(name, None)
    if tensor is not None:
        changed[name] = tensor
    with pytest.raises(InvalidInputError, match=said):
        peft.read(save_adapter(tmp_path / "b", checkpoint, SPEC, changed), base)


def test_a_rank_above_the_limit_is_refused(checkpoint: Path, base: BaseModel, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"got 17; a rank of 1 to max_rank \(16\)"):
        peft.read(make_adapter(tmp_path / "a", checkpoint, Spec(17)), base)


def test_adapters_of_a_mixture_of_experts_are_refused(checkpoint: Path) -> None:
    with pytest.raises(InvalidInputError, match="num_experts: got 6; 0 in a base model of adapters: qwen3_moe"):
        BaseModel.of_decoder(from_config(CASES["qwen3_moe"]), {"small"}, 16, checkpoint)


def test_infinite_weights_are_refused(checkpoint: Path, base: BaseModel, tmp_path: Path) -> None:
    changed = tensors(make_adapter(tmp_path / "a", checkpoint, SPEC))
    changed[NAME][1, 1] = float("nan")
    found = peft.read(save_adapter(tmp_path / "b", checkpoint, SPEC, changed), base)
    with pytest.raises(InvalidInputError, match=rf"{re.escape(NAME)}: got 'NaN or infinity'"):
        peft.require_finite(found)


def test_incomplete_files_are_refused(checkpoint: Path, base: BaseModel, tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "a", checkpoint, SPEC)
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(InvalidInputError, match="must be a complete safetensors file"):
        peft.read(folder, base)
    file.unlink()
    with pytest.raises(InvalidInputError, match="must hold adapter_model.safetensors"):
        peft.read(folder, base)
    torch.save({}, folder / "adapter_model.bin")
    with pytest.raises(InvalidInputError, match=r"adapter_model.bin, which can execute code"):
        peft.read(folder, base)
    (folder / "adapter_model.bin").rename(file)
    with pytest.raises(InvalidInputError, match="must be a complete safetensors file"):
        peft.read(folder, base)
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(InvalidInputError, match="JSON"):
        peft.read(folder, base)
    with pytest.raises(InvalidInputError, match="must hold a readable adapter_config.json"):
        peft.read(tmp_path / "nowhere", base)


# The registry.


@pytest.fixture
def source(checkpoint: Path, tmp_path: Path) -> Path:
    return make_adapter(tmp_path / "source", checkpoint, SPEC)


def test_entries_are_added_pinned_and_removed(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "registry"
    watch = FolderWatch(folder / "registry.json")
    assert store.read(folder) == {} and watch.has_changed() and not watch.has_changed()
    entry = store.add(folder, "one", source, pinned=False)
    assert store.read(folder) == {"one": entry}
    assert store.digest(store.entry_folder(folder, entry)) == entry.sha256
    assert watch.has_changed()
    store.pin(folder, "one", True)
    assert store.read(folder)["one"].pinned and watch.has_changed()
    (source / "adapter_config.json").write_text("{}")
    other = store.add(folder, "one", source, pinned=False)
    assert other.folder != entry.folder and store.read(folder) == {"one": other}
    store.remove(folder, "one")
    assert store.read(folder) == {}
    assert (folder / entry.folder).is_dir() and (folder / other.folder).is_dir(), "a server may still read them"
    let_a_minute_pass(folder)
    store.add(folder, "two", source, pinned=False)
    assert sorted(path.name for path in folder.glob("one-*")) == []
    assert [path for path in folder.iterdir() if path.name.endswith((".tmp", ".json"))] == [folder / "registry.json"]


@pytest.mark.parametrize("slow_s", [600.0, -600.0])
def test_machines_whose_clocks_differ_by_minutes_delete_nothing_that_a_server_may_still_read(
    slow_s: float, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, real = tmp_path / "registry", time.time
    entry = store.add(folder, "one", source, pinned=False)
    with monkeypatch.context() as other:
        other.setattr(time, "time", lambda: real() - slow_s)
        store.remove(folder, "one")
    store.add(folder, "two", source, pinned=False)
    assert (folder / entry.folder).is_dir()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_full_or_read_only_registry_serves_what_it_had(
    number: int, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "registry"
    entry = store.add(folder, "one", source, pinned=False)

    def fails(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    for name in ("shutil.copyfile", "shapeshift.files.replace_text"):
        with monkeypatch.context() as full:
            full.setattr(name, fails)
            with pytest.raises(OSError, match=os.strerror(number)):
                store.add(folder, "two", source, pinned=False)
        assert store.read(folder) == {"one": entry}
    assert store.digest(store.entry_folder(folder, entry)) == entry.sha256
    assert [path.name for path in folder.glob(".two*")] == []


@pytest.mark.parametrize("step", ["flush_folder", "replace_text"])
def test_what_a_killed_change_has_left_is_removed_by_the_next_ones(
    step: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "registry"
    entry = store.add(folder, "one", source, pinned=False)
    mine = folder / "mine-0123456789ab"
    shutil.copytree(source, mine)
    if (child := os.fork()) == 0:
        setattr(store.files, step, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        store.add(folder, "two", source, pinned=False)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert [*folder.glob(".two.*"), *folder.glob("two-*")] and store.read(folder) == {"one": entry}
    store.pin(folder, "one", False)
    let_a_minute_pass(folder)
    store.pin(folder, "one", False)
    assert sorted(path.name for path in folder.iterdir()) == [".lock", mine.name, entry.folder, "registry.json"]


def test_an_adapter_that_is_removed_and_added_again_stays(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "registry"
    entry = store.add(folder, "one", source, pinned=False)
    store.remove(folder, "one")
    assert store.add(folder, "one", source, pinned=True).folder == entry.folder
    let_a_minute_pass(folder)
    store.pin(folder, "one", False)
    assert (folder / entry.folder).is_dir()


def test_adding_an_adapter_again_repairs_its_files(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "registry"
    entry = store.add(folder, "one", source, pinned=False)
    kept = store.entry_folder(folder, entry)
    assert store.add(folder, "one", source, pinned=False) == entry, "complete files are not written again"
    for damage in (lambda: (kept / store.FILES[1]).write_bytes(b"x"), (kept / store.FILES[0]).unlink):
        weights = store.stamps(kept)[1]
        damage()
        assert store.stamps(kept) != entry.stamps
        again = store.add(folder, "one", source, pinned=False)
        assert again.sha256 == entry.sha256 == store.digest(kept)
        assert again.stamps == store.stamps(kept) and store.read(folder) == {"one": again}
    assert again.stamps[1] == weights, "the complete file of a damaged adapter is not written again"


@pytest.mark.parametrize("name", ["../up", "/etc/passwd", "a/b", "", ".hidden", "a..b", "a" * 129, "a\n", "ä"])
def test_names_never_become_paths(source: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidInputError, match="name"):
        store.add(tmp_path / "registry", name, source, pinned=False)
    assert not (tmp_path / "registry").exists()


@pytest.mark.parametrize("place", ["../source", "/tmp", "", "..", "a/b"])
def test_folders_outside_are_refused(source: Path, tmp_path: Path, place: str) -> None:
    folder = tmp_path / "registry"
    folder.mkdir()
    entry = {"folder": place, "sha256": "0", "pinned": False}
    (folder / "registry.json").write_text(json.dumps({"format": 2, "entries": {"one": entry}}))
    with pytest.raises(InvalidInputError, match="folder"):
        store.entry_folder(folder, store.read(folder)["one"])
    (folder / "link").symlink_to(source)
    with pytest.raises(InvalidInputError, match="folder"):
        store.entry_folder(folder, store.Entry("link", "0"))


@pytest.mark.parametrize(
    "content",
    [
        *("{", "[]", '{"format": 2, "entries": []}', '{"format": 1, "entries": {}}'),
        *('{"format": 2, "entries": {"a": {"folder": "x"}}}', '{"format": 2, "entries": {"../a": {}}}'),
    ],
)
def test_broken_registries_are_named(source: Path, tmp_path: Path, content: str) -> None:
    folder = tmp_path / "registry"
    folder.mkdir()
    (folder / "registry.json").write_text(content)
    with pytest.raises(InvalidInputError, match=r"registry\.json"):
        store.read(folder)
    with pytest.raises(InvalidInputError, match=r"registry\.json"):
        store.add(folder, "one", source, pinned=False)
    assert (folder / "registry.json").read_text() == content


def test_unknown_names_list_the_registered(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "registry"
    store.add(folder, "one", source, pinned=False)
    for change in (lambda: store.remove(folder, "two"), lambda: store.pin(folder, "two", True)):
        with pytest.raises(NotFoundError, match="no adapter 'two'; known: one"):
            change()
    many = [f"n{number:04}" for number in range(1000)]
    assert str(store.unknown_adapter("x", many, "lora_name")).endswith("n0019 and 980 more")
    assert str(store.unknown_adapter("x", [], "lora_name")) == "lora_name: no adapter 'x'; known: none"
    # As many as are listed are listed whole.
    assert str(store.unknown_adapter("x", many[:20], "f")).endswith("n0019")


@pytest.mark.parametrize("name", ["a", "0", "a.b", "a-b_c", "A" * 128])
def test_ordinary_names_are_taken(name: str) -> None:
    assert store.check_name(name) == name


BROKEN: dict[str, dict[str, object]] = {
    "no folder": {"sha256": "0"},
    "a folder that is no text": {"folder": 7, "sha256": "0"},
    "an unknown field": {"folder": "f", "sha256": "0", "colour": "red"},
    "stamps that are no list": {"folder": "f", "sha256": "0", "stamps": "now"},
    "a base that is no text": {"folder": "f", "sha256": "0", "base": 1},
    "an origin that is no text": {"folder": "f", "sha256": "0", "origin": None},
}


@pytest.mark.parametrize("case", BROKEN)
def test_an_entry_that_is_none_is_named(case: str, tmp_path: Path) -> None:
    (tmp_path / "registry.json").write_text(json.dumps({"format": 2, "entries": {"one": BROKEN[case]}, "removed": {}}))
    with pytest.raises(InvalidInputError, match=r"^registry\.json one: "):
        store.read(tmp_path)


def test_an_entry_has_what_it_states_and_else_nothing(tmp_path: Path) -> None:
    least = {"folder": "f", "sha256": "0"}
    whole = {**least, "pinned": True, "stamps": [[1, 2], [3, 4]], "base": "b", "origin": "o"}
    stated = {"format": 2, "entries": {"least": least, "whole": whole}, "removed": {}}
    (tmp_path / "registry.json").write_text(json.dumps(stated))
    assert store.read(tmp_path) == {
        "least": store.Entry("f", "0"),
        "whole": store.Entry("f", "0", True, ((1, 2), (3, 4)), "b", "o"),
    }


@pytest.mark.parametrize(("age_s", "stays"), [(0.0, True), (61.0, False)])
def test_files_of_a_removed_adapter_stay_for_a_minute(age_s: float, stays: bool, source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "registry"
    entry = store.add(folder, "one", source, pinned=False)
    store.remove(folder, "one")
    content = json.loads((folder / "registry.json").read_text())
    content["removed"][entry.folder] -= age_s
    (folder / "registry.json").write_text(json.dumps(content))
    store.add(folder, "two", source, pinned=False)
    assert (folder / entry.folder).is_dir() is stays
    assert (entry.folder in Registry(folder, "adapters").read().removed) is stays


def test_a_hash_is_of_both_files_in_pieces(source: Path) -> None:
    pauses: list[int] = []
    first = store.digest(source, lambda: pauses.append(1))
    assert len(pauses) >= 2 and len(first) == 64
    for name in store.FILES:
        content = (source / name).read_bytes()
        (source / name).write_bytes(content + b" ")
        assert store.digest(source) != first
        (source / name).write_bytes(content)
    assert store.digest(source) == first
    (source / store.FILES[1]).unlink()
    assert store.stamps(source) == ()
    with pytest.raises(InvalidInputError, match=f"must hold a readable {store.FILES[1]}"):
        store.digest(source)


# vLLM's file.


def test_paths_of_a_multi_lora_file_are_absolute_or_in_its_folder(tmp_path: Path) -> None:
    assert store.read_multi_lora(tmp_path) == {}
    (tmp_path / store.MULTI_LORA).write_text('{"a": "x/y", "b": "/z"}')
    assert store.read_multi_lora(tmp_path) == {"a": tmp_path / "x/y", "b": Path("/z")}
    text = store.multi_lora_text({"a": Path("/x"), "b": Path("y")})
    assert json.loads(text) == {"a": "/x", "b": str(Path("y").absolute())} and text.endswith("}\n")


@pytest.mark.parametrize("content", ["{", "[1]", '{"a": 1}', '{"../a": "x"}', "[" * 100_000])
def test_a_multi_lora_file_that_is_none_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / store.MULTI_LORA).write_text(content)
    with pytest.raises(InvalidInputError, match=r"^multi_lora\.json: "):
        store.read_multi_lora(tmp_path)


def test_a_multi_lora_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / store.MULTI_LORA).write_bytes(b"\xff")
    with pytest.raises(InvalidInputError, match="readable JSON"):
        store.read_multi_lora(tmp_path)
