"""LOGITS and IMPORTANCE of real engines of tiny random classifiers, compared with transformers."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from shapeshift.engines.checkpoint import open_checkpoint
from shapeshift.engines.interfaces import Array
from shapeshift.engines.text import heads
from shapeshift.engines.text.sentence_modules import SentenceModules
from shapeshift.errors import InvalidInputError, UnsupportedError
from tests.engines.families import VOCABULARY, outputs_of_engines, save_model

LENGTHS = [5, 2, 17, 9, 3]
MODULES = SentenceModules(("mean",), normalize=True)


@pytest.fixture(scope="module")
def classifiers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of classifiers with three labels (`regression`: one number) and random weights."""
    task = "AutoModelForSequenceClassification"
    kinds = {"bert": ("bert", 3), "regression": ("bert", 1), "roberta": ("roberta", 3), "distilbert": ("distilbert", 3)}
    return {
        name: save_model(tmp_path_factory.mktemp(name), family, task, num_labels=labels, num_hidden_layers=2)
        for name, (family, labels) in kinds.items()
    }


def by_transformers(folder: Path, ids: np.ndarray, types: np.ndarray | None, layers: int = 0) -> dict[str, np.ndarray]:
    """Logits and importance computed by transformers."""
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    config.num_hidden_layers = layers or config.num_hidden_layers
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, config=config, attn_implementation="eager"
    ).eval()
    kinds = {} if types is None else {"token_type_ids": torch.from_numpy(types)[None]}
    with torch.inference_mode():
        found = model(torch.from_numpy(ids)[None], output_attentions=True, **kinds)
    received = sum(layer[0].sum(dim=(0, 1)) for layer in found.attentions)
    return {"LOGITS": found.logits[0].numpy(), "IMPORTANCE": received.numpy()}


@pytest.mark.parametrize(
    ("provider", "family", "outputs", "pairs"),
    [
        ("openvino", "bert", ("LOGITS", "IMPORTANCE", "EMBEDDING"), True),
        ("openvino", "roberta", ("LOGITS",), True),
        ("openvino", "distilbert", ("IMPORTANCE", "LOGITS"), False),
        ("openvino", "regression", ("LOGITS",), False),
        ("onnxruntime", "bert", ("IMPORTANCE", "LOGITS"), True),
        ("onnxruntime", "distilbert", ("LOGITS", "EMBEDDING"), False),
    ],
)
def test_engines_classify_like_the_checkpoint(
    classifiers: dict[str, Path], tmp_path: Path, provider: str, family: str, outputs: tuple[str, ...], pairs: bool
) -> None:
    from shapeshift.engines.text.reference_model import ReferenceModel

    reference = ReferenceModel(open_checkpoint(classifiers[family]), MODULES, outputs, pairs=pairs)
    # Only BERT of these knows token types.
    assert reference.type_stride == (VOCABULARY if pairs and family == "bert" else 0)
    rng = np.random.default_rng(0)
    texts = [rng.integers(3, VOCABULARY, length, dtype=np.int64) for length in LENGTHS]
    types = [
        (np.arange(len(text)) > len(text) // 2).astype(np.int64) if reference.type_stride else None for text in texts
    ]
    wanted = [by_transformers(classifiers[family], text, kind) for text, kind in zip(texts, types, strict=True)]
    typed = [text if kind is None else text + kind * VOCABULARY for text, kind in zip(texts, types, strict=True)]
    for ids, own in zip(typed, wanted, strict=True):
        computed = reference.compute(ids)
        assert set(computed) == set(outputs)
        for name in set(outputs) & set(own):
            np.testing.assert_allclose(computed[name], own[name], rtol=1e-4, atol=1e-5)
    for found in outputs_of_engines(reference, typed, tmp_path, provider):
        for index, own in enumerate(found):
            assert set(own) == set(outputs)
            np.testing.assert_allclose(own["LOGITS"], wanted[index]["LOGITS"], rtol=1e-3, atol=1e-4)
            if "IMPORTANCE" in own:
                received = own["IMPORTANCE"]
                np.testing.assert_allclose(
                    received[: LENGTHS[index]], wanted[index]["IMPORTANCE"], rtol=1e-3, atol=1e-4
                )
                assert not received[LENGTHS[index] :].any()


def test_first_layers_with_a_separate_head(classifiers: dict[str, Path], tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    from shapeshift.engines.text.reference_model import ReferenceModel

    rng = np.random.default_rng(3)
    weight, bias = rng.normal(size=(2, 16)).astype(np.float16), np.ones(2, np.float16)
    file = tmp_path / "head.safetensors"
    save_file({"weight": weight, "bias": bias}, file, metadata={"labels": '["no", "yes"]'})
    assert heads.head_labels(file) == ("no", "yes")
    checkpoint = open_checkpoint(classifiers["bert"])
    shallow = ReferenceModel(checkpoint, MODULES, ("EMBEDDING", "LOGITS", "IMPORTANCE"), 1, file)
    ids = np.arange(3, 12)
    found = shallow.compute(ids)
    np.testing.assert_allclose(found["LOGITS"], weight.astype(np.float32) @ found["EMBEDDING"] + 1, rtol=1e-4)
    one_layer = by_transformers(classifiers["bert"], ids, None, layers=1)
    np.testing.assert_allclose(found["IMPORTANCE"], one_layer["IMPORTANCE"], rtol=1e-4)
    # Each query of each head gives 1 in all.
    assert found["IMPORTANCE"].sum() == pytest.approx(2 * len(ids), rel=1e-5)
    with pytest.raises(InvalidInputError, match="at most 2"):
        ReferenceModel(checkpoint, MODULES, ("EMBEDDING",), 3)


QUERY, DENSE = "encoder.layer.0.attention.self.query", "encoder.layer.0.output.dense"


def update(outputs: int, inputs: int, rank: int = 3) -> dict[str, Array]:
    """The two matrices of an update."""
    rng = np.random.default_rng(outputs + inputs)
    return {".lora_A": rng.normal(size=(rank, inputs)), ".lora_B": rng.normal(size=(outputs, rank))}


def write_head(file: Path, **updates: dict[str, Array]) -> Path:
    """A head of two labels with these updates, in f16; the file."""
    from safetensors.numpy import save_file

    tensors = {"weight": np.ones((2, 16)), "bias": np.ones(2)}
    tensors |= {layer + part: values for layer, parts in updates.items() for part, values in parts.items()}
    save_file({name: values.astype(np.float16) for name, values in tensors.items()}, file)
    return file


def test_a_head_changes_the_layers_that_it_has_updates_of(classifiers: dict[str, Path], tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    from shapeshift.engines.text.reference_model import ReferenceModel

    query, dense = update(16, 16), update(16, 32)
    ids = np.arange(3, 12)
    plain, updated = (
        ReferenceModel(open_checkpoint(classifiers["bert"]), MODULES, ("EMBEDDING", "LOGITS"), 1, file)
        for file in (
            write_head(tmp_path / "plain.safetensors"),
            write_head(tmp_path / "updated.safetensors", **{QUERY: query, DENSE: dense}),
        )
    )
    merged = tmp_path / "merged"
    shutil.copytree(classifiers["bert"], merged)
    tensors = load_file(merged / "model.safetensors")
    for layer, parts in ((QUERY, query), (DENSE, dense)):
        low, high = (parts[name].astype(np.float16).astype(np.float32) for name in (".lora_A", ".lora_B"))
        tensors[f"bert.{layer}.weight"] += high @ low
    save_file(tensors, merged / "model.safetensors", metadata={"format": "pt"})
    head = tmp_path / "plain.safetensors"
    expected = ReferenceModel(open_checkpoint(merged), MODULES, ("EMBEDDING", "LOGITS"), 1, head).compute(ids)
    for name, values in expected.items():
        np.testing.assert_allclose(updated.compute(ids)[name], values, rtol=1e-4, atol=1e-5)
        assert np.abs(plain.compute(ids)[name] - values).max() > 1e-2


@pytest.mark.parametrize(
    ("layer", "parts"),
    [
        ("encoder.layer.1.output.dense", update(16, 32)),
        ("encoder.layer.0.output.LayerNorm", update(16, 16)),
        (QUERY, update(16, 32)),
        (QUERY, {".lora_A": np.ones((3, 16))}),
        (QUERY, {".lora_A": np.ones((3, 16)), ".lora_B": np.ones((16, 4))}),
    ],
    ids=["a layer left out", "not linear", "another size", "half of it", "two ranks"],
)
def test_updates_that_fit_no_layer_are_rejected(
    classifiers: dict[str, Path], tmp_path: Path, layer: str, parts: dict[str, Array]
) -> None:
    from shapeshift.engines.text.reference_model import ReferenceModel

    head = write_head(tmp_path / "head.safetensors", **{layer: parts})
    with pytest.raises(InvalidInputError, match=layer):
        ReferenceModel(open_checkpoint(classifiers["bert"]), MODULES, ("LOGITS",), 1, head)


def test_a_checkpoint_without_a_head_has_no_logits(classifiers: dict[str, Path], tmp_path: Path) -> None:
    import transformers

    from shapeshift.engines.text.reference_model import ReferenceModel

    transformers.AutoModel.from_pretrained(classifiers["bert"]).save_pretrained(tmp_path)
    shutil.copyfile(classifiers["bert"] / "tokenizer.json", tmp_path / "tokenizer.json")
    with pytest.raises(InvalidInputError, match=r"head.*classifier"):
        ReferenceModel(open_checkpoint(tmp_path), MODULES, ("LOGITS",))


@pytest.mark.parametrize(
    ("name", "refused"),
    [
        # Relative positions, which transformers computed before version 5.
        ("bert.encoder.layer.0.attention.self.distance_embedding.weight", True),
        ("bert.embeddings.further.weight", True),
        ("bert.embeddings.place_ids", False),
        ("bert.pooler.further.weight", False),
        ("bert.encoder.layer.7.output.dense.weight", False),
        ("cls.predictions.decoder.weight", False),
    ],
)
def test_weights_that_transformers_leaves_out_are_refused(
    classifiers: dict[str, Path], tmp_path: Path, name: str, refused: bool
) -> None:
    from safetensors.numpy import load_file, save_file

    from shapeshift.engines.text.reference_model import ReferenceModel

    shutil.copytree(classifiers["bert"], tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    further = np.ones((4, 4), np.int64 if name.endswith("_ids") else np.float32)
    save_file({**load_file(file), name: further}, file, metadata={"format": "pt"})
    with pytest.raises(UnsupportedError, match=f"{name}, which the BertModel of") if refused else nullcontext():
        ReferenceModel(open_checkpoint(tmp_path), MODULES)


def test_invalid_heads_are_rejected(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    file = tmp_path / "head.safetensors"
    file.write_text("nothing")
    with pytest.raises(InvalidInputError, match="safetensors"):
        heads.read_head(file)
    weight, bias = np.ones((2, 3)), np.ones(2)
    for tensors in (
        {"weight": weight},
        {"weight": weight, "bias": np.ones(3)},
        {"weight": weight * np.inf, "bias": bias},
    ):
        save_file(tensors, file)
        with pytest.raises(InvalidInputError, match="head"):
            heads.read_head(file)
    save_file({"weight": np.ones((2, 3)), "bias": np.ones(2)}, file)
    assert heads.head_labels(file) == ("LABEL_0", "LABEL_1")
    save_file({"weight": np.ones((2, 3)), "bias": np.ones(2)}, file, metadata={"labels": '["a"]'})
    with pytest.raises(InvalidInputError, match="1 labels"):
        heads.head_labels(file)


def test_labels_of_a_configuration() -> None:
    twelve = {str(index): f"name {index}" for index in reversed(range(12))}
    assert heads.config_labels({"id2label": twelve}) == tuple(f"name {index}" for index in range(12))
    assert heads.config_labels({}) == ("LABEL_0", "LABEL_1")
    for given, missing in (({"0": "a", "2": "c"}, 1), ({"one": "a"}, 0)):
        with pytest.raises(
            InvalidInputError, match=f"id2label: .*a name for each id from 0 in config.json; {missing} is missing"
        ):
            heads.config_labels({"id2label": given})
