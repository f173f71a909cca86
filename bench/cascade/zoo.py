"""The tasks of `bench.cascade`: their texts, their two classifiers, and the candidate that serves."""

from __future__ import annotations

import json
from pathlib import Path

from bench.common.models import SHIPPED, write_front
from bench.common.output import BUILD
from bench.common.public_data import data_file
from shapeshift.build_engines.paths import BuildPaths
from shapeshift.build_engines.repository import front_models
from shapeshift.build_engines.text.config import TextFrontConfig
from shapeshift.build_engines.text.front import publish
from shapeshift.cascade import candidates
from shapeshift.cascade.candidates import ServingCandidate
from shapeshift.cascade.policy.selection import choose
from shapeshift.cascade.profiling import register, samples
from shapeshift.cascade.profiling.register import ProfilingSettings
from shapeshift.cascade.profiling.samples import Sample
from shapeshift.errors import NotFoundError
from shapeshift.progress import Progress

DEMO = "clinc150"
# The other tasks, and the layers of their small and their large classifier.
LAYERS = {"domains": (1, 6), "scope": (1, 6), "sst2": (3, 6)}
FRONTS = ("classify_text_small", "classify_text_large")
CANDIDATES = Path("checkpoints/text-classifiers/candidates")
DATA = "clinc150/data_full.json"
SAMPLES = BUILD / "text-classifiers"
ROOT = BUILD / "bench/cascade"


def texts_to_test(task: str) -> Sample:
    """The labelled texts of a task's test part. Raises NotFoundError where they are missing."""
    if task != DEMO:
        return _sample(task, "test")
    part = json.loads(data_file(DATA).read_text(encoding="utf-8"))["test"]
    return Sample([[text.encode()] for text, _ in part], [label for _, label in part])


def serving(task: str, seed: int) -> tuple[Path, ServingCandidate]:
    """The folder of the engines of a task's two classifiers, small and large, and the candidate of them that serves.

    The demo's is that of its registry. For another task the engines are built if they are missing, and profiled: the
    fastest candidate is taken whose accuracy bound is not below that of the large classifier alone.
    """
    if task == DEMO:
        return BUILD / "engines", candidates.serving(CANDIDATES, task)
    sample, (engines, names), progress = _sample(task, "val"), _build(task), Progress(task)
    table = register.profile(task, sample, engines, names, ProfilingSettings(max_levels=2, seed=seed), progress)
    progress.done()
    least = table.candidate(names[-1]).assured_accuracy
    return engines, ServingCandidate(table, choose(table.candidates, least, 0.0).serving)


def _sample(task: str, part: str) -> Sample:
    file = SAMPLES / f"{task}-{part}.jsonl"
    if not file.is_file():
        raise NotFoundError(f"no {file}: run `python checkpoints/text-classifiers/texts.py`")
    return samples.read(file)


def _build(task: str) -> tuple[Path, list[str]]:
    """The folder of a task's engines, and the names of its models."""
    paths = BuildPaths(Path.cwd(), ROOT.resolve(), (ROOT / "model_repository").resolve())
    checkpoint, names = (BUILD / "checkpoints/all-MiniLM-L6-v2").resolve(), []
    for front, layers in zip(FRONTS, LAYERS[task], strict=True):
        names.append(f"{task}_{layers}")
        head = f"text-classifiers/{task}-{layers}.safetensors"
        parameters = {"checkpoint": checkpoint, "layers": layers, "head": head}
        write_front(SHIPPED / front, paths.repository / names[-1], parameters)
    for model in front_models(paths, set(names)):
        assert isinstance(model, TextFrontConfig)
        publish(model, paths, Progress(model.name))
    return paths.engines, names
