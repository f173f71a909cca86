"""From the parameters of a model to the model, its costs, and the settings of its scheduler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shapeshift import settings
from shapeshift.engines import hardware
from shapeshift.engines.manifest import GeneratedSettings
from shapeshift.errors import InvalidInputError
from shapeshift.registry import (
    Follower,
    GeneratedRegistrySettings,
    RegistrySettings,
    follow,
)
from shapeshift.serving.model_args import ModelArgs
from shapeshift.settings import Choices, require
from shapeshift.token_adapt.interfaces import GammaProfile, ImageModel
from shapeshift.token_adapt.policy import plan
from shapeshift.token_adapt.policy.costs import Costs, efficient_batch_size
from shapeshift.token_adapt.settings import EMULATED, EmulatedSettings, ImageEngineSettings, TokenAdaptSettings
from shapeshift.token_adapt.tasks import registry as task_registry

Log = Callable[[str], None]
Open = Callable[[ModelArgs, TokenAdaptSettings], ImageModel]
# Of a batch whose size nobody states: at most so many images, and no more than for this share of the best throughput.
_MOST_IMAGES, _THROUGHPUT_SHARE = 64, 0.9
_PARAMETERS = settings.names(
    TokenAdaptSettings,
    EmulatedSettings,
    ImageEngineSettings,
    GeneratedSettings,
    RegistrySettings,
    GeneratedRegistrySettings,
)
_EMULATED: Choices[Callable[[Path], ImageModel]] = Choices(
    "provider", {EMULATED: "shapeshift.token_adapt.model.emulated:read"}
)


@dataclass(frozen=True)
class Loaded:
    """A model ready to classify, and the costs of its batches.

    follower: what keeps a copy of its registry up to date; whoever takes the model closes it.
    """

    settings: TokenAdaptSettings
    model: ImageModel
    costs: Costs
    follower: Follower


def open_model(args: ModelArgs, serving: TokenAdaptSettings) -> ImageModel:
    """The model that the parameters name."""
    emulation = settings.read(EmulatedSettings, args.parameters)
    if emulation.provider == EMULATED:
        return _EMULATED[EMULATED](args.folder / emulation.profile_file)
    # Imports the engine libraries.
    from shapeshift.token_adapt.model import vision_model

    generated = settings.read(GeneratedSettings, args.parameters)
    if not generated.engines:
        raise InvalidInputError("engines", "", "a folder of engines; run `shapeshift engines`")
    engines, tasks = ((args.folder / path).resolve() for path in (generated.engines, serving.tasks_dir))
    return vision_model.open_model(engines, tasks, serving.threads, generated.manifest_sha256 or None, args.device)


def load(args: ModelArgs, log: Log, open_model: Open = open_model) -> Loaded:
    """Open the model of these parameters. Raises the errors of `shapeshift.errors`."""
    settings.refuse_unknown(args.parameters, _PARAMETERS)
    serving = settings.read(TokenAdaptSettings, args.parameters)
    follower = follow(args.parameters, (args.folder / serving.tasks_dir).resolve(), task_registry.LAYOUT, log)
    model = open_model(args, serving)
    for message in model.reload_tasks():
        log(message)
    gammas = serving.gammas(model.gammas)
    available = ", ".join(map(str, model.gammas))
    for gamma in gammas:
        require(gamma in model.gammas, "use_gammas", gamma, f"gammas of the model: {available}")
    memory_mb = float(serving.memory_mb) or _available_mb(args.device)
    batch_size = _batch_size([model.profiles[gamma] for gamma in gammas], serving, memory_mb)
    costs = Costs(model.profiles, gammas, batch_size, memory_mb)
    if serving.algorithm in plan.ALGORITHMS:
        # Import and compile the solver now, not during the first request.
        plan.solve(plan.PlanProblem.of(0.0, [2.0], [[1.0]], [[1.0]]), serving.algorithm)
    log(
        f"ready: {len(model.tasks)} tasks, gammas {', '.join(map(str, costs.gammas))}, batches of up to {batch_size}, "
        f"algorithm {serving.algorithm}"
    )
    return Loaded(serving, model, costs, follower)


def _available_mb(device: int | None) -> float:
    """MiB that batches may take: of the GPU's memory, without one of this machine's."""
    return hardware.available_mb() if device is None else hardware.DEVICE_MEMORY["cuda"](device)[0]


def _batch_size(profiles: Sequence[GammaProfile], serving: TokenAdaptSettings, memory_mb: float) -> int:
    """The largest batch: limited by memory, and by `batch_size` or what the throughput needs."""
    smallest_mb = min(profile.memory_mb for profile in profiles)
    limit = serving.batch_size or _MOST_IMAGES
    if smallest_mb > 0:
        limit = int(min(limit, memory_mb / smallest_mb - 1e-9))
    require(limit >= 1, "memory_mb", memory_mb, f"above {smallest_mb:g}, the memory of one image")
    if serving.batch_size:
        return limit
    return efficient_batch_size(min(profiles, key=lambda profile: abs(profile.gamma)), limit, _THROUGHPUT_SHARE)
