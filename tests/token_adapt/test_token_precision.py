"""Engines that merge tokens, on each class of CPU: a torch model rounded to bf16 takes the place of the engine."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch.nn import functional

from shapeshift.build_engines.image import front as images
from shapeshift.build_engines.image.labels import Agreement
from shapeshift.engines import hardware
from shapeshift.engines.interfaces import PROVIDERS
from shapeshift.engines.providers.openvino import OpenVinoEngine
from shapeshift.engines.verify import VerificationError
from shapeshift.errors import InvalidInputError
from shapeshift.token_adapt.checkpoints.weights import read_model
from shapeshift.token_adapt.model import manifest as image_manifest
from shapeshift.token_adapt.model.gamma_module import GammaModule
from shapeshift.token_adapt.tasks import examples
from shapeshift.token_adapt.tasks import folder as task_folder
from shapeshift.token_adapt.tasks.examples import Examples
from tests.token_adapt.token_tasks import front, noise, paths, register, write_task

# The flags in /proc/cpuinfo, and the precision that `auto` builds.
CPUS = {"avx2": "f32", "avx2 avx512f avx512_bf16": "bf16", "avx2 avx512f avx512_bf16 amx_bf16": "bf16"}


class TorchEngine:
    """The eager model, its linear layers rounded to bf16 where `precision` is; `spoiled` sets a share of rows to 0."""

    tokens, rows = None, None

    def __init__(self, module: GammaModule, precision: str, spoiled: float) -> None:
        self._module, self._precision, self._spoiled = module, precision, spoiled

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        with pytest.MonkeyPatch.context() as patch:
            if self._precision == "bf16":
                patch.setattr(functional, "linear", _linear_in_bf16)
            found = self._module.features(inputs)
        if self._precision == "bf16" and self._module.gamma < 0:
            found[: int(self._spoiled * len(found))] *= -1
        return {"FEATURES": found}


def _linear_in_bf16(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    summed = x.bfloat16().float() @ weight.bfloat16().float().T
    return summed if bias is None else summed + bias


@pytest.fixture(params=CPUS)
def cpu(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Flags of a CPU, which this process then believes to have."""
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"flags\t\t: {request.param}\n")
    real = hardware.cpu_has_bf16
    monkeypatch.setattr(hardware, "cpu_has_bf16", lambda: real(cpuinfo))
    return str(request.param)


@pytest.fixture
def spoiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Replaces OpenVINO by torch; its one number is the share of wrong rows of a bf16 engine that merges."""
    share, modules = [0.0], {}
    provider = type(PROVIDERS["openvino"])

    def export(self: object, module: GammaModule, example: object, folder: Path, precision: str) -> list[str]:
        (folder / "model.torch").touch()
        modules[folder] = module
        return ["model.torch"]

    class Runtime:
        def __init__(self, folder: Path, precision: str) -> None:
            self._made = TorchEngine(modules[folder], precision, share[0])

        def engine(self, tokens: int | None, rows: int | None) -> TorchEngine:
            return self._made

    monkeypatch.setattr(provider, "export", export)
    monkeypatch.setattr(provider, "open", lambda self, folder, precision, *others, **named: Runtime(folder, precision))
    yield share


def project_with_images(root: Path, count: int = 200) -> None:
    """A project with a registered task that keeps images, of which all have the first label by a wide margin."""
    front(root)
    folder = write_task(root, "shades", 2)
    model, _, _ = read_model(root / "checkpoints" / "small")
    mean = GammaModule(model, -5).eval().features({"PIXELS": noise(count)}).mean(0)
    heads = {"0.weight": np.stack([mean, -mean]), "0.bias": np.zeros(2, np.float32)}
    save_file(heads, folder / task_folder.HEAD_FILE)
    register(root, "shades")
    examples.to_file(folder, Examples(np.zeros(count, np.int64), lambda indices: noise(count)[indices]))


def built(root: Path) -> dict[int, image_manifest.GammaEntry]:
    made, _ = images.publish(front(root, precision="auto"), paths(root), lambda step: None)
    return {entry.gamma: entry for entry in made.engines}


def test_merging_engines_are_verified_by_their_labels_on_each_cpu(
    tmp_path: Path, cpu: str, spoiled: list[float]
) -> None:
    project_with_images(tmp_path)
    made = built(tmp_path)
    assert {entry.precision for entry in made.values()} == {CPUS[cpu]}
    assert (made[-5].agreement is not None) == (CPUS[cpu] == "bf16")
    assert made[-5].agreement is None or made[-5].agreement >= 0.99
    assert made[0].agreement is None and made[2].agreement is None


@pytest.mark.parametrize("cpu", ["avx2 avx512f avx512_bf16"], indirect=True)
def test_a_merging_engine_that_gives_other_labels_is_built_in_f32(
    tmp_path: Path, cpu: str, spoiled: list[float]
) -> None:
    project_with_images(tmp_path)
    spoiled[0] = 0.2
    made = built(tmp_path)
    assert {gamma: entry.precision for gamma, entry in made.items()} == {-5: "f32", 0: "bf16", 2: "bf16"}
    assert made[-5].agreement is None


@pytest.mark.parametrize("cpu", ["avx2 avx512f avx512_bf16"], indirect=True)
def test_other_images_mean_other_engines(tmp_path: Path, cpu: str, spoiled: list[float]) -> None:
    project_with_images(tmp_path)
    built(tmp_path)
    stated = front(tmp_path, precision="auto")
    assert images.publish(stated, paths(tmp_path), lambda step: None)[1] == "up to date"
    project_with_images(tmp_path, count=150)
    assert images.publish(stated, paths(tmp_path), lambda step: None)[1] == "built"


@pytest.mark.parametrize(("share", "loss", "kept"), [(0.99, 0.005, True), (0.98, 0.0, False), (1.0, 0.006, False)])
def test_the_limits_of_an_agreement(share: float, loss: float, kept: bool) -> None:
    if kept:
        Agreement(share, loss).require("gamma -5")
        return
    with pytest.raises(VerificationError, match=r"gamma -5 differs.*at least 99% and at most 0\.5%"):
        Agreement(share, loss).require("gamma -5")


def test_an_unreadable_file_of_images_is_named(tmp_path: Path) -> None:
    (tmp_path / examples.FILE).write_bytes(b"not a zip")
    with pytest.raises(InvalidInputError, match=r"examples\.npz"):
        examples.from_file(tmp_path)


def test_the_matching_is_marked_to_stay_in_f32(project: Path, tmp_path: Path) -> None:
    """In the file on every CPU. On one with bf16 also in the compiled engine, where nothing of it runs in bf16."""
    model, _, _ = read_model(project / "checkpoints" / "small")
    module = GammaModule(model, -5).eval()
    provider = PROVIDERS["openvino"]
    provider.export(module, module.example(2), tmp_path, "bf16")
    layers = list(ElementTree.parse(tmp_path / "model.xml").iterfind("./layers/layer"))
    inside = [layer for layer in layers if ".matching/" in layer.get("name", "")]
    marked = [
        layer for layer in layers if layer.find("rt_info/attribute[@name='DisablePrecisionConversion']") is not None
    ]
    assert inside == marked and {"MatMul", "ReduceL2", "TopK"} <= {layer.get("type") for layer in inside}
    # The plugin would replace a division, and lose the mark.
    assert "Divide" not in {layer.get("type") for layer in inside}
    engine = provider.open(tmp_path, "bf16" if hardware.cpu_has_bf16() else "f32", 1).engine(None, None)
    assert isinstance(engine, OpenVinoEngine)
    compiled = engine._request.get_compiled_model().get_runtime_model()
    details = [operation.get_rt_info() for operation in compiled.get_ops()]
    computed = [
        str(own["runtimePrecision"].astype(str))
        for own in details
        if ".matching/" in own["originalLayersNames"].astype(str)
    ]
    assert "f32" in computed and "bf16" not in computed
