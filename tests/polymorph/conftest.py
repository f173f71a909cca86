"""A front over emulated engines in this process, with a fake of Triton's side."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from google.protobuf import json_format

from shapeshift.engines.emulated_provider import EmulatedEngine
from shapeshift.engines.protocol import Array
from shapeshift.polymorph.front import TextFront
from shapeshift.serving import model_args
from shapeshift.triton import modelconfig
from tests.fakes import PbUtils


class Gate:
    """Stands between engine threads and engines: can hold calls back, and make them fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.open.set()
        self.entered = threading.Semaphore(0)
        self.packs: list[int] = []
        self.fail: Exception | None = None
        compute = EmulatedEngine.run

        def run(engine: EmulatedEngine, inputs: Mapping[str, Array]) -> dict[str, Array]:
            self.packs.append(int(inputs["SEGMENTS"].max()))
            self.entered.release()
            assert self.open.wait(30)
            if self.fail is not None:
                raise self.fail
            return compute(engine, inputs)

        monkeypatch.setattr(EmulatedEngine, "run", run)

    def hold(self) -> None:
        """Let no call end from now on."""
        self.open.clear()

    def wait_held(self) -> None:
        """Wait for a call to arrive that no earlier `wait_held` has seen."""
        assert self.entered.acquire(timeout=30)

    def release(self) -> None:
        """Let every call end."""
        self.open.set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


@pytest.fixture
def front_args(
    tmp_path: Path, add_front: Callable[..., Path], build_fronts: Callable[[Path, Path], Path]
) -> Callable[..., dict[str, str]]:
    """A function that builds a front model with emulated engines; returns the `args` of `initialize`."""

    def make(**parameters: object) -> dict[str, str]:
        stated = {"engine_threads": 1, "bins": "16,64", **parameters}
        add_front(tmp_path / "model_repository", "front", **stated)
        folder = build_fronts(tmp_path / "model_repository", tmp_path / "build") / "front"
        config = modelconfig.read(folder / "config.pbtxt")
        return {
            "model_config": json.dumps(json_format.MessageToDict(config, preserving_proto_field_name=True)),
            "model_name": "front",
            "model_repository": str(folder),
            "model_version": "1",
            "model_instance_name": "front_0",
            "model_instance_kind": "CPU",
            "model_instance_device_id": "0",
        }

    return make


@pytest.fixture
def pb_utils() -> PbUtils:
    return PbUtils()


@pytest.fixture
def make_front(front_args: Callable[..., dict[str, str]], pb_utils: PbUtils) -> Iterator[Callable[..., TextFront]]:
    """A function that starts a front; every one is closed when the test ends."""
    started: list[TextFront] = []

    def make(**parameters: object) -> TextFront:
        started.append(TextFront(pb_utils, model_args.read(front_args(**parameters))))
        return started[-1]

    yield make
    for front in started:
        front.close()
