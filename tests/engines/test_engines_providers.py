"""Engines of ONNX Runtime, compared with the reference. test_engines_families has those of OpenVINO."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shapeshift.engines.checkpoint import open_checkpoint
from shapeshift.engines.text.sentence_modules import SentenceModules
from shapeshift.engines.verify import compare
from tests.engines.families import VOCABULARY, outputs_of_engines, save_model

LENGTHS = [5, 1, 17, 9, 3]


@pytest.mark.parametrize(
    ("family", "pooling", "normalize", "offset"),
    [("bert", "cls", True, 0), ("roberta", "max", False, 2), ("deberta-v2", "mean", False, 0)],
)
def test_engines_match_the_model(tmp_path: Path, family: str, pooling: str, normalize: bool, offset: int) -> None:
    from shapeshift.engines.text.reference_model import ReferenceModel

    folder = save_model(tmp_path / "model", family)
    reference = ReferenceModel(open_checkpoint(folder), SentenceModules((pooling,), normalize))
    assert reference.packs_rows is (family != "deberta-v2")
    assert reference.position_offset == offset
    assert reference.max_tokens == 64 - offset
    rng = np.random.default_rng(0)
    texts = [rng.integers(3, VOCABULARY, length, dtype=np.int64) for length in LENGTHS]
    wanted = np.stack([reference.compute(text)["EMBEDDING"] for text in texts])
    for found in outputs_of_engines(reference, texts, tmp_path, "onnxruntime"):
        deviation = compare(np.stack([own["EMBEDDING"] for own in found]), wanted)
        assert deviation.min_cosine > 0.99999 and deviation.max_error < 1e-4
