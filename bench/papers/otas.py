"""OTAS: its Figs. 9 to 13 on one device, by the scheduler that serves.

The emulated device has the throughput of the paper's Figs. 4b and 7, and accuracies after its Fig. 4a
(`bench.token_adapt.vit_base`); the measured ones are the profiles of this project, with measured accuracies where there
are some. The paper serves for 30 minutes, here it is twice half a minute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.papers.findings import Findings, verdict
from bench.token_adapt import systems, vit_base
from bench.token_adapt.loads import accuracies, bursty, fluctuating
from bench.token_adapt.systems import INFAAS_NAME, OURS, OURS_NAME, PAPER, PAPER_NAME, PETS, PETS_NAME, Scheme
from shapeshift import settings
from shapeshift.simulate.token_adapt import EVICTED, IN_TIME, LATE, SimulationResult, run
from shapeshift.token_adapt.front import costs_of
from shapeshift.token_adapt.model.emulated import EmulatedImageModel
from shapeshift.token_adapt.policy.costs import GammaProfile
from shapeshift.token_adapt.request import Task
from shapeshift.token_adapt.settings import TokenAdaptSettings
from shapeshift.workloads.trace import Trace

PER_S = {-20: 1230.0, -15: 1000.0, -10: 830.0, -5: 700.0, 0: 580.0, 2: 560.0, 4: 540.0, 8: 480.0}
"""Images a second by gamma: Fig. 4b states 1500 at -25, 580 at 0 and 220 at 32, Fig. 7 1000 at -15; the rest lies
between."""
_LEAST_MS = 10.0
"""A batch of few images, which Fig. 7 shows at 100 a second."""
_BATCHES = (1, 4, 8, 16, 32, 64)
_LOADED_MS = {-1: 88.0, 0: 344.0, 1: 1216.0}
"""INFaaS loads a size at 1 GB a second."""
DINO = Path("profiles/dinov2-small-openvino-bf16-epyc-zen5.json")
_DINO_TASKS = {"CIFAR10": "digits", "CIFAR100": "cifar10", "EuroSAT": "animal"}
"""Which measured task stands for which one of Table II: the hardest is worth most there too."""
BY_RATE, BEST = "Algorithm 3 alone", "best fixed gamma"
_SECONDS, _SEEDS = 30.0, 2


@dataclass(frozen=True)
class Device:
    """A model on a device, and images a second that gamma 0 serves."""

    model: EmulatedImageModel
    per_s: float
    gammas: Sequence[int]


@dataclass
class Outcomes:
    """What a scheme got over several runs: utility offered and gained, images by the paper's four types, and gammas."""

    offered: float = 0.0
    gained: float = 0.0
    images: int = 0
    types: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("right", "wrong", "late", "evicted"), 0.0))
    gammas: dict[int, int] = field(default_factory=dict)

    def add(self, result: SimulationResult, trace: Trace, accuracy: NDArray[np.float64], gammas: Sequence[int]) -> None:
        """Count a run."""
        self.offered += float(trace.utility.sum())
        self.gained += result.total_utility(trace, accuracy)
        self.images += len(trace)
        timely = np.flatnonzero(result.outcome == IN_TIME)
        right = float(accuracy[timely, result.gamma[timely]].sum())
        self.types["right"] += right
        self.types["wrong"] += len(timely) - right
        self.types["late"] += int((result.outcome == LATE).sum())
        self.types["evicted"] += int((result.outcome == EVICTED).sum())
        for index, count in enumerate(np.bincount(result.gamma[timely], minlength=len(gammas)).tolist()):
            self.gammas[gammas[index]] = self.gammas.get(gammas[index], 0) + count

    @property
    def utility(self) -> float:
        """The share of the offered utility."""
        return self.gained / self.offered

    def row(self) -> dict[str, float]:
        """Its figures."""
        answered = self.types["right"] + self.types["wrong"]
        accuracy = self.types["right"] / answered if answered else 0.0
        return {"utility": self.utility, **{n: c / self.images for n, c in self.types.items()}, "accuracy": accuracy}


def measure(findings: Findings, seed: int) -> None:
    """All of them."""
    emulated = Device(_emulated(), 580.0, vit_base.GAMMAS)
    synthetic, maf = (
        _compare(findings, f"{title}, gamma 0 bears 580/s", emulated, rate, is_bursty, seed)
        for title, rate, is_bursty in (("200 to 700/s", 450.0, False), ("MAF-like, 294/s", 294.0, True))
    )
    slow = replace(emulated, model=_slower(emulated.model, 1 / 0.7))
    _compare(findings, "200 to 700/s, a device of 0.7 times the speed", slow, 450.0, False, seed)
    _claims(findings, synthetic, maf)
    for name, device in (
        ("ViT-Base, our latencies", _measured()),
        ("DINOv2-Small, our latencies and accuracies", _dino()),
    ):
        for load in (0.8, 1.2, 2.0):
            rows = _compare(findings, f"{name}, {load:g} times capacity", device, load * device.per_s, False, seed)
            if load == 1.2:
                _grid(findings, name, rows)


def _emulated() -> EmulatedImageModel:
    profiles = {
        gamma: GammaProfile(gamma, 0, {count: max(_LEAST_MS, count / per_s * 1e3) for count in _BATCHES}, 1.0)
        for gamma, per_s in PER_S.items()
    }
    return EmulatedImageModel(32, profiles, {task.name: task for task in vit_base.tasks()})


def _slower(model: EmulatedImageModel, factor: float) -> EmulatedImageModel:
    profiles = {
        gamma: replace(one, latency_ms={count: ms * factor for count, ms in one.latency_ms.items()})
        for gamma, one in model.profiles.items()
    }
    return EmulatedImageModel(32, profiles, model.tasks)


def _measured() -> Device:
    """ViT-Base as `bench.token_adapt` has it on the server."""
    return Device(vit_base.model(), vit_base.CAPACITY_PER_S, vit_base.GAMMAS)


def _dino() -> Device:
    """At its own speed, with the gammas whose accuracies were measured."""
    latencies = vit_base.latencies(DINO)
    measured = vit_base.accuracies(DINO)
    profiles = {gamma: GammaProfile(gamma, 0, latencies[gamma], 1.0) for gamma in measured}
    tasks = {
        name: Task(name, ("right", "wrong"), {gamma: of[task] for gamma, of in measured.items()}, 600.0, 1.0)
        for name, task in _DINO_TASKS.items()
    }
    per_s = max(count / ms for count, ms in latencies[0].items()) * 1e3
    return Device(EmulatedImageModel(32, profiles, tasks), per_s, tuple(profiles))


def _compare(
    findings: Findings, title: str, device: Device, rate: float, is_bursty: bool, seed: int
) -> dict[str, Outcomes]:
    """Every scheme on the same images, in a table."""
    seconds = _SECONDS * findings.scale
    traces = [(bursty if is_bursty else fluctuating)(rate, seconds, seed + number) for number in range(_SEEDS)]
    sizes, tasks = vit_base.sizes(device.model)
    schemes = {
        PETS_NAME: PETS,
        **{f"gamma {gamma}": systems.fixed(gamma) for gamma in device.gammas if gamma},
        INFAAS_NAME: systems.infaas(sizes, tasks, _LOADED_MS),
        BY_RATE: Scheme(BY_RATE, {"algorithm": "by_rate"}),
        PAPER_NAME: PAPER,
        OURS_NAME: OURS,
    }
    outcomes = {name: _serve(scheme, device.model, traces) for name, scheme in schemes.items()}
    findings.table("Figs. 9 to 13", title, [{"scheme": name, **one.row()} for name, one in outcomes.items()])
    chosen = [
        {"scheme": name, **{f"gamma {g}": c / sum(one.gammas.values()) for g, c in one.gammas.items()}}
        for name, one in outcomes.items()
        if name in (PAPER_NAME, OURS_NAME)
    ]
    findings.table("Fig. 12", f"shares of images by gamma, {title}", chosen)
    fixed = [name for name in outcomes if name.startswith("gamma ")]
    outcomes[BEST] = outcomes[max(fixed, key=lambda name: outcomes[name].utility)]
    return outcomes


def _serve(scheme: Scheme, default: EmulatedImageModel, traces: Sequence[Trace]) -> Outcomes:
    model, outcomes = scheme.model or default, Outcomes()
    serving = settings.read(TokenAdaptSettings, scheme.parameters)
    for trace in traces:
        costs = costs_of(model, serving, None)
        accuracy = accuracies(trace, model.tasks, costs.gammas)
        switches = [scheme.switch_ms.get(gamma, 0.0) for gamma in costs.gammas]
        outcomes.add(run(costs, serving, trace, accuracy, switch_ms=switches), trace, accuracy, costs.gammas)
    return outcomes


def _claims(findings: Findings, synthetic: Mapping[str, Outcomes], maf: Mapping[str, Outcomes]) -> None:
    def over(rows: Mapping[str, Outcomes], ours: str, other: str) -> float:
        return rows[ours].utility / rows[other].utility - 1

    for where, rows, over_pets, over_infaas in (
        ("Fig. 9a, 200 to 700/s", synthetic, 18.2, 72.5),
        ("Fig. 9b, MAF", maf, 90.1, 90.1),
    ):
        said = "up to 90.1%" if rows is maf else f"{over_pets}% over PetS, {over_infaas}% over INFaaS"
        gains = {name: (over(rows, name, PETS_NAME), over(rows, name, INFAAS_NAME)) for name in (PAPER_NAME, OURS_NAME)}
        findings.claim(
            where,
            f"utility {said}",
            "; ".join(
                f"{name} {pets:+.0%} over PetS, {infaas:+.0%} over INFaaS" for name, (pets, infaas) in gains.items()
            ),
            verdict(gains[PAPER_NAME][0] > 0.15, gains[PAPER_NAME][1] > 0.5),
            "INFaaS is taken to load a model at 1 GB/s, and keeps one where its rate allows",
        )
    best = {name: (over(synthetic, name, BEST), over(maf, name, BEST)) for name in (PAPER_NAME, OURS_NAME)}
    findings.claim(
        "Fig. 10",
        "above every fixed number of tokens",
        "; ".join(f"{name} {one:+.1%}, {other:+.1%} over the best" for name, (one, other) in best.items()),
        verdict(*(gain > 0 for gain in best[PAPER_NAME])),
    )
    means = {name: [rows[name].row()["accuracy"] for rows in (synthetic, maf)] for name in (PAPER_NAME, OURS_NAME)}
    findings.claim(
        "Fig. 11",
        "mean accuracy above 90%",
        "; ".join(f"{name} {one:.1%}, {other:.1%}" for name, (one, other) in means.items()),
        verdict(*(mean > 0.9 for mean in means[PAPER_NAME])),
        "the accuracies follow the text of Fig. 4a",
    )
    most = {
        name: [max(rows[name].gammas, key=rows[name].gammas.__getitem__) for rows in (synthetic, maf)] for name in means
    }
    findings.claim(
        "Fig. 12",
        "gamma 8 most often, then -15",
        "; ".join(f"{name}: most often {one}, {other}" for name, (one, other) in most.items()),
        verdict(*(gamma == 8 for gamma in most[PAPER_NAME])),
    )
    right = {name: [rows[name].row() for rows in (synthetic, maf)] for name in means}
    findings.claim(
        "Fig. 13",
        "right and in time: 85.5% and 75.6%, nothing late",
        "; ".join(f"{name} {one['right']:.1%}, {other['right']:.1%}" for name, (one, other) in right.items()),
        verdict(right[PAPER_NAME][0]["right"] > 0.8, right[PAPER_NAME][1]["right"] > 0.7),
        "nothing is late either" if not any(row["late"] for row in right[PAPER_NAME]) else "",
    )


def _grid(findings: Findings, name: str, rows: Mapping[str, Outcomes]) -> None:
    gain, theirs = (rows[scheme].utility / rows[BEST].utility - 1 for scheme in (OURS_NAME, PAPER_NAME))
    findings.claim(
        "Fig. 10",
        "(aim) the grid plan: 8% more utility than the best fixed gamma",
        f"{name}, 1.2 times capacity: {gain:+.1%}; the paper's {theirs:+.1%}",
        verdict(gain >= 0.08),
    )
