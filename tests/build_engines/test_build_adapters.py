"""`make engines` for fronts with LoRA adapters."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from shapeshift.adapter_cache.registry import store
from shapeshift.cli import main as cli
from shapeshift.cli.main import main
from shapeshift.triton import model_config
from tests.adapter_cache.lora_models import Spec, make_adapter, written_by_peft
from tests.build_engines.hub_server import Hub
from tests.fused_decode import families
from tests.fused_decode.checkpoints import make_checkpoint

PROJECT = Path(__file__).resolve().parents[2]


class Project:
    """A project folder with the two fronts, a small checkpoint and adapters for it."""

    def __init__(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.root = root
        self.registry = root / "build" / "adapters" / "generate_lora"
        self.front = root / "model_repository" / "generate_lora"
        self._capsys = capsys
        checkpoint = make_checkpoint(root / "checkpoints" / "small")
        for name in ("one", "two"):
            make_adapter(root / "checkpoints" / "starters" / name, checkpoint, Spec(2))
        self.change("generate_lora_unary")
        self.change()

    def change(self, name: str = "generate_lora", **parameters: object) -> None:
        config = model_config.read(PROJECT / "tests" / "model_repository" / name / "config.pbtxt")
        if name == "generate_lora":
            parameters = {"checkpoint": "small", "starter_dir": "starters", "native": "false", **parameters}
        for key, value in parameters.items():
            model_config.set_parameter(config, key, str(value))
        folder = self.root / "model_repository" / name
        (folder / "1").mkdir(parents=True, exist_ok=True)
        model_config.write(config, folder / "config.pbtxt")

    def make(self) -> tuple[int, str, str]:
        status = main(["engines"])
        captured = self._capsys.readouterr()
        return status, captured.out, captured.err

    @property
    def generated(self) -> Path:
        return self.root / "build" / "repository" / "generate_lora"

    def parameters(self) -> dict[str, str]:
        return model_config.parameters(model_config.read(self.generated / "config.pbtxt"))


@pytest.fixture
def project(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.chdir(tmp_path)
    return Project(tmp_path, capsys)


def test_adapters_of_another_base_model_give_way(project: Project) -> None:
    assert project.make()[0] == 0
    other = make_checkpoint(project.root / "checkpoints" / "other", seed=1)
    make_adapter(project.root / "checkpoints" / "others" / "three", other, Spec(2))
    project.change(checkpoint="other", starter_dir="others")
    status, out, err = project.make()
    aside = project.registry.with_name("generate_lora.of_another_base")
    assert (status, err) == (0, "") and f"2 of another base model moved to {aside}" in out
    assert sorted(store.read(project.registry)) == ["three"] and sorted(store.read(aside)) == ["one", "two"]
    # They come back with their base model, as the user left them.
    store.remove(aside, "one")
    project.change()
    assert f"back from {aside}" in project.make()[1]
    assert sorted(store.read(project.registry)) == ["two"]
    project.change(checkpoint="other", starter_dir="")
    assert project.make()[0] == 0
    assert sorted(store.read(project.registry)) == ["three"]


def test_a_starter_that_does_not_fit_leaves_the_registry_as_it_was(project: Project) -> None:
    mine = project.root / "mine"
    project.change(adapters_dir=mine, max_rank=1)
    assert project.make()[0] == 1 and not store.read(mine)
    project.change(adapters_dir=mine)
    assert project.make()[0] == 0 and sorted(store.read(mine)) == ["one", "two"]
    make_checkpoint(project.root / "checkpoints" / "other", seed=1)
    project.change()
    assert project.make()[0] == 0
    project.change(checkpoint="other")
    assert project.make()[0] == 1, "the starters are those of the former base model"
    assert sorted(store.read(project.registry)) == ["one", "two"]


def test_the_registry_is_filled_once(project: Project) -> None:
    status, out, err = project.make()
    assert (status, err) == (0, "")
    assert f"2 adapters in {project.registry}" in out
    assert "forwards to generate_lora" in out
    assert sorted(store.read(project.registry)) == ["one", "two"]
    assert project.registry == (project.generated / project.parameters()["adapters_dir"]).resolve()
    assert project.parameters()["base_names"] == "small"
    store.remove(project.registry, "one")
    assert project.make()[0] == 0
    assert sorted(store.read(project.registry)) == ["two"]


def test_adapters_over_a_family_with_stacked_linears(project: Project) -> None:
    checkpoints = project.root / "checkpoints"
    base = families.make("gpt2", checkpoints / "gpt2").folder
    shutil.copy(checkpoints / "small" / "tokenizer.json", base)
    written_by_peft(checkpoints / "over_gpt2" / "mine", base)
    project.change(checkpoint="gpt2", extra_tokens="true", starter_dir="over_gpt2")
    assert project.make()[0] == 0
    assert sorted(store.read(project.registry)) == ["mine"]


def test_a_mixture_of_experts_is_no_base_of_adapters(project: Project) -> None:
    checkpoints = project.root / "checkpoints"
    base = families.make("qwen3_moe", checkpoints / "mixture").folder
    shutil.copy(checkpoints / "small" / "tokenizer.json", base)
    project.change(checkpoint="mixture", extra_tokens="true", starter_dir="")
    status, _, err = project.make()
    assert status == 1 and "num_local_experts: got 6; 0 in a base model of adapters: qwen3_moe is a mixture" in err


def test_registry_in_another_folder(project: Project, tmp_path_factory: pytest.TempPathFactory) -> None:
    mine = tmp_path_factory.mktemp("elsewhere") / "mine"
    project.change(adapters_dir=mine, base_names="other,more")
    assert project.make()[0] == 0
    assert sorted(store.read(mine)) == ["one", "two"]
    assert project.parameters()["adapters_dir"] == str(mine), "what lies outside the project is where it is"
    assert project.parameters()["base_names"] == "more,other,small"
    assert not project.registry.exists()


def test_multi_lora_is_copied(project: Project) -> None:
    starters = project.root / "checkpoints" / "starters"
    (project.front / "1" / "multi_lora.json").write_text(json.dumps({"near": "../../../checkpoints/starters/one"}))
    assert project.make()[0] == 0
    generated = project.root / "build" / "repository" / "generate_lora" / "1" / "multi_lora.json"
    (place,) = json.loads(generated.read_text()).values()
    assert Path(place).is_absolute() and Path(place).resolve() == starters / "one"


# Base models and adapters from the hub.


@pytest.fixture
def over_the_hub(project: Project, hub: Hub) -> Project:
    """A front over the checkpoint small of the hub, built."""
    hub.add("owner/small", project.root / "checkpoints" / "small")
    project.change(checkpoint="owner/small@main", starter_dir="")
    assert project.make()[0] == 0
    return project


def add(project: Project, source: Path | str, name: str = "mine") -> int:
    return main(["adapters", "add", name, str(source)])


def make(project: Project, **config: Any) -> Path:
    folder = project.root / "made"
    return make_adapter(folder, project.root / "checkpoints" / "small", Spec(2), **config)


@pytest.mark.parametrize("stated", ["owner/small", "small", "owner/small@main"])
def test_an_adapter_of_a_base_from_the_hub(over_the_hub: Project, stated: str) -> None:
    assert add(over_the_hub, make(over_the_hub, base_model_name_or_path=stated)) == 0
    status, out, err = over_the_hub.make()
    assert (status, err) == (0, "") and "1 adapters in" in out
    # Also without what `add` has recorded.
    file = over_the_hub.registry / "registry.json"
    file.write_text(file.read_text().replace(store.read(over_the_hub.registry)["mine"].base, ""))
    assert over_the_hub.make()[0] == 0


def test_a_base_folder_with_the_same_weights(over_the_hub: Project) -> None:
    same = over_the_hub.root / "elsewhere"
    same.mkdir()
    weights = (over_the_hub.root / "checkpoints" / "small" / "model.safetensors").read_bytes()
    (same / "weights.safetensors").write_bytes(weights)
    adapter = make(over_the_hub, base_model_name_or_path=str(same))
    assert add(over_the_hub, adapter) == 0
    (same / "weights.safetensors").write_bytes(weights[:-1] + b"x")
    # Once checked against this checkpoint, it stays accepted; another one is not.
    assert over_the_hub.make()[0] == 0
    assert add(over_the_hub, adapter, "other") == 2
    # Another checkpoint under the same front: the record of the first does not count.
    file = over_the_hub.registry / "registry.json"
    file.write_text(file.read_text().replace(store.read(over_the_hub.registry)["mine"].base, "0" * 64))
    status, _, err = over_the_hub.make()
    assert status == 1
    assert "base_model_name_or_path: got " in err and "one with the same *.safetensors files as" in err


def test_an_adapter_from_the_hub(over_the_hub: Project, hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make(over_the_hub, base_model_name_or_path="owner/small")
    (folder / "optimizer.bin").write_text("x")
    commit = hub.add("owner/style", folder, "v1")
    hub.asked.clear()
    assert add(over_the_hub, "owner/style@v1") == 0
    assert sorted({*hub.downloaded()}) == ["adapter_config.json", "adapter_model.safetensors"]
    assert store.read(over_the_hub.registry)["mine"].origin == f"owner/style@{commit}"
    main(["adapters", "list"])
    assert f"owner/style@{commit}" in capsys.readouterr().out
    assert add(over_the_hub, "owner/style@v2") != 0
    assert "no such revision" in capsys.readouterr().err
    assert add(over_the_hub, "absent") != 0
    assert "no folder absent; give a folder or the id of a hub" in capsys.readouterr().err


def test_a_change_that_sigterm_stops_leaves_nothing(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    assert project.make()[0] == 0
    before = sorted(project.registry.iterdir())
    monkeypatch.setattr(store.files, "flush_folder", lambda _: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit) as end:
        add(project, project.root / "checkpoints" / "starters" / "two")
    assert end.value.code == 143 and sorted(project.registry.iterdir()) == before


def test_names_of_multi_lora_cannot_be_changed(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    (project.front / "1" / "multi_lora.json").write_text(json.dumps({"near": "../../../checkpoints/starters/one"}))
    assert project.make()[0] == 0
    for change in (["add", "near", str(project.root / "checkpoints" / "starters" / "two")], ["remove", "near"]):
        assert cli.main(["adapters", *change]) == 2
        assert "name: got 'near'; not a name of multi_lora.json" in capsys.readouterr().err
    assert cli.main(["adapters", "pin", "one"]) == 0
    capsys.readouterr()
    assert cli.main(["adapters", "list"]) == 0
    lines = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert lines == [["near", "-"], ["one", "pinned"], ["two", "-"]]
    assert cli.main(["adapters", "list", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [shown[name]["from"] for name in ("near", "one")] == ["multi_lora.json", "registry.json"]


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"starter_dir": "nowhere"}, "starter_dir: no folder /"),
        ({"max_rank": 1}, "a rank of 1 to max_rank (1)"),
        ({"eviction": "mru"}, "eviction: got 'mru'"),
        ({"scheduler": "lifo"}, "scheduler: got 'lifo'"),
        ({"adapter_mb": 0}, "adapter_mb: got 0"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size: got 2; 1 for a model with adapters"),
        ({"adaptor_mb": 1}, "adaptor_mb: got 'adaptor_mb'; unknown parameter"),
    ],
)
def test_invalid_parameters_are_named(project: Project, parameters: dict[str, Any], said: str) -> None:
    project.change(**parameters)
    status, _, err = project.make()
    assert status == 1 and said in err


def test_a_registry_is_a_folder_and_no_url(project: Project) -> None:
    project.change(adapters_dir="s3://bucket/adapters", starter_dir="")
    status, _, err = project.make()
    assert status == 1 and "adapters_dir: got 's3://bucket/adapters'; a folder" in err
