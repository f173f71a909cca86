"""What `make engines` does for fronts that generate."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from build_engines import __main__ as command
from shapeshift.engines import precision
from shapeshift.engines.checkpoint import open_checkpoint
from shapeshift.fused_decode import compiled
from shapeshift.triton import modelconfig
from tests.fused_decode.checkpoints import make_checkpoint

PROJECT = Path(__file__).resolve().parents[2]


class House:
    """A project folder of its own with the two fronts and a small checkpoint."""

    def __init__(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.root = root
        self.checkpoint = make_checkpoint(root / "checkpoints" / "small")
        self._capsys = capsys
        for name in ("generate", "generate_unary"):
            self.change(name)

    def change(self, name: str = "generate", **parameters: object) -> None:
        """The front as the repository has it, with other parameters."""
        config = modelconfig.read(PROJECT / "model_repository" / name / "config.pbtxt")
        stated = {"checkpoint": "small", "native": "false", **parameters} if name == "generate" else parameters
        for key, value in stated.items():
            modelconfig.set_parameter(config, key, str(value))
        folder = self.root / "model_repository" / name
        folder.mkdir(parents=True, exist_ok=True)
        modelconfig.write(config, folder / "config.pbtxt")

    def make(self, *models: str) -> tuple[int, str, str]:
        """Run the command: exit status, standard output, standard error."""
        sys.argv = ["build_engines", *models]
        status = command.main()
        captured = self._capsys.readouterr()
        return status, captured.out, captured.err

    def generated(self, name: str = "generate") -> Path:
        return self.root / "build" / "repository" / name

    def stated(self, name: str = "generate") -> dict[str, str]:
        return modelconfig.parameters(modelconfig.read(self.generated(name) / "config.pbtxt"))


@pytest.fixture
def house(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> House:
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.chdir(tmp_path)
    return House(tmp_path, capsys)


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that kernels were asked for in; nothing is compiled."""
    asked: list[Path] = []

    def library(folder: Path) -> Path:
        asked.append(folder)
        return folder / "x.so"

    monkeypatch.setattr(compiled, "library", library)
    return asked


def test_publishes_what_a_server_loads(house: House) -> None:
    (house.root / "model_repository" / "generate" / "how_to_call.txt").write_text("curl {host}")
    status, out, err = house.make()
    assert (status, err) == (0, "")
    assert "generate: checked; checkpoint: small, " in out and "32 slots of 512 tokens" in out
    assert "generate_unary: forwards to generate" in out
    stated = house.stated()
    assert (house.generated() / stated["checkpoint"]).resolve() == house.checkpoint
    assert not Path(stated["checkpoint"]).is_absolute(), "the project can be moved"
    assert stated["checkpoint_sha256"] == open_checkpoint(house.checkpoint).sha256
    assert stated["precision"] in ("f32", "bf16")
    assert (house.generated() / stated["kernel_cache"]).resolve() == house.root / "build" / "kernels"
    assert (house.generated() / "1").is_dir()
    assert (house.generated() / "how_to_call.txt").read_text().endswith("\ncurl {host}")
    assert house.stated("generate_unary") == {"forward_to": "generate"}
    config = modelconfig.read(house.generated() / "config.pbtxt")
    assert config.model_transaction_policy.decoupled
    assert not modelconfig.read(house.generated("generate_unary") / "config.pbtxt").model_transaction_policy.decoupled


def test_auto_is_settled(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    for has, settled in ((True, "bf16"), (False, "f32")):
        monkeypatch.setattr(precision, "cpu_has_bf16", lambda has=has: has)
        assert house.make("generate")[0] == 0
        assert house.stated()["precision"] == settled
    file = house.root / "model_repository" / "generate" / "config.pbtxt"
    file.write_text(file.read_text().replace("KIND_CPU", "KIND_GPU"))
    assert house.make("generate")[0] == 0
    assert house.stated()["precision"] == "bf16"


def test_what_is_published_is_not_checked_again_until_it_changes(house: House, compilations: list[Path]) -> None:
    house.change(native="true")
    assert "generate: checked, kernels compiled; " in house.make()[1]
    assert "generate: up to date; " in house.make()[1]
    house.change(native="true", max_concurrency=5)
    assert "up to date; checkpoint: small, " in house.make()[1]
    assert house.stated()["max_concurrency"] == "5"
    assert compilations == [house.root / "build" / "kernels"]
    config = json.loads((house.checkpoint / "config.json").read_text())
    (house.checkpoint / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-6}))
    assert "generate: checked" in house.make()[1]
    assert len(compilations) == 2


def test_without_a_compiler_it_is_said(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    def library(folder: Path) -> Path:
        raise FileNotFoundError("no g++ found")

    monkeypatch.setattr(compiled, "library", library)
    house.change(native="true")
    status, out, _ = house.make()
    assert status == 0 and "generate: checked, without compiled kernels (no g++ found)" in out


BROKEN: dict[str, tuple[Callable[[House], object], str]] = {
    "unknown parameter": (lambda house: house.change(max_lenght=5), "max_lenght: .*unknown parameter; known: "),
    "a parameter of generated configs": (lambda house: house.change(kernel_cache="x"), "kernel_cache: "),
    "bad value": (lambda house: house.change(max_concurrency=0), "max_concurrency: got 0; 1 to 4096"),
    "no checkpoint": (lambda house: house.change(checkpoint="absent"), "checkpoint: no folder absent"),
    "forwards to nobody": (
        lambda house: house.change("generate_unary", forward_to="absent"),
        "forward_to: no model absent in ",
    ),
    "missing tensor": (
        lambda house: _change_config(house, num_hidden_layers=3),
        "checkpoint: got .*lacks the tensor model.layers.2",
    ),
    "unknown family": (lambda house: _change_config(house, model_type="gpt2"), "model_type: got 'gpt2'"),
    "no weights": (lambda house: (house.checkpoint / "model.safetensors").unlink(), "weights must be"),
    "no tokenizer": (lambda house: (house.checkpoint / "tokenizer.json").unlink(), "must hold tokenizer.json"),
}


def _change_config(house: House, **changes: object) -> None:
    file = house.checkpoint / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize("kind", BROKEN)
def test_what_cannot_be_served_is_named_and_not_published(house: House, kind: str) -> None:
    import re

    damage, said = BROKEN[kind]
    damage(house)
    status, _, err = house.make()
    assert status == 1
    assert re.search(said, err), err
    broken = "generate_unary" if "forwards" in kind else "generate"
    assert not house.generated(broken).exists()


def test_a_failed_check_leaves_what_was_published(house: House) -> None:
    house.make()
    before = (house.generated() / "config.pbtxt").read_bytes()
    _change_config(house, num_hidden_layers=3)
    status, _, err = house.make()
    assert status == 1 and "not published: generate" in err
    assert (house.generated() / "config.pbtxt").read_bytes() == before


def test_an_unknown_backend_is_named(house: House) -> None:
    file = house.root / "model_repository" / "generate" / "config.pbtxt"
    file.write_text(file.read_text().replace('"fused_decode"', '"fused"'))
    status, _, err = house.make()
    assert status == 1
    assert "backend: got 'fused'; one of adapter_cache, cascade, fused_decode, polymorph, token_adapt" in err


def test_what_forwards_to_a_model_that_failed_is_not_published(house: House) -> None:
    house.change("generate", checkpoint="absent")
    status, _, err = house.make()
    assert status == 1
    assert "generate_unary: needs generate, which could not be published" in err
    assert "not published: generate, generate_unary" in err
    assert not house.generated("generate_unary").exists()
    # A build of this one alone remembers the other.
    assert "needs generate" in house.make("generate_unary")[2]
    house.change("generate", checkpoint="small")
    assert house.make()[0] == 0
