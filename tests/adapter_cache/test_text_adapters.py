"""Adapters over encoders and classifiers: a front over native engines, held against PEFT."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shapeshift import settings
from shapeshift.adapter_cache.registry import store
from shapeshift.adapter_cache.settings import AdapterSettings
from shapeshift.adapter_cache.text.front import LoraTextFront
from shapeshift.cli.main import main
from shapeshift.engines import hardware
from shapeshift.polymorph.front import TextFront
from shapeshift.serving import model_args
from tests.adapter_cache.text_models import CLASSIFIER, ENCODER, TAGGER, computed_by_peft, save_adapter
from tests.compiled import link_kernels
from tests.engines.families import VOCABULARY, save_model, save_modules
from tests.fakes import PbUtils, Request, TritonError, as_served, ids_request, text_request
from tests.polymorph.conftest import args_of
from tests.sampling import few
from tests.waiting import wait_for

BERT = ["query", "key", "value", "dense"]
TARGETS: dict[str, list[str]] = {
    "bert": BERT,
    "roberta": BERT,
    "modernbert": ["Wqkv", "Wo", "Wi"],
    "qwen3": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}
ROWS = [np.random.default_rng(length).integers(4, VOCABULARY, length) for length in (5, 1, 17, 30, 9)]
MakeFront = Callable[..., LoraTextFront]


class QuickFront(LoraTextFront):
    refresh_s = 0.05


def adapters_of(folder: Path, base: Path, family: str, kind: str = ENCODER) -> dict[str, Path]:
    """Of other ranks, scales and targets each."""
    targets = TARGETS[family]
    configs: dict[str, dict[str, Any]] = {
        "small": {"r": 4, "lora_alpha": 8, "target_modules": targets},
        "large": {"r": 64, "lora_alpha": 32, "target_modules": targets, "use_rslora": True},
        "first": {"r": 16, "lora_alpha": 16, "target_modules": targets[:1]},
    }
    return {
        name: save_adapter(folder / name, base, kind, seed, **config)
        for seed, (name, config) in enumerate(configs.items())
    }


@pytest.fixture
def build(tmp_path: Path, add_front: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A function that builds a front over a checkpoint; returns its generated folder. refused: whether that fails."""
    monkeypatch.chdir(tmp_path)
    link_kernels(tmp_path / "build")

    def make(checkpoint: Path, outputs: str = "", refused: bool = False, **parameters: object) -> Path:
        small = {"precision": "f32", "pooling": "mean", "max_tokens": 32, "profile_file": "", "adapter_mb": 4}
        stated = {"provider": "auto", "engine_threads": 2, **small, **parameters}
        folder = add_front(tmp_path / "model_repository", "front", checkpoint=checkpoint, **stated)
        text = (folder / "config.pbtxt").read_text().replace(" dims: [ 8 ]", "")
        (folder / "config.pbtxt").write_text(text.replace('"EMBEDDING"', f'"{outputs or "EMBEDDING"}"'))
        assert main(["engines"]) == int(refused)
        return tmp_path / "build" / "repository" / "front"

    return make


@pytest.fixture
def pb_utils() -> PbUtils:
    return PbUtils()


@pytest.fixture
def opened(pb_utils: PbUtils) -> Iterator[Callable[..., LoraTextFront]]:
    """A function that starts the front of a folder; the fixture closes it, and checks that nothing is held."""
    started: list[LoraTextFront] = []

    def start(folder: Path, **parameters: object) -> LoraTextFront:
        front = as_served(QuickFront(pb_utils, model_args.read(args_of(folder, **parameters))))
        started.append(front)
        return front

    yield start
    for front in started:
        front.close()
        cache = front.adapters.cache
        cache.check_integrity()
        assert all(not one.users for one in cache.table.all()) and not cache.table.waiting


def asking(*rows: np.ndarray, adapter: str | None = None, output: str = "EMBEDDING", **parameters: Any) -> Request:
    named = {"lora_name": adapter} if adapter else {}
    return ids_request(*rows, outputs=(output,), parameters={**parameters, **named})  # type: ignore[arg-type]


@pytest.mark.parametrize("family", TARGETS)
@pytest.mark.parametrize("kind", few((ENCODER, CLASSIFIER), (ENCODER,)))
def test_packs_of_several_adapters_are_what_peft_computes(
    family: str, kind: str, tmp_path: Path, build: Callable[..., Path], opened: Callable[..., LoraTextFront]
) -> None:
    base = save_model(tmp_path / "base", family, kind, num_hidden_layers=2)
    output = "EMBEDDING" if kind == ENCODER else "LOGITS"
    front = opened(build(base, output))
    adapters = adapters_of(tmp_path / "adapters", base, family, kind)
    for adapter, folder in adapters.items():
        assert main(["adapters", "--model", "front", "add", adapter, str(folder)]) == 0
    wait_for(lambda: len(front.adapters.catalogue) == len(adapters))
    names: list[str | None] = [None, *adapters, "small", None]
    requests = [asking(*ROWS, adapter=name, output=output) for name in names]
    front.execute(requests)
    plain = computed_by_peft(base, None, ROWS, kind)
    for name, request in zip(names, requests, strict=True):
        expected = computed_by_peft(base, adapters.get(name or ""), ROWS, kind)
        np.testing.assert_allclose(request.vectors(output), expected, atol=1e-4, rtol=0, err_msg=str(name))
        assert name is None or np.abs(expected - plain).max() > 0.01, "the adapter changes the result"


_NEEDS_BF16 = pytest.mark.skipif(not hardware.cpu_has_bf16(), reason="needs a CPU that computes bf16")


@pytest.mark.parametrize("precision", [pytest.param("bf16", marks=_NEEDS_BF16), "int8"])
@pytest.mark.parametrize("kind", [ENCODER, CLASSIFIER])
def test_others_are_as_close_as_their_numbers_allow(
    kind: str, precision: str, tmp_path: Path, build: Callable[..., Path], opened: Callable[..., LoraTextFront]
) -> None:
    base = save_model(tmp_path / "base", "bert", kind, hidden_size=64, intermediate_size=128, num_labels=5)
    # The head's product of a vector has few numbers, whose errors do not even out.
    output, least = ("EMBEDDING", 0.99) if kind == ENCODER else ("LOGITS", 0.95)
    front = opened(build(base, output, precision=precision))
    adapters = adapters_of(tmp_path / "adapters", base, "bert", kind)
    for adapter, folder in adapters.items():
        assert main(["adapters", "--model", "front", "add", adapter, str(folder)]) == 0
    wait_for(lambda: len(front.adapters.catalogue) == len(adapters))
    requests = [asking(*ROWS, adapter=name, output=output) for name in adapters]
    front.execute(requests)
    for (name, folder), request in zip(adapters.items(), requests, strict=True):
        vectors, expected = request.vectors(output), computed_by_peft(base, folder, ROWS, kind)
        lengths = np.linalg.norm(vectors, axis=1) * np.linalg.norm(expected, axis=1)
        assert ((vectors * expected).sum(axis=1) / lengths).min() > least, name


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    return save_model(tmp_path / "base", "bert")


def refusal_of_adding(folder: Path, capsys: pytest.CaptureFixture[str], name: str = "refused") -> str:
    """What `shapeshift adapters add` says of an adapter that it refuses."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        sys.exit(main(["adapters", "--model", "front", "add", name, str(folder)]))
    assert stopped.value.code
    return capsys.readouterr().err


def test_adapters_come_and_go_while_the_front_serves(
    bert: Path, tmp_path: Path, build: Callable[..., Path], opened: Callable[..., LoraTextFront], pb_utils: PbUtils
) -> None:
    front = opened(build(bert))
    folders = adapters_of(tmp_path / "adapters", bert, "bert")

    def vectors(adapter: str | None) -> np.ndarray:
        front.execute([request := asking(*ROWS, adapter=adapter)])
        return request.vectors()

    def changed(*arguments: str) -> None:
        assert main(["adapters", "--model", "front", *arguments]) == 0

    changed("add", "mine", str(folders["small"]))
    wait_for(lambda: front.adapters.catalogue.has("mine"))
    np.testing.assert_allclose(vectors("mine"), computed_by_peft(bert, folders["small"], ROWS), atol=1e-4)
    assert json.loads(front.describe().as_json(front.args))["adapters"] == ["mine"]
    sha256 = front.adapters.catalogue.find("mine").sha256
    changed("add", "mine", str(folders["large"]), "--pin")
    wait_for(lambda: front.adapters.catalogue.find("mine").sha256 != sha256)
    np.testing.assert_allclose(vectors("mine"), computed_by_peft(bert, folders["large"], ROWS), atol=1e-4)
    changed("remove", "mine")
    wait_for(lambda: not front.adapters.catalogue.has("mine"))
    front.execute([request := asking(ROWS[0], adapter="mine")])
    assert request.refusal() == (TritonError.NOT_FOUND, "lora_name: no adapter 'mine'; known: none")
    np.testing.assert_allclose(vectors(None), computed_by_peft(bert, None, ROWS), atol=1e-4)
    front.export()
    assert pb_utils.metric("shapeshift_adapter_requests_total", adapter="mine") == 2
    assert pb_utils.metric("shapeshift_adapter_misses_total") >= 1


def test_more_adapters_than_memory_are_loaded_in_turn(
    tmp_path: Path, build: Callable[..., Path], opened: Callable[..., LoraTextFront]
) -> None:
    base = save_model(tmp_path / "base", "bert", hidden_size=64, intermediate_size=128)
    folder = build(base, adapter_mb=1)
    names = [f"tenant{number}" for number in range(8)]
    folders = {
        name: save_adapter(tmp_path / name, base, seed=seed, r=64, lora_alpha=64, target_modules=BERT)
        for seed, name in enumerate(names)
    }
    for name, source in folders.items():
        store.add(tmp_path / "build" / "adapters" / "front", name, source, pinned=False, base="")
    front = opened(folder)
    assert front.adapters.cache.max_elements < 8 * front.adapters.catalogue.find("tenant0").elements
    rounds = [asking(*ROWS, adapter=name) for _ in range(3) for name in names]
    front.execute(rounds)
    for name, request in zip(names * 3, rounds, strict=True):
        expected = computed_by_peft(base, folders[name], ROWS)
        np.testing.assert_allclose(request.vectors(), expected, atol=1e-4, err_msg=name)
    assert sum(counter.value for counter in front.adapters.cache.placement.evictions.values()) > 0


def test_bad_requests_are_refused_by_name(
    bert: Path, build: Callable[..., Path], opened: Callable[..., LoraTextFront]
) -> None:
    front = opened(build(bert))
    listed = ids_request(ROWS[0], parameters={"lora_name": ["a", "b"]})  # type: ignore[arg-type]
    odd, unknown = asking(ROWS[0], adapter="../x"), asking(ROWS[0], adapter="x")
    front.execute([listed, odd, unknown])
    code, text = listed.refusal()
    assert code == TritonError.INVALID_ARG and text.startswith(
        "parameter lora_name: got ['a', 'b']; a text of 1 to 256"
    )
    assert odd.refusal()[1].startswith("parameter lora_name: got '../x'; 1 to 128 letters")
    assert unknown.refusal() == (TritonError.NOT_FOUND, "lora_name: no adapter 'x'; known: none")


def test_a_model_without_adapters_says_which_have_them(
    bert: Path, build: Callable[..., Path], opened: Callable[..., LoraTextFront], pb_utils: PbUtils
) -> None:
    folder = build(bert)
    values = {**model_args.read(args_of(folder)).parameters}
    config = dataclasses.replace(
        model_args.read(args_of(folder)),
        parameters={name: value for name, value in values.items() if name not in settings.names(AdapterSettings)},
    )
    front = as_served(TextFront(pb_utils, config))
    try:
        front.execute([request := asking(ROWS[0], adapter="x")])
        code, text = request.refusal()
        assert code == TritonError.INVALID_ARG
        assert "lora_name is for models with adapters" in text and "provider native" in text
    finally:
        front.close()


def test_adapters_that_the_model_cannot_have_are_refused(
    bert: Path, tmp_path: Path, build: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    build(bert, max_rank=32)
    other = save_model(tmp_path / "other", "bert", hidden_size=32, intermediate_size=64)
    classifier = save_model(tmp_path / "classifier", "bert", CLASSIFIER)
    plain: dict[str, Any] = {"r": 4, "target_modules": ["query"]}
    cases = {
        "base_model_name_or_path: got": save_adapter(tmp_path / "a", other, **plain),
        "use_dora: got True; false over an encoder": save_adapter(tmp_path / "b", bert, use_dora=True, **plain),
        "bias: got 'all'": save_adapter(tmp_path / "c", bert, bias="all", **plain),
        "a rank of 1 to max_rank (32)": save_adapter(tmp_path / "d", bert, **{**plain, "r": 33}),
        "modules_to_save: got ['classifier', 'score']": save_adapter(tmp_path / "e", classifier, CLASSIFIER, **plain),
        "a LoRA factor of a linear in base_model.model.encoder.layer": save_adapter(
            tmp_path / "f", bert, r=4, target_modules=["word_embeddings"]
        ),
    }
    for said, folder in cases.items():
        assert said in refusal_of_adding(folder, capsys)
    renamed = tmp_path / "a" / "adapter_config.json"
    renamed.write_text(json.dumps({**json.loads(renamed.read_text()), "base_model_name_or_path": "base"}))
    assert "shape must be (rank, 16)" in refusal_of_adding(tmp_path / "a", capsys)


def test_a_head_of_other_labels_is_refused(
    tmp_path: Path, build: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    base = save_model(tmp_path / "base", "bert", CLASSIFIER, num_labels=2)
    other = save_model(tmp_path / "elsewhere" / "base", "bert", CLASSIFIER, num_labels=3)
    build(base, "LOGITS")
    folder = save_adapter(tmp_path / "a", other, CLASSIFIER, r=4, target_modules=["query"])
    config = folder / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": "base"}))
    said = refusal_of_adding(folder, capsys)
    assert "classifier.weight: got (3, 16); shape must be (2, 16): labels as the base model has them" in said


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"provider": "openvino"}, "provider: got 'openvino'; native, or auto"),
        ({"placement": "resident"}, "placement: got 'resident'; inline, or auto"),
        ({"adapter_mb": 0}, "adapter_mb: got 0; 1 to 1048576"),
        ({"scheduler": "fifo"}, "scheduler"),
        ({"eviction": "oldest"}, "eviction: got 'oldest'"),
    ],
)
def test_settings_that_do_not_go_with_adapters_are_refused(
    parameters: dict[str, object], said: str, bert: Path, build: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    build(bert, refused=True, **parameters)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("family", ["albert", "deberta-v2"])
def test_some_families_take_no_adapters(
    family: str, tmp_path: Path, build: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    build(save_model(tmp_path / "base", family), refused=True)
    assert "adapter_mb: no adapters over DeBERTa, or over ALBERT, whose layers share weights" in capsys.readouterr().err


def test_an_adapter_is_fetched_on_first_use(
    bert: Path, tmp_path: Path, build: Callable[..., Path], opened: Callable[..., LoraTextFront]
) -> None:
    source = save_adapter(tmp_path / "shelf" / "mine", bert, r=4, target_modules=["query"])
    front = opened(build(bert, adapter_sources=tmp_path / "shelf"))
    requests = [asking(*ROWS, adapter=name) for name in ("mine", "absent", "mine")]
    front.execute(requests)
    code, text = requests[1].refusal()
    assert code == TritonError.NOT_FOUND and text.startswith("lora_name: no adapter 'absent'")
    for request in (requests[0], requests[2]):
        np.testing.assert_allclose(request.vectors(), computed_by_peft(bert, source, ROWS), atol=1e-4)


def test_each_token_has_the_labels_of_its_adapter(
    tmp_path: Path, build: Callable[..., Path], opened: Callable[..., LoraTextFront]
) -> None:
    base = save_model(tmp_path / "base", "bert", TAGGER)
    front = opened(build(base, "TOKEN_LOGITS"))
    folders: dict[str, Path] = {}
    for seed, name in enumerate(("one", "other")):
        folders[name] = save_adapter(tmp_path / name, base, TAGGER, seed, r=4, lora_alpha=8, target_modules=BERT)
        assert main(["adapters", "--model", "front", "add", name, str(folders[name])]) == 0
    wait_for(lambda: len(front.adapters.catalogue) == 2)
    asked_for: list[str | None] = ["one", None, "other", "one"]
    requests = [asking(*ROWS, adapter=adapter, output="TOKEN_LOGITS") for adapter in asked_for]
    front.execute(requests)
    for adapter, request in zip(asked_for, requests, strict=True):
        for row, logits in zip(ROWS, request.vectors("TOKEN_LOGITS"), strict=True):
            (expected,) = computed_by_peft(base, folders.get(adapter or ""), [row], TAGGER)
            np.testing.assert_allclose(logits[: len(row)], expected, atol=1e-4, rtol=0)


def test_an_adapter_of_sentence_transformers_gives_its_vectors(
    tmp_path: Path, build: Callable[..., Path], opened: Callable[..., LoraTextFront]
) -> None:
    import torch
    from peft import LoraConfig
    from sentence_transformers import SentenceTransformer

    base = save_modules(save_model(tmp_path / "base", "bert"))
    model = SentenceTransformer(str(base), device="cpu")
    model.add_adapter(LoraConfig(task_type="FEATURE_EXTRACTION", r=4, lora_alpha=8, target_modules=BERT))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(str(tmp_path / "adapted"))
    front = opened(build(base, pooling="auto"))
    assert main(["adapters", "--model", "front", "add", "mine", str(tmp_path / "adapted")]) == 0
    wait_for(lambda: front.adapters.catalogue.has("mine"))
    texts = ("w1 w2 w3", "w9", "w5 w5 w7 w1")
    request = text_request(*texts, parameters={"lora_name": "mine"})
    front.execute([request])
    np.testing.assert_allclose(request.vectors(), model.encode(list(texts), batch_size=1), atol=1e-4)
