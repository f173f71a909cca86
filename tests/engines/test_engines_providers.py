"""Real engines of a tiny random transformer, compared with transformers."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shapeshift.engines.checkpoint import open_checkpoint
from shapeshift.engines.providers import lookup
from shapeshift.engines.text.packing import pack
from shapeshift.engines.verify import compare

TOKENS = 48
LENGTHS = [5, 1, 17, 9, 3]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of a BERT, a RoBERTa and a DistilBERT of two layers with random weights."""
    import torch
    import transformers

    size: dict[str, Any] = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    others: dict[str, Any] = {"intermediate_size": 64, "max_position_embeddings": 64}
    configs = {
        "bert": transformers.BertConfig(**size, **others),
        "roberta": transformers.RobertaConfig(**size, **others, pad_token_id=1),
        "distilbert": transformers.DistilBertConfig(
            vocab_size=99, dim=32, n_layers=2, n_heads=4, hidden_dim=64, max_position_embeddings=64
        ),
    }
    made = {}
    for name, config in configs.items():
        torch.manual_seed(1)
        folder = tmp_path_factory.mktemp(name)
        transformers.AutoModel.from_config(config).save_pretrained(folder)
        (folder / "tokenizer.json").write_text("{}")
        values = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({"hidden_size": 32, **values}))
        made[name] = folder
    return made


@pytest.mark.parametrize(
    ("provider", "family", "pooling", "normalize"),
    [
        ("openvino", "bert", "mean", True),
        ("openvino", "roberta", "cls", False),
        ("openvino", "distilbert", "mean", True),
        ("onnxruntime", "bert", "cls", True),
        ("onnxruntime", "distilbert", "mean", False),
    ],
)
def test_engines_match_the_model(
    checkpoints: dict[str, Path], tmp_path: Path, provider: str, family: str, pooling: str, normalize: bool
) -> None:
    from shapeshift.engines.text.reference_model import ReferenceModel

    reference = ReferenceModel(open_checkpoint(checkpoints[family]), pooling, normalize)
    packs = reference.packs_rows
    assert packs is (family != "distilbert")
    assert reference.position_offset == (2 if family == "roberta" else 0)
    assert reference.max_tokens == 64 - reference.position_offset
    rng = np.random.default_rng(0)
    texts = [rng.integers(3, 99, length, dtype=np.int64) for length in LENGTHS]
    wanted = np.stack([reference.compute(text)["EMBEDDING"] for text in texts])

    made: Any = lookup.PROVIDERS[provider]
    example = pack([np.arange(3, 12), np.arange(3, 10)][: 2 if packs else 1], 20, 2 if packs else 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for file in made.export(reference.module(packs), example, tmp_path, "f32"):
            assert (tmp_path / file).is_file()
    rows = 8 if packs else 1
    assert (tmp_path / made.compile(tmp_path, "f32", TOKENS, rows)).is_file()
    runtime = made.open(tmp_path, "f32", threads=1)
    for engine in (runtime.engine(None, None), runtime.engine(TOKENS, rows)):
        groups = [[0, 1, 2, 3, 4]] if packs else [[index] for index in range(5)]
        for group in groups:
            own = [texts[index] for index in group]
            length = engine.tokens or sum(map(len, own))
            outputs = engine.run(pack(own, length, engine.rows or len(own), reference.position_offset))
            got = outputs["EMBEDDING"][: len(own)]
            deviation = compare(got, wanted[group])
            assert deviation.min_cosine > 0.99999 and deviation.max_error < 1e-4, (engine.tokens, group)
