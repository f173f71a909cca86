"""Fixtures that several folders of tests share."""

from __future__ import annotations

import gc
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.compiled import link_kernels
from tests.triton_aborts import pytest_runtest_call as pytest_runtest_call

if TYPE_CHECKING:
    from shapeshift.triton.embedded.server import TritonServer
    from shapeshift.triton.settings import ServerSettings

PROJECT = Path(__file__).resolve().parents[1]
BUILD = PROJECT / "build"

# Tests that import openvino before the library does would report its use: each export forks this process, which is
# large by then, and waits for an answer from outside.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]


CONFIG = """
backend: "polymorph"
max_batch_size: 64
input [
  { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] optional: true },
  { name: "INPUT_IDS" data_type: TYPE_INT64 dims: [ -1 ] optional: true },
  { name: "ATTENTION_MASK" data_type: TYPE_INT64 dims: [ -1 ] optional: true }
]
output [ { name: "EMBEDDING" data_type: TYPE_FP32 dims: [ WIDTH ] } ]
instance_group [ { kind: KIND_CPU count: 1 } ]
"""
LIGHT_WIDTH = 8


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out long tests unless -m names them, skip those that need a GPU where there is none; servers first.

    These mostly wait, so that the others fill the processor beside them. One that fails runs once more: its server
    shares two cores with the other tests, and nothing bounds how long a process waits for one. The summary names it.
    One that kills a process does not: what it has left is no server to begin with.
    """
    if "long" not in config.option.markexpr:
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("long")])
        items[:] = [item for item in items if not item.get_closest_marker("long")]
    if not Path("/dev/nvidia0").exists():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU"))
    if config.pluginmanager.hasplugin("rerunfailures"):
        for item in items:
            if item.get_closest_marker("server") and not item.get_closest_marker("kills"):
                item.add_marker(pytest.mark.flaky(reruns=1))
    items.sort(key=lambda item: item.get_closest_marker("server") is None)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Import the tests without a look for garbage: what is imported stays, and is not looked at afterwards either."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def free_ports() -> Callable[[int], list[int]]:
    """A function that returns so many ports of 127.0.0.1 that nothing uses, each only once."""
    from shapeshift.triton.embedded import free_ports

    ports = free_ports.free_ports()
    return lambda count: list(islice(ports, count))


@pytest.fixture(scope="session")
def demo_checkpoint() -> Path:
    """The checkpoint of the demo model."""
    folder = BUILD / "checkpoints" / "all-MiniLM-L6-v2"
    if not (folder / "tokenizer.json").is_file():
        pytest.skip(f"no checkpoint in {folder}: run `make setup`")
    return folder


@pytest.fixture(scope="session")
def light_checkpoint(demo_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with the demo model's tokenizer and no weights, for emulated engines."""
    from safetensors.numpy import save_file

    folder = tmp_path_factory.mktemp("checkpoint") / "light"
    folder.mkdir()
    config = {"model_type": "bert", "hidden_size": LIGHT_WIDTH, "vocab_size": 30522, "max_position_embeddings": 512}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({}, folder / "model.safetensors")
    shutil.copyfile(demo_checkpoint / "tokenizer.json", folder / "tokenizer.json")
    return folder


@pytest.fixture(scope="session")
def add_front(light_checkpoint: Path) -> Callable[..., Path]:
    """A function that adds a front model with emulated engines to a model repository; returns its folder.

    Keyword arguments are parameters of its config.pbtxt. `latency_ms` is what the engines imitate, at 1 and
    at 512 tokens.
    """

    def add(repository: Path, name: str, latency_ms: tuple[float, float] = (0.1, 0.2), **parameters: object) -> Path:
        folder = repository / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "profile.json").write_text(json.dumps({"lengths": [1, 512], "latency_ms": latency_ms}))
        stated = {
            "checkpoint": light_checkpoint,
            "provider": "emulated",
            "precision": "f32",
            "profile_file": "profile.json",
        } | parameters
        entries = [f'parameters {{ key: "{key}" value {{ string_value: "{text}" }} }}' for key, text in stated.items()]
        head = f'name: "{name}"' + CONFIG.replace("WIDTH", str(LIGHT_WIDTH))
        (folder / "config.pbtxt").write_text(head + "\n".join(entries))
        return folder

    return add


@pytest.fixture(scope="session")
def build_fronts() -> Callable[[Path, Path], Path]:
    """A function that runs a build from a model repository into a build folder; returns the generated one."""
    from shapeshift.build_engines.paths import BuildPaths
    from shapeshift.build_engines.repository import front_models
    from shapeshift.build_engines.text.config import TextFrontConfig
    from shapeshift.build_engines.text.front import publish

    def run(repository: Path, target: Path) -> Path:
        paths = BuildPaths(repository.parent, target, repository)
        for front in front_models(paths, set()):
            assert isinstance(front, TextFrontConfig)
            publish(front, paths, lambda step: None)
        return paths.generated

    return run


@pytest.fixture(scope="session")
def server_settings(free_ports: Callable[[int], list[int]]) -> Callable[..., ServerSettings]:
    """A function that makes the settings of a server on ports of its own: the one place where tests make them.

    make(repositories, models, run_directory, backends) skips the test where the server is not unpacked.
    """
    from shapeshift.triton.embedded.free_ports import on_free_ports
    from shapeshift.triton.settings import ServerSettings

    def make(
        repositories: Sequence[Path], models: Sequence[str], run_directory: Path, backends: Path = PROJECT / "backends"
    ) -> ServerSettings:
        if not (BUILD / "triton" / "bin" / "tritonserver").is_file():
            pytest.skip(f"no server in {BUILD / 'triton'}: run `make setup`")
        settings = ServerSettings(
            repositories=tuple(repositories),
            models=tuple(models),
            backend_directories=(backends,),
            triton=BUILD / "triton",
            run_directory=run_directory,
            # As `shapeshift serve` does: what a build generates is complete.
            complete_configs=False,
        )
        return on_free_ports(settings, free_ports(3))

    return make


@pytest.fixture(scope="session")
def make_server(server_settings: Callable[..., ServerSettings]) -> Callable[..., TritonServer]:
    """A function that makes a server that is not started, from the arguments of `server_settings`."""
    from shapeshift.triton.embedded.server import TritonServer

    return lambda *arguments: TritonServer(server_settings(*arguments))


@pytest.fixture(scope="module")
def encode_server(
    server_settings: Callable[..., ServerSettings], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    """A real Triton that serves `encode` from the real engines, one for a file of tests.

    Its second repository, `settings.repositories[1]`, is empty: tests may add models to it and load them. Their
    configurations are completed.
    """
    from shapeshift.triton.embedded.server import TritonServer

    if not (BUILD / "repository" / "encode").is_dir():
        pytest.skip(f"no {BUILD / 'repository' / 'encode'}: run `make engines`")
    folder = tmp_path_factory.mktemp("encode")
    link_kernels(folder)
    (folder / "repository").mkdir()
    repositories = (BUILD / "repository", folder / "repository")
    settings = replace(server_settings(repositories, ("encode",), folder / "run"), complete_configs=True)
    with TritonServer(settings) as server:
        yield server.wait_ready()


@pytest.fixture(scope="module")
def flushed(encode_server: TritonServer) -> Callable[..., Callable[..., float]]:
    """A function that waits until a model has exported everything it counted before the call.

    Its answer is a function too: the sum of the model's series of one metric that carry the given labels.
    With beats=0 it does not wait and answers from the metrics as they are.
    """
    from shapeshift.triton import metrics

    def read(model: str) -> Callable[..., float]:
        samples = metrics.scrape(encode_server.metrics_url)

        def total(name: str, **labels: str) -> float:
            wanted = {*labels.items(), ("model", model)}
            return sum(value for (series, own), value in samples.items() if series == name and wanted <= own)

        return total

    def wait(model: str = "encode", beats: int = 2, timeout_s: float = 60.0) -> Callable[..., float]:
        # A beat opens a flush: with the second one from now, a flush that began after now is complete.
        wanted = read(model)("shapeshift_heartbeat_total") + beats
        deadline = time.monotonic() + timeout_s
        while (total := read(model))("shapeshift_heartbeat_total") < wanted:
            assert time.monotonic() < deadline, f"{model} exports nothing"
            time.sleep(0.1)
        return total

    return wait
