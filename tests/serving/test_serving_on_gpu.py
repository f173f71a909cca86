"""A real Triton on a GPU: clients get what transformers and PEFT compute on a CPU. Without one, a CPU rehearses it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.adapter_cache.lora_models import MIXED, make_adapter, peft_texts
from tests.adapter_cache.text_models import computed_by_peft
from tests.build_engines.two_towers import normal
from tests.compiled import KERNELS
from tests.engines.families import save_model
from tests.fused_decode.checkpoints import make_checkpoint
from tests.token_adapt.token_tasks import noise
from tests.token_adapt.vision_families import CASES, write

if TYPE_CHECKING:
    from shapeshift.triton.embedded.server import TritonServer

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

PROMPTS, COUNT = ("Return the number of", "Raise ValueError if", "der Käse ist"), 24
ADAPTERS = ("small", "queries", "large")
# Checkpoint, technique if it is not the checkpoint's own, and parameters.
MODELS: dict[str, tuple[str, str, dict[str, str]]] = {
    "encode": ("bert", "", {"bins": "16,64"}),
    "generate": ("llama", "", {}),
    "generate_lora": ("llama", "adapter_cache", {"adapter_mb": "1"}),
    # Merging of patches changes logits.
    "classify_image": ("vit", "", {"gammas": "0"}),
}
VIT = next(case for case in CASES if case.model == "ViTForImageClassification")

Ask = Callable[..., dict[str, Any]]
"""ask(model, inputs by name, **parameters): the outputs by name."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with those of MODELS, and an adapter of each name in ADAPTERS."""
    root = tmp_path_factory.mktemp("checkpoints")
    save_model(root / "bert", "bert")
    base = make_checkpoint(root / "llama")
    for seed, name in enumerate(ADAPTERS):
        make_adapter(root / name, base, MIXED[name], seed)
    return root


@pytest.fixture(scope="module")
def logits(checkpoints: Path) -> Callable[..., Any]:
    """The library's computation of normalised pixels; writes the checkpoint."""
    return write(VIT, checkpoints / "vit")


@pytest.fixture(
    scope="module", params=[pytest.param("cpu", marks=pytest.mark.long), pytest.param("gpu", marks=pytest.mark.gpu)]
)
def ask(
    request: pytest.FixtureRequest,
    checkpoints: Path,
    logits: object,
    make_server: Callable[..., TritonServer],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Ask]:
    """A server of MODELS, all of whose engines are loaded. Where there is a GPU, models take it unasked."""
    pytest.importorskip("tritonclient")
    from bench.common.server import wait_loaded
    from shapeshift.engines import manifest
    from tests.polymorph.test_encode_server import post

    root = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        publish(checkpoints, request.param)
    with make_server(
        (root / "build" / "repository",), (*MODELS, "generate_unary", "generate_lora_unary"), root / "run"
    ) as server:
        server.wait_ready()
        wait_loaded(server.metrics_url, len(manifest.load(root / "build" / "engines" / "encode").engines))

        def infer(model: str, tensors: list[dict[str, Any]], **parameters: str) -> dict[str, Any]:
            status, answer = post(server, {"inputs": tensors, "parameters": parameters}, model)
            assert status == 200, answer
            return {one["name"]: np.reshape(one["data"], one["shape"]) for one in answer["outputs"]}

        yield infer


def publish(checkpoints: Path, device: str) -> None:
    """Add and build MODELS and their adapters in this folder, as a user does."""
    from shapeshift.cli.main import main
    from shapeshift.triton import model_config

    KERNELS.mkdir(parents=True, exist_ok=True)
    Path("build").mkdir()
    Path("build/kernels").symlink_to(KERNELS)
    for name, (checkpoint, technique, changes) in MODELS.items():
        options = ["--technique", technique] if technique else []
        assert main(["add", str(checkpoints / checkpoint), "--as", name, *options]) == 0
        file = Path("model_repository", name, "config.pbtxt")
        config = model_config.read(file)
        # In f32 a text does not depend on those beside it.
        for key, value in {"precision": "f32", **changes}.items():
            model_config.set_parameter(config, key, value)
        if device == "cpu":
            group = config.instance_group.add()
            group.kind = group.KIND_CPU
        model_config.write(config, file)
    assert main(["engines"]) == 0
    for name in MODELS:
        (group,) = model_config.read(Path("build/repository", name, "config.pbtxt")).instance_group
        assert group.Kind.Name(group.kind) == f"KIND_{device.upper()}", name
    for name in ADAPTERS:
        assert main(["adapters", "--model", "generate_lora", "add", name, str(checkpoints / name)]) == 0


def say(ask: Ask, model: str, prompt: str, **parameters: str) -> str:
    """The greedy text behind a prompt."""
    tensors = [
        {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": [prompt]},
        {"name": "max_tokens", "shape": [1], "datatype": "INT32", "data": [COUNT]},
        {"name": "temperature", "shape": [1], "datatype": "FP32", "data": [0.0]},
    ]
    return str(ask(model, tensors, **parameters)["text_output"].item())


def test_vectors(ask: Ask, checkpoints: Path) -> None:
    rng = np.random.default_rng(1)
    rows = [rng.integers(4, 60, length) for length in (1, 3, 9, 20, 40, 61)]
    # The tokenizer's w0 has the id 4; it puts 2 before a text and 3 behind it.
    texts = [" ".join(f"w{token - 4}" for token in row) for row in rows]
    tensor = {"name": "TEXT", "shape": [len(texts), 1], "datatype": "BYTES", "data": texts}
    wanted = computed_by_peft(checkpoints / "bert", None, [np.array([2, *row, 3]) for row in rows])
    np.testing.assert_allclose(ask("encode", [tensor])["EMBEDDING"], wanted, atol=1e-4)


def test_greedy_texts(ask: Ask, checkpoints: Path) -> None:
    wanted = [peft_texts(checkpoints / "llama", {}, prompt, COUNT)[None] for prompt in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        assert list(pool.map(lambda prompt: say(ask, "generate_unary", prompt), PROMPTS)) == wanted


def test_texts_of_three_adapters_at_once(ask: Ask, checkpoints: Path) -> None:
    wanted = peft_texts(checkpoints / "llama", {name: checkpoints / name for name in ADAPTERS}, PROMPTS[0], COUNT)
    names = ADAPTERS * 3
    with ThreadPoolExecutor(len(names)) as pool:
        texts = pool.map(lambda name: say(ask, "generate_lora_unary", PROMPTS[0], lora_name=name), names)
        assert list(texts) == [wanted[name] for name in names]
    assert len(set(wanted.values())) == len(ADAPTERS) + 1


def test_labels(ask: Ask, logits: Callable[..., Any]) -> None:
    import torch

    pixels = noise(8)
    tensor = {"name": "PIXELS", "shape": pixels.shape, "datatype": "UINT8", "data": pixels.ravel().tolist()}
    with torch.inference_mode():
        wanted = logits(normal(pixels)).softmax(1).numpy()
    answer = ask("classify_image", [tensor])
    assert answer["LABEL"].ravel().tolist() == [f"kind {index}" for index in wanted.argmax(1)]
    np.testing.assert_allclose(answer["PROBABILITIES"], wanted, atol=1e-4)
