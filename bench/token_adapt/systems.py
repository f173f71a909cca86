"""The schemes that `bench.token_adapt` compares, as models of one server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.common.models import SHIPPED, write_front
from bench.common.output import empty
from shapeshift.token_adapt.executor import ImageModel
from shapeshift.token_adapt.model import emulated
from shapeshift.token_adapt.policy.costs import GammaProfile
from shapeshift.token_adapt.request import Task

SERVED = "classify_image"
OURS_NAME, PAPER_NAME, PETS_NAME, INFAAS_NAME = "ours", "the paper's OTAS", "gamma 0 (PetS)", "INFaaS"


@dataclass(frozen=True)
class Scheme:
    """A way to serve. parameters: of its model, beside the common ones; model: its own, if not the common one."""

    name: str
    parameters: Mapping[str, str]
    model: ImageModel | None = field(default=None, compare=False)
    switch_ms: Mapping[int, float] = field(default_factory=dict, compare=False)

    @property
    def slug(self) -> str:
        """The name of its model on the server."""
        plain = "".join(letter if letter.isalnum() else "_" for letter in self.name.replace("-", "minus"))
        return f"scheme_{plain}"


OURS = Scheme(OURS_NAME, {})
PAPER = Scheme(PAPER_NAME, {"algorithm": "paper", "batch_size": "64"})
PETS = Scheme(PETS_NAME, {"algorithm": "by_rate", "use_gammas": "0"})
PLANNED = Scheme("plain model, our plan", {"use_gammas": "0"})


def fixed(gamma: int) -> Scheme:
    """One gamma for all: ToMe below 0, VPT above."""
    return PETS if gamma == 0 else Scheme(f"gamma {gamma}", {"algorithm": "by_rate", "use_gammas": str(gamma)})


def infaas(models: Mapping[int, GammaProfile], tasks: Sequence[Task], switch_ms: Mapping[int, float]) -> Scheme:
    """Models of several sizes instead of gammas. One is loaded at a time; a change takes `switch_ms`."""
    model = emulated.EmulatedImageModel(32, models, {task.name: task for task in tasks}, switch_ms)
    return Scheme(INFAAS_NAME, {"algorithm": "infaas"}, model, switch_ms)


def publish(schemes: Sequence[Scheme], model: ImageModel, repository: Path) -> None:
    """Write a model for each of `schemes` over emulated engines."""
    empty(repository)
    for scheme in schemes:
        served, folder = scheme.model or model, repository / scheme.slug
        folder.mkdir()
        tasks = list(served.tasks.values())
        file = folder / "emulated.json"
        emulated.write(file, served.preprocessing.size, list(served.profiles.values()), tasks, scheme.switch_ms)
        parameters = {"provider": "emulated", "profile_file": file.resolve(), **scheme.parameters}
        write_front(SHIPPED / SERVED, folder, parameters, keeps=False)
