"""The schemes that `bench.token_adapt` compares, as models of one server."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bench.systems import server_settings
from shapeshift.token_adapt import emulated
from shapeshift.token_adapt.interfaces import GammaProfile, ImageModel, Task
from shapeshift.triton import modelconfig
from shapeshift.triton.server import TritonServer

SERVED = "classify_image"
OURS_NAME, PAPER_NAME, PETS_NAME, INFAAS_NAME = "ours", "the paper's OTAS", "gamma 0 (PetS)", "INFaaS"


@dataclass(frozen=True)
class Scheme:
    """parameters: of the model, beside those that all have; model: what it serves, where that is not what all do."""

    name: str
    parameters: Mapping[str, str]
    model: ImageModel | None = field(default=None, compare=False)
    switch_ms: Mapping[int, float] = field(default_factory=dict, compare=False)

    @property
    def slug(self) -> str:
        """The name of its model on the server."""
        kept = "".join(letter if letter.isalnum() else "_" for letter in self.name.replace("-", "minus"))
        return f"scheme_{kept}"


OURS = Scheme(OURS_NAME, {})
PAPER = Scheme(PAPER_NAME, {"algorithm": "paper", "batch_share": "0"})
PETS = Scheme(PETS_NAME, {"algorithm": "by_rate", "use_gammas": "0"})
PLANNED = Scheme("plain model, our plan", {"use_gammas": "0"})


def fixed(gamma: int) -> Scheme:
    """One gamma for all: ToMe below 0, VPT above."""
    return PETS if gamma == 0 else Scheme(f"gamma {gamma}", {"algorithm": "by_rate", "use_gammas": str(gamma)})


def infaas(models: Mapping[int, GammaProfile], tasks: Sequence[Task], switch_ms: Mapping[int, float]) -> Scheme:
    """Models of several sizes in the place of gammas, of which one is loaded: a change takes `switch_ms`."""
    model = emulated.EmulatedImageModel(32, models, {task.name: task for task in tasks}, switch_ms)
    return Scheme(INFAAS_NAME, {"algorithm": "infaas"}, model, switch_ms)


def publish_emulated(schemes: Sequence[Scheme], model: ImageModel, repository: Path) -> None:
    """Models of `schemes` over emulated ones."""
    shutil.rmtree(repository, ignore_errors=True)
    for scheme in schemes:
        served = scheme.model or model
        folder = repository / scheme.slug
        (folder / "1").mkdir(parents=True)
        tasks = list(served.tasks.values())
        file = folder / "emulated.json"
        emulated.write(file, served.image_size, list(served.profiles.values()), tasks, scheme.switch_ms)
        config = modelconfig.read(Path("model_repository") / SERVED / "config.pbtxt")
        config.parameters.clear()
        stated = {"provider": "emulated", "profile_file": str(file.resolve()), **scheme.parameters}
        _write(config, folder, stated)


def publish_engines(schemes: Sequence[Scheme], generated: Path, repository: Path) -> None:
    """Models of `schemes` over the engines of the generated `classify_image`."""
    shutil.rmtree(repository, ignore_errors=True)
    for scheme in schemes:
        folder = repository / scheme.slug
        (folder / "1").mkdir(parents=True)
        config = modelconfig.read(generated / SERVED / "config.pbtxt")
        said = modelconfig.parameters(config)
        places = {name: str((generated / SERVED / said[name]).resolve()) for name in ("engines", "tasks_dir")}
        _write(config, folder, {**places, **scheme.parameters})


def _write(config: object, folder: Path, parameters: Mapping[str, str]) -> None:
    config.name = folder.name  # type: ignore[attr-defined]
    for name, value in parameters.items():
        modelconfig.set_parameter(config, name, value)
    modelconfig.write(config, folder / "config.pbtxt")


@contextmanager
def serving(schemes: Sequence[Scheme], repository: Path, build: Path) -> Iterator[TritonServer]:
    """The project's own server with the models of these schemes."""
    settings = server_settings([scheme.slug for scheme in schemes], (repository,), build, build / "bench" / "run")
    with TritonServer(settings) as server:
        server.wait_ready(300)
        yield server
