"""The wheel, installed into a fresh environment and used in a folder that is no checkout.

Left out: the download of the dependencies, for which the new environment sees the packages of this one (but not this
project's own), the download of the server, whose wheels come from this project's build folder, and a minute of
compiling kernels, whose sources are the same.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import urllib.request
import venv
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from email import message_from_bytes
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.compiled import link_kernels
from tests.conftest import CONFIG

PROJECT = Path(__file__).resolve().parents[2]
WIDTH = 32
WORDS = ("[PAD]", "[UNK]", "the", "cat", "sat", "on", "mat")
TEXT = "the cat sat on the mat"
PARAMETERS = """
parameters [
  { key: "checkpoint" value { string_value: "tiny-bert" } },
  { key: "precision" value { string_value: "f32" } },
  { key: "max_tokens" value { string_value: "16" } },
  { key: "bins" value { string_value: "none" } }
]
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, built with the packages of this environment."""
    # A module of an earlier version, which must not be packed.
    earlier = PROJECT / "build" / "wheel" / "lib" / "shapeshift" / "earlier.py"
    earlier.parent.mkdir(parents=True, exist_ok=True)
    earlier.touch()
    folder = tmp_path_factory.mktemp("wheel")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(PROJECT)], check=True, capture_output=True)
    (built,) = folder.glob("shapeshift-*.whl")
    return built


def test_the_wheel_holds_all_that_runs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
        (metadata,) = (name for name in archive.namelist() if name.endswith("METADATA"))
        declared = message_from_bytes(archive.read(metadata))
    library = {
        file for file in (PROJECT / "shapeshift").rglob("*") if file.is_file() and "__pycache__" not in file.parts
    }
    wanted = {file.relative_to(PROJECT).as_posix() for file in library}
    wanted |= {f"shapeshift/{file.relative_to(PROJECT)}" for file in (PROJECT / "backends").glob("*/model.py")}
    assert packed == wanted | {"shapeshift/requirements/server.txt"}
    assert {"shapeshift/py.typed", "shapeshift/adapter_cache/lora/kernels/lora.cpp"} <= packed
    assert "torch" in declared.get_all("Requires-Dist", [])


@dataclass(frozen=True)
class Installed:
    """A folder of a user's, and the commands of an environment that has the wheel."""

    folder: Path
    bin: Path

    @property
    def environment(self) -> dict[str, str]:
        """Without what could lead to this checkout."""
        return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}

    def run(self, *arguments: str) -> str:
        """The output of a command that succeeds."""
        command = [str(self.bin / arguments[0]), *arguments[1:]]
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
        return done.stdout

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """A running command; its output can be read."""
        command = [str(self.bin / arguments[0]), *arguments[1:]]
        return subprocess.Popen(
            command, cwd=self.folder, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )


@pytest.fixture
def installed(wheel: Path, tmp_path: Path) -> Installed:
    """The wheel in a new environment."""
    venv.create(tmp_path / "venv", symlinks=True)
    own = Installed(tmp_path / "own", tmp_path / "venv" / "bin")
    own.folder.mkdir()
    pip = [sys.executable, "-m", "pip", "--python", str(own.bin / "python")]
    options = ["--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*pip, "install", *options, str(wheel)], check=True, capture_output=True)
    # A folder that a .pth file names is only a place to import from: the .pth file there that leads to this checkout
    # has no effect.
    packages = Path(own.run("python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    return own


@pytest.fixture
def model(installed: Installed) -> Any:
    """A front with a tiny random BERT in the user's folder; returns the reference model."""
    import tokenizers
    import torch
    import transformers

    torch.manual_seed(3)
    size: dict[str, Any] = {
        "vocab_size": len(WORDS),
        "hidden_size": WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = transformers.BertConfig(**size, intermediate_size=64, max_position_embeddings=32)
    reference = transformers.BertModel(config).eval()
    checkpoint = installed.folder / "checkpoints" / "tiny-bert"
    reference.save_pretrained(checkpoint)
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(checkpoint / "tokenizer.json"))
    # Without it transformers takes BERT's own class, with special tokens that this model lacks.
    (checkpoint / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    front = installed.folder / "model_repository" / "tiny"
    front.mkdir(parents=True)
    (front / "config.pbtxt").write_text(f'name: "tiny"{CONFIG.replace("WIDTH", str(WIDTH))}{PARAMETERS}')
    return reference


@pytest.fixture
def set_up(installed: Installed) -> Iterator[str]:
    """What `shapeshift setup` says in the user's folder."""
    wheels = PROJECT / "build" / "wheels"
    if not wheels.is_dir():
        pytest.skip(f"no wheels in {wheels}: run `make setup`")
    build = installed.folder / "build"
    link_kernels(build)
    (build / "wheels").symlink_to(wheels)
    yield installed.run("shapeshift", "setup")
    # Hundreds of megabytes.
    shutil.rmtree(build)


def test_no_file_of_the_checkout_is_used(installed: Installed) -> None:
    code = "import shapeshift.installation as one; print(one.IMPORT_PATH, one.BACKENDS, one.SERVER_PINS)"
    for place in map(Path, installed.run("python", "-c", code).split()):
        assert place.exists()
        assert place.is_relative_to(installed.bin.parent)


@pytest.mark.server
def test_sets_up_builds_and_serves(
    installed: Installed, model: Any, set_up: str, free_ports: Callable[[int], list[int]]
) -> None:
    import torch

    assert "unpacked build/triton" in set_up
    assert "that the wheel needs; it pins no versions" in installed.run("shapeshift", "doctor")
    assert "tiny" in installed.run("shapeshift", "engines")
    http, grpc, metrics = map(str, free_ports(3))
    server = installed.start("shapeshift", "serve", "--http-port", http, "--grpc-port", grpc, "--metrics-port", metrics)
    try:
        assert server.stdout is not None
        said = []
        for line in server.stdout:
            said.append(line)
            if line.startswith("ready: "):
                break
        else:
            pytest.fail("".join(said))
        body = {"inputs": [{"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "data": [TEXT]}]}
        url = f"http://127.0.0.1:{http}/v2/models/tiny/infer"
        with urllib.request.urlopen(url, json.dumps(body).encode(), timeout=60) as response:
            (answer,) = json.load(response)["outputs"]
    finally:
        server.terminate()
        assert server.wait(timeout=120) == 0
    with torch.no_grad():
        mean = model(torch.tensor([[WORDS.index(word) for word in TEXT.split()]])).last_hidden_state[0].mean(0).numpy()
    assert np.allclose(answer["data"], mean / np.linalg.norm(mean), atol=1e-4)
