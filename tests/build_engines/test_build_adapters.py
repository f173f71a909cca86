"""What `make engines` does for fronts whose requests name adapters."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from build_engines import __main__ as command
from shapeshift.adapter_cache import registry
from shapeshift.cli import main as cli
from shapeshift.triton import modelconfig
from tests.adapter_cache.lora_models import Spec, make_adapter
from tests.fused_decode.checkpoints import make_checkpoint

PROJECT = Path(__file__).resolve().parents[2]


class House:
    """A project folder with the two fronts, a small checkpoint and adapters over it."""

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
        config = modelconfig.read(PROJECT / "model_repository" / name / "config.pbtxt")
        if name == "generate_lora":
            parameters = {"checkpoint": "small", "starter_dir": "starters", "native": "false", **parameters}
        for key, value in parameters.items():
            modelconfig.set_parameter(config, key, str(value))
        folder = self.root / "model_repository" / name
        (folder / "1").mkdir(parents=True, exist_ok=True)
        modelconfig.write(config, folder / "config.pbtxt")

    def make(self) -> tuple[int, str, str]:
        status = command.main()
        captured = self._capsys.readouterr()
        return status, captured.out, captured.err

    @property
    def generated(self) -> Path:
        return self.root / "build" / "repository" / "generate_lora"

    def stated(self) -> dict[str, str]:
        return modelconfig.parameters(modelconfig.read(self.generated / "config.pbtxt"))


@pytest.fixture
def house(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> House:
    monkeypatch.setattr(sys, "argv", ["build_engines"])
    monkeypatch.chdir(tmp_path)
    return House(tmp_path, capsys)


def test_the_registry_is_filled_once(house: House) -> None:
    status, out, err = house.make()
    assert (status, err) == (0, "")
    assert f"2 adapters in {house.registry}" in out
    assert "forwards to generate_lora" in out
    assert sorted(registry.read(house.registry)) == ["one", "two"]
    assert house.registry == (house.generated / house.stated()["adapters_dir"]).resolve()
    assert house.stated()["base_names"] == "small"
    registry.remove(house.registry, "one")
    assert house.make()[0] == 0
    assert sorted(registry.read(house.registry)) == ["two"]


def test_a_registry_of_one_s_own(house: House, tmp_path_factory: pytest.TempPathFactory) -> None:
    mine = tmp_path_factory.mktemp("elsewhere") / "mine"
    house.change(adapters_dir=mine, base_names="other,more")
    assert house.make()[0] == 0
    assert sorted(registry.read(mine)) == ["one", "two"]
    assert house.stated()["adapters_dir"] == str(mine), "what lies outside the project is where it is"
    assert house.stated()["base_names"] == "more,other,small"
    assert not house.registry.exists()


def test_multi_lora_goes_along(house: House) -> None:
    starters = house.root / "checkpoints" / "starters"
    (house.front / "1" / "multi_lora.json").write_text(json.dumps({"near": "../../../checkpoints/starters/one"}))
    assert house.make()[0] == 0
    generated = house.root / "build" / "repository" / "generate_lora" / "1" / "multi_lora.json"
    (place,) = json.loads(generated.read_text()).values()
    assert Path(place).is_absolute() and Path(place).resolve() == starters / "one"


def test_names_of_a_multi_lora_file_are_not_changed(house: House, capsys: pytest.CaptureFixture[str]) -> None:
    (house.front / "1" / "multi_lora.json").write_text(json.dumps({"near": "../../../checkpoints/starters/one"}))
    assert house.make()[0] == 0
    for change in (["add", "near", str(house.root / "checkpoints" / "starters" / "two")], ["remove", "near"]):
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
        ({"starter_dir": "nowhere"}, "starter_dir: no folder nowhere"),
        ({"max_rank": 1}, "a rank of 1 to max_rank (1)"),
        ({"eviction": "mru"}, "eviction: got 'mru'"),
        ({"scheduler": "lifo"}, "scheduler: got 'lifo'"),
        ({"adapter_mb": 0}, "adapter_mb: got 0"),
        ({"adaptor_mb": 1}, "adaptor_mb: got 'adaptor_mb'; unknown parameter"),
    ],
)
def test_what_cannot_be_meant_is_named(house: House, parameters: dict[str, object], said: str) -> None:
    house.change(**parameters)
    status, _, err = house.make()
    assert status == 1 and said in err
