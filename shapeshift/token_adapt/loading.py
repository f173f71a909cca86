"""From a model's parameters to what decides and what computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shapeshift import settings
from shapeshift.engines import hardware
from shapeshift.engines.settings import GeneratedSettings
from shapeshift.errors import InvalidInputError
from shapeshift.serving.model_args import ModelArgs
from shapeshift.settings import require
from shapeshift.token_adapt import emulated, plan
from shapeshift.token_adapt.adapter import AdaptRules
from shapeshift.token_adapt.costs import Costs, fitting_size
from shapeshift.token_adapt.engine_settings import ImageEngineSettings
from shapeshift.token_adapt.interfaces import GammaProfile, ImageModel
from shapeshift.token_adapt.settings import TokenAdaptSettings

EMULATED = "emulated"
Log = Callable[[str], None]
Open = Callable[[ModelArgs, TokenAdaptSettings], ImageModel]


@dataclass(frozen=True)
class EmulatedSettings:
    """Parameters of a model with provider `emulated`: its description, and a factor on its latencies."""

    provider: str = ""
    profile_file: str = ""
    time_scale: float = 1.0


@dataclass(frozen=True)
class Loaded:
    """A model ready to classify, what its batches cost, and how they are chosen."""

    own: TokenAdaptSettings
    model: ImageModel
    costs: Costs
    rules: AdaptRules


def open_model(args: ModelArgs, own: TokenAdaptSettings) -> ImageModel:
    """The model that the parameters name."""
    stated = settings.read(EmulatedSettings, args.parameters)
    if stated.provider == EMULATED:
        return emulated.read(args.folder / stated.profile_file, stated.time_scale)
    # The engines' libraries come with it.
    from shapeshift.token_adapt import vision

    generated = settings.read(GeneratedSettings, args.parameters)
    if not generated.engines:
        raise InvalidInputError("engines", "", "a folder of engines; run `make engines`")
    threads = own.threads or hardware.cores()
    folder, tasks = ((args.folder / path).resolve() for path in (generated.engines, own.tasks_dir))
    return vision.open_model(folder, tasks, threads, generated.manifest_sha256 or None)


def load(args: ModelArgs, log: Log, open_it: Open = open_model) -> Loaded:
    """Everything that the parameters of one model name. Raises the errors of `shapeshift.errors`."""
    known = settings.names(TokenAdaptSettings, EmulatedSettings, ImageEngineSettings, GeneratedSettings)
    settings.refuse_unknown(args.parameters, known)
    own = settings.read(TokenAdaptSettings, args.parameters)
    model = open_it(args, own)
    for message in model.reload_tasks():
        log(message)
    gammas = own.gammas(model.gammas)
    memory_mb = float(own.memory_mb) or hardware.available_mb()
    served = ", ".join(map(str, model.gammas))
    for gamma in gammas:
        require(gamma in model.gammas, "use_gammas", gamma, f"gammas of the model: {served}")
    size = _batch_size([model.profiles[gamma] for gamma in gammas], own, memory_mb)
    costs = Costs(model.profiles, gammas, size)
    if own.algorithm in plan.ALGORITHMS:
        # What solves is imported and compiled at its first use, which no request should wait for.
        plan.solve(plan.PlanProblem.of(0.0, [2.0], [[1.0]], [[1.0]]), own.algorithm)
    log(
        f"ready: {len(model.tasks)} tasks, gammas {', '.join(map(str, costs.gammas))}, batches of up to {size}, "
        f"algorithm {own.algorithm}"
    )
    return Loaded(own, model, costs, own.rules(size, memory_mb))


def _batch_size(profiles: Sequence[GammaProfile], own: TokenAdaptSettings, memory_mb: float) -> int:
    """Most images a batch: what the settings say, what memory allows, and no more than throughput needs."""
    least = min(profiles, key=_memory)
    fitting = own.batch_size if least.memory_mb <= 0 else int(min(own.batch_size, memory_mb / least.memory_mb - 1e-9))
    require(fitting >= 1, "memory_mb", memory_mb, f"above {least.memory_mb:g}, which one image needs")
    if not own.batch_share:
        return fitting
    return fitting_size(min(profiles, key=lambda profile: abs(profile.gamma)), fitting, own.batch_share)


def _memory(profile: GammaProfile) -> float:
    return profile.memory_mb
