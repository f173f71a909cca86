"""Engines of provider torch on the CPU, compared with the reference. The CUDA path needs a GPU."""

from __future__ import annotations

import ctypes
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shapeshift.engines import cuda_device, gpu, precision
from shapeshift.engines.checkpoint import open_checkpoint
from shapeshift.engines.providers import lookup
from shapeshift.engines.text.packing import pack, unpack
from shapeshift.engines.text.sentence_modules import SentenceModules
from shapeshift.engines.verify import MIN_COSINE, compare
from shapeshift.errors import EngineError, UnsupportedError
from tests.engines.driver import Driver
from tests.engines.families import VOCABULARY, outputs_of_engines, save_model

LENGTHS = [5, 1, 17, 9, 3]


def texts() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, VOCABULARY, length, dtype=np.int64) for length in LENGTHS]


def reference_of(folder: Path, outputs: tuple[str, ...] = ("EMBEDDING",), pooling: str = "mean") -> Any:
    from shapeshift.engines.text.reference_model import ReferenceModel

    return ReferenceModel(open_checkpoint(folder), SentenceModules((pooling,), True), outputs)


@pytest.mark.parametrize(
    ("family", "outputs"),
    [
        ("bert", ("EMBEDDING", "IMPORTANCE")),
        pytest.param("modernbert", ("EMBEDDING",), marks=pytest.mark.long),
        pytest.param("deberta-v2", ("EMBEDDING",), marks=pytest.mark.long),
    ],
)
def test_engines_match_the_model(tmp_path: Path, family: str, outputs: tuple[str, ...]) -> None:
    reference = reference_of(save_model(tmp_path / "model", family), outputs)
    wanted = [reference.compute(text) for text in texts()]
    for found in outputs_of_engines(reference, texts(), tmp_path, "torch"):
        for name in outputs:
            for got, own in zip(found, wanted, strict=True):
                np.testing.assert_allclose(got[name][: len(own[name])], own[name], atol=1e-4)


@pytest.mark.parametrize("kind", ["bf16", pytest.param("f16", marks=pytest.mark.long)])
def test_fewer_bits_stay_near_and_leave_the_reference_alone(tmp_path: Path, kind: str) -> None:
    reference = reference_of(save_model(tmp_path / "model", "bert"), ("EMBEDDING", "IMPORTANCE"))
    before = [reference.compute(text)["EMBEDDING"] for text in texts()]
    engine = opened(tmp_path, reference, kind).engine(None, None)
    total = sum(LENGTHS)
    found = unpack(engine.run(pack(texts(), total, len(LENGTHS), reference.position_offset)), texts())["EMBEDDING"]
    deviation = compare(found, np.stack(before))
    assert deviation.min_cosine >= MIN_COSINE[kind] and deviation.max_error > 0
    assert found.dtype == np.float32
    np.testing.assert_array_equal(reference.compute(texts()[0])["EMBEDDING"], before[0])


def test_engines_share_their_weights_and_have_their_own_number_of_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    reference = reference_of(save_model(tmp_path / "model", "bert"))
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    runtime = opened(tmp_path, reference, "f32", threads=3)
    engine = runtime.engine(None, None)
    assert engine._model is runtime.engine(16, 2)._model
    for _ in range(2):
        engine.run(pack(texts()[:1], LENGTHS[0], 1, reference.position_offset))
    assert asked == [3]


@pytest.mark.long
def test_image_engines_match_in_every_precision(tmp_path: Path) -> None:
    from shapeshift.token_adapt.checkpoints.weights import read_model
    from shapeshift.token_adapt.model.gamma_module import GammaModule
    from tests.token_adapt.timm_models import small_checkpoint

    small_checkpoint(tmp_path / "small")
    model, _, _ = read_model(tmp_path / "small")
    for gamma, kinds in ((-3, ("f32", "bf16")), (2, ("f32",))):
        module = GammaModule(model, gamma).eval()
        wanted = module.features(module.example(3, seed=3))
        for kind in kinds:
            folder = tmp_path / f"{gamma} {kind}"
            folder.mkdir()
            found = opened(folder, module, kind).engine(None, None).run(module.example(3, seed=3))["FEATURES"]
            assert compare(found, wanted).min_cosine >= MIN_COSINE[kind]


def opened(folder: Path, source: Any, kind: str, threads: int = 1) -> Any:
    provider = lookup.PROVIDERS["torch"]
    if hasattr(source, "module"):
        module, example = source.module(), pack(texts()[:2], 24, 2, source.position_offset)
    else:
        module, example = source, source.example(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        provider.export(module, example, folder, kind)
    return provider.open(folder, kind, threads)


# What a GPU is asked, and what is said where it is not there.


def test_a_gpu_is_described_by_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(2, (7, 5)))
    found = gpu.describe(1)
    assert (found.device, found.name, found.capability, found.memory_mb) == (1, "H100", (7, 5), 80 * 1024)
    assert not found.has_bf16
    assert gpu.with_cpu(1).startswith("H100, compute capability 7.5; ")


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise OSError(name)

    for loader, text in (
        (absent, "GPU 3: this machine has no NVIDIA driver"),
        (lambda name: Driver(2), "GPU 3: the NVIDIA driver shows 2 devices"),
        (lambda name: Driver(2, status=100), "GPU 3: the NVIDIA driver reports error 100"),
    ):
        monkeypatch.setattr(ctypes, "CDLL", loader)
        with pytest.raises(UnsupportedError, match=text):
            gpu.describe(3)


def test_a_torch_that_cannot_use_the_gpu_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this torch can use a GPU")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(1))
    with pytest.raises(EngineError, match=r"GPU 0 \(H100\): torch .* cannot use it; .*KIND_CPU"):
        lookup.PROVIDERS["torch"].open(tmp_path, "f32", 1, 0)


def test_what_is_free_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(2))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (device * 3 << 30, 80 << 30))
    assert cuda_device.free_memory(1) == (3 * 1024, "free of 81920 MiB of GPU 1 (H100)")
    with pytest.raises(UnsupportedError, match="GPU 2: the NVIDIA driver shows 2 devices"):
        cuda_device.free_memory(2)


@pytest.mark.parametrize(
    ("requested", "capability", "wanted"),
    [("auto", (9, 0), "bf16"), ("auto", (7, 5), "f16"), ("f16", (9, 0), "f16"), ("f32", (7, 5), "f32")],
)
def test_the_precision_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, requested: str, capability: tuple[int, int], wanted: str
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(1, capability))
    assert precision.resolve(requested, "torch", 0) == wanted


def test_a_precision_that_the_device_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(1, (7, 5)))
    with pytest.raises(UnsupportedError, match=r"bf16 needs compute capability 8.0; GPU 0 \(H100\) has 7.5; set f16"):
        precision.resolve("bf16", "torch", 0)
    with pytest.raises(UnsupportedError, match="f16 is for GPUs; on a CPU set f32, bf16 or auto"):
        precision.resolve("f16", "torch", None)
    assert precision.resolve("auto", "onnxruntime", None) == "f32"


@pytest.mark.gpu
def test_a_captured_graph_computes_what_the_eager_engine_does(tmp_path: Path) -> None:
    reference = reference_of(save_model(tmp_path / "model", "bert"))
    opened(tmp_path, reference, "f32")
    runtime = lookup.PROVIDERS["torch"].open(tmp_path, "f32", 1, 0)
    eager, graphs = runtime.engine(None, None), [runtime.engine(tokens, 8) for tokens in (40, 64)]
    # The graphs share memory: each is replayed after the other.
    for engine in (*graphs, *graphs):
        inputs = pack(texts(), engine.tokens or 0, 8, reference.position_offset)
        np.testing.assert_allclose(
            engine.run(inputs)["EMBEDDING"][: len(LENGTHS)], eager.run(inputs)["EMBEDDING"][: len(LENGTHS)], atol=1e-5
        )
