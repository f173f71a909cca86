"""LOGITS and IMPORTANCE of real engines of tiny random classifiers, compared with transformers."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shapeshift.engines.checkpoint import open_checkpoint
from shapeshift.engines.providers import lookup
from shapeshift.engines.text import heads
from shapeshift.engines.text.packing import pack, unpack
from shapeshift.errors import InvalidInputError

LENGTHS = [5, 2, 17, 9, 3]
VOCABULARY = 99


@pytest.fixture(scope="module")
def classifiers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of classifiers with three labels (`regression`: one number) and random weights."""
    import torch
    import transformers

    size: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    }
    labels: dict[str, Any] = {"num_labels": 3}
    others: dict[str, Any] = {"intermediate_size": 64, "max_position_embeddings": 64, **labels}
    configs = {
        "bert": transformers.BertConfig(**size, **others),
        "regression": transformers.BertConfig(**size, **{**others, "num_labels": 1}),
        "roberta": transformers.RobertaConfig(**size, **others, pad_token_id=1, type_vocab_size=1),
        "distilbert": transformers.DistilBertConfig(
            vocab_size=VOCABULARY,
            dim=32,
            n_layers=2,
            n_heads=4,
            hidden_dim=64,
            max_position_embeddings=64,
            **labels,
        ),
    }
    made = {}
    for name, config in configs.items():
        torch.manual_seed(1)
        folder = tmp_path_factory.mktemp(name)
        model = transformers.AutoModelForSequenceClassification.from_config(config)
        # As they are drawn, the weights are too small for attention to prefer anything.
        for weight in model.parameters():
            weight.data *= 4 if weight.ndim > 1 else 1
        model.save_pretrained(folder)
        (folder / "tokenizer.json").write_text("{}")
        values = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({"hidden_size": 32, **values}))
        made[name] = folder
    return made


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

    reference = ReferenceModel(open_checkpoint(classifiers[family]), "mean", True, outputs, pairs=pairs)
    # Only BERT of these knows token types.
    assert reference.type_stride == (VOCABULARY if pairs and family == "bert" else 0)
    packs = reference.packs_rows
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

    made: Any = lookup.PROVIDERS[provider]
    example = pack(
        typed[2:4] if packs else typed[3:4], 30 if packs else 10, 2 if packs else 1, reference.position_offset
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.export(reference.module(packs), example, tmp_path, "f32")
    rows = 8 if packs else 1
    made.compile(tmp_path, "f32", 48, rows)
    runtime = made.open(tmp_path, "f32", threads=1)
    for engine in (runtime.engine(None, None), runtime.engine(48, rows)):
        for group in [[0, 1, 2, 3, 4]] if packs else [[index] for index in range(5)]:
            own_texts = [typed[index] for index in group]
            length = engine.tokens or sum(map(len, own_texts))
            slots = engine.rows or len(group)
            got = unpack(engine.run(pack(own_texts, length, slots, reference.position_offset)), own_texts)
            assert set(got) == set(outputs)
            for place, index in enumerate(group):
                np.testing.assert_allclose(got["LOGITS"][place], wanted[index]["LOGITS"], rtol=1e-3, atol=1e-4)
                if "IMPORTANCE" in got:
                    received = got["IMPORTANCE"][place]
                    np.testing.assert_allclose(
                        received[: LENGTHS[index]], wanted[index]["IMPORTANCE"], rtol=1e-3, atol=1e-4
                    )
                    assert not received[LENGTHS[index] :].any()


def test_first_layers_with_a_separate_head(classifiers: dict[str, Path], tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    from shapeshift.engines.text.reference_model import ReferenceModel

    rng = np.random.default_rng(3)
    weight, bias = rng.normal(size=(2, 32)).astype(np.float16), np.ones(2, np.float16)
    file = tmp_path / "head.safetensors"
    save_file({"weight": weight, "bias": bias}, file, metadata={"labels": '["no", "yes"]'})
    assert heads.head_labels(file) == ("no", "yes")
    checkpoint = open_checkpoint(classifiers["bert"])
    shallow = ReferenceModel(checkpoint, "mean", True, ("EMBEDDING", "LOGITS", "IMPORTANCE"), 1, file)
    ids = np.arange(3, 12)
    found = shallow.compute(ids)
    np.testing.assert_allclose(found["LOGITS"], weight.astype(np.float32) @ found["EMBEDDING"] + 1, rtol=1e-4)
    one_layer = by_transformers(classifiers["bert"], ids, None, layers=1)
    np.testing.assert_allclose(found["IMPORTANCE"], one_layer["IMPORTANCE"], rtol=1e-4)
    # Each query of each head gives 1 in all.
    assert found["IMPORTANCE"].sum() == pytest.approx(4 * len(ids), rel=1e-5)
    with pytest.raises(InvalidInputError, match="at most 3"):
        ReferenceModel(checkpoint, "mean", True, ("EMBEDDING",), 4)


def test_a_checkpoint_without_a_head_has_no_logits(classifiers: dict[str, Path], tmp_path: Path) -> None:
    import transformers

    from shapeshift.engines.text.reference_model import ReferenceModel

    transformers.AutoModel.from_pretrained(classifiers["bert"]).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidInputError, match=r"head.*classifier"):
        ReferenceModel(open_checkpoint(tmp_path), "mean", True, ("LOGITS",))


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
    assert heads.config_labels({"id2label": {"10": "k", "2": "c", "0": "a"}}) == ("a", "c", "k")
    assert heads.config_labels({}) == ("LABEL_0", "LABEL_1")
