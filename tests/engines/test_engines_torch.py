"""Engines of provider torch on the CPU, compared with the reference. The CUDA path needs a GPU."""

from __future__ import annotations

import gc
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shapeshift.engines.checkpoint import open_checkpoint
from shapeshift.engines.execution.engine_set import pack, unpack
from shapeshift.engines.interfaces import PROVIDERS
from shapeshift.engines.providers import cuda_graph, torch_model
from shapeshift.engines.text.sentence_modules import SentenceModules
from shapeshift.engines.verify import MIN_COSINE, compare
from shapeshift.errors import EngineError
from tests.engines.families import VOCABULARY, outputs_of_engines, save_model
from tests.sampling import few

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


@pytest.mark.parametrize("kind", few(("bf16", "f16"), ("bf16",)))
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
    reference = reference_of(save_model(tmp_path / "model", "bert"))
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    runtime = opened(tmp_path, reference, "f32", threads=3)
    engine = runtime.engine(None, None)
    assert engine.model is runtime.engine(16, 2).model
    for _ in range(2):
        engine.run(pack(texts()[:1], LENGTHS[0], 1, reference.position_offset))
    assert asked == [3]


@pytest.mark.long
def test_image_engines_match_in_every_precision(tmp_path: Path) -> None:
    for gamma, kinds in ((-3, ("f32", "bf16")), (2, ("f32",))):
        module = image_module(tmp_path, gamma)
        wanted = module.features(module.example(3, seed=3))
        for kind in kinds:
            folder = tmp_path / f"{gamma} {kind}"
            folder.mkdir()
            found = opened(folder, module, kind).engine(None, None).run(module.example(3, seed=3))["FEATURES"]
            assert compare(found, wanted).min_cosine >= MIN_COSINE[kind]


def opened(folder: Path, source: Any, kind: str, threads: int = 1) -> Any:
    provider = PROVIDERS["torch"]
    if hasattr(source, "module"):
        module, example = source.module(), pack(texts()[:2], 24, 2, source.position_offset)
    else:
        module, example = source, source.example(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        provider.export(module, example, folder, kind)
    return provider.open(folder, kind, threads)


@pytest.mark.parametrize("kind", few(("f32", "bf16"), ("f32",)))
def test_the_code_of_a_static_length_computes_what_the_eager_engine_does(tmp_path: Path, kind: str) -> None:
    reference = reference_of(save_model(tmp_path / "model", "bert"))
    runtime = opened(tmp_path, reference, kind)
    eager = runtime.engine(None, None)
    for tokens in (40, 64, 40):
        captured = cuda_graph.CudaGraphEngine(runtime.model, {"tokens": tokens, "rows": 8})
        assert (captured.tokens, captured.rows) == (tokens, 8)
        for chosen in (texts(), texts()[:1]):
            inputs = pack(chosen, tokens, 8, reference.position_offset)
            found, wanted = (one.run(inputs)["EMBEDDING"][: len(chosen)] for one in (captured, eager))
            np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("gamma", few((-3, 0, 2), (-3,)))
def test_the_code_of_a_batch_size_computes_what_the_eager_engine_does(tmp_path: Path, gamma: int) -> None:
    module = image_module(tmp_path, gamma)
    runtime = opened(tmp_path, module, "f32")
    eager, graphs = (
        runtime.engine(None, None),
        cuda_graph.SizedGraphs(runtime.model, {"images": (1, 4), "tasks": (8,)}),
    )
    sizes = [(own["images"], own.get("tasks")) for own in (one.sizes for one in graphs.graphs)]
    assert sizes == [(images, 8 if gamma > 0 else None) for images in (4, 1)], "the largest first"
    # 5 images are more than any graph has, and 9 tasks.
    for images, tasks in ((1, 2), (3, 2), (4, 8), (2, 3), (5, 2), (2, 9)):
        inputs = module.example(images, seed=images, tasks=tasks)
        for _ in range(2):
            np.testing.assert_allclose(graphs.run(inputs)["FEATURES"], eager.run(inputs)["FEATURES"], atol=1e-5)
    assert len(graphs.graphs) == 2


def test_prompts_are_copied_when_others_are_given(tmp_path: Path) -> None:
    module = image_module(tmp_path, 2)
    runtime = opened(tmp_path, module, "f32")
    eager, graphs = runtime.engine(None, None), cuda_graph.SizedGraphs(runtime.model, {"images": (2,), "tasks": (8,)})
    first, second = (module.example(2, seed=seed) for seed in (1, 2))
    for inputs in (first, {**second, "PROMPTS": first["PROMPTS"]}, second):
        np.testing.assert_allclose(graphs.run(inputs)["FEATURES"], eager.run(inputs)["FEATURES"], atol=1e-5)


@pytest.mark.long
def test_the_gammas_of_a_model_share_their_weights(tmp_path: Path) -> None:
    runtimes: list[Any] = []
    for gamma, kind in ((-3, "f32"), (0, "f32"), (0, "bf16")):
        folder = tmp_path / f"{gamma} {kind}"
        opened(folder, image_module(folder, gamma), kind)
        beside = runtimes[0] if runtimes else None
        runtimes.append(PROVIDERS["torch"].open(folder, kind, 1, beside=beside))
    first, second, other = ([weight.data_ptr() for weight in one.model.weights.values()] for one in runtimes)
    assert first == second and not set(first) & set(other)
    module = image_module(tmp_path / "-3 f32", 0)
    inputs = module.example(3, seed=3)
    found = runtimes[1].engine(None, None).run(inputs)["FEATURES"]
    np.testing.assert_allclose(found, module.features(inputs), atol=1e-5)


def test_weights_that_differ_are_not_shared(tmp_path: Path) -> None:
    module = image_module(tmp_path, 0)
    first = opened(tmp_path, module, "f32")
    with torch.no_grad():
        module.model.patch.weight.add_(1.0)
    (tmp_path / "other").mkdir()
    opened(tmp_path / "other", module, "f32")
    second = PROVIDERS["torch"].open(tmp_path / "other", "f32", 1, beside=first)
    inputs = module.example(2, seed=1)
    np.testing.assert_allclose(second.engine(None, None).run(inputs)["FEATURES"], module.features(inputs), atol=1e-5)


def image_module(folder: Path, gamma: int) -> Any:
    """A small random transformer of images, the same for each gamma."""
    from shapeshift.token_adapt.checkpoints.weights import read_model
    from shapeshift.token_adapt.model.gamma_module import GammaModule
    from tests.token_adapt.timm_models import small_checkpoint

    small_checkpoint(folder / "small")
    model, _, _ = read_model(folder / "small")
    return GammaModule(model, gamma).eval()


def test_a_gpu_that_is_full_while_it_serves_is_an_error_with_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = opened(tmp_path, reference_of(save_model(tmp_path / "model", "bert")), "f32")
    model, engine = runtime.model, runtime.engine(None, None)

    def full(tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has")

    monkeypatch.setattr(model, "compute", full)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (500 << 20, 4000 << 20))
    inputs = pack(texts(), sum(LENGTHS), len(LENGTHS))
    with pytest.raises(torch.cuda.OutOfMemoryError):
        engine.run(inputs)
    # As on GPU 1.
    model.shared, model.device = cuda_graph.Shared(None, None, None), torch.device("cuda:1")
    monkeypatch.setattr(model, "on_stream", nullcontext)
    monkeypatch.setattr(model, "tensors", lambda inputs: [])
    wanted = "GPU 1: no memory for a call of 1 x 35 INPUT_IDS: 2.00 GiB more is wanted, 500 of 4000 MiB are free"
    with pytest.raises(EngineError, match=wanted):
        engine.run(inputs)


# What only a GPU can show, rehearsed on a CPU: these engines are captured, and replayed.

on_devices = pytest.mark.parametrize("device", [None, pytest.param(0, marks=pytest.mark.gpu)], ids=["cpu", "gpu"])


@on_devices
def test_a_captured_graph_computes_what_the_eager_engine_does(tmp_path: Path, device: int | None) -> None:
    """Also after the model was loaded again, in whose place the first one's memory may be."""
    reference = reference_of(save_model(tmp_path / "model", "bert"))
    opened(tmp_path, reference, "f32")
    for _ in range(2):
        runtime: Any = PROVIDERS["torch"].open(tmp_path, "f32", 1, device)
        eager, graphs = runtime.engine(None, None), [runtime.as_on_gpu(tokens, 8) for tokens in (64, 40)]
        assert all(isinstance(one, cuda_graph.CudaGraphEngine) for one in graphs)
        # The graphs share memory: each is replayed after the other, with other texts.
        for chosen in (texts(), texts()[:2], texts()[3:]):
            wanted = np.stack([reference.compute(text)["EMBEDDING"] for text in chosen])
            for engine in (*graphs, eager):
                total = engine.tokens or sum(map(len, chosen))
                inputs = pack(chosen, total, engine.rows or len(chosen), reference.position_offset)
                np.testing.assert_allclose(engine.run(inputs)["EMBEDDING"][: len(chosen)], wanted, atol=1e-4)
        del runtime, eager, graphs
        gc.collect()


@on_devices
@pytest.mark.parametrize("gamma", few((-3, 0, 2), (2,)))
def test_graphs_of_batches_compute_what_the_eager_engine_does(tmp_path: Path, gamma: int, device: int | None) -> None:
    module = image_module(tmp_path, gamma)
    opened(tmp_path, module, "f32")
    runtime: Any = PROVIDERS["torch"].open(tmp_path, "f32", 1, device)
    eager, graphs = torch_model.TorchEngine(runtime.model, None, None), runtime.as_on_gpu(None, None)
    assert isinstance(graphs, cuda_graph.SizedGraphs)
    for images in (1, 3, 64, 65, 2):
        inputs = module.example(images, seed=images)
        found = graphs.run(inputs)["FEATURES"].copy()
        np.testing.assert_allclose(found, eager.run(inputs)["FEATURES"], atol=1e-4)
        np.testing.assert_allclose(found, module.features(inputs), atol=1e-3)
    assert len(graphs.graphs) == len(runtime.model.signature.captured["images"])
