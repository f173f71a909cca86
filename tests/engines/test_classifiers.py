"""What makes scores of a classifier's logits, beside transformers and sentence-transformers themselves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from shapeshift.engines.text.classifiers import activation, is_cross_encoder
from shapeshift.engines.text.sentence_modules import SentenceModules
from shapeshift.errors import InvalidInputError, UnsupportedError

LOGITS = torch.tensor([0.3, -1.2, 2.0])
FUNCTIONS = {"identity": lambda x: x, "sigmoid": torch.sigmoid, "softmax": lambda x: torch.softmax(x, -1)}
OLD, NEW = "sbert_ce_default_activation_function", "sentence_transformers"
PATH = "torch.nn.modules.activation.Sigmoid"
IDENTITY = "torch.nn.modules.linear.Identity"


@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize(
    "problem", [None, "regression", "multi_label_classification", "single_label_classification"], ids=str
)
def test_a_classifier_is_read_as_the_pipeline_of_transformers_reads_it(labels: int, problem: str | None) -> None:
    import transformers

    stated: dict[str, Any] = {"problem_type": problem, "num_labels": labels}
    try:
        config = transformers.BertConfig(**stated)
    except Exception:  # noqa: BLE001  the library has an exception of its own for an invalid configuration
        with pytest.raises(InvalidInputError, match="problem_type: got 'single_label_classification'; one of multi"):
            activation(stated, SentenceModules(), labels)
        return
    pipeline: Any = SimpleNamespace(model=SimpleNamespace(config=config))
    rows = transformers.TextClassificationPipeline.postprocess(
        pipeline, {"logits": [LOGITS[:labels]]}, top_k=None, _legacy=False
    )
    wanted = [row["score"] for row in sorted(rows, key=lambda row: str(row["label"]))]
    found = FUNCTIONS[activation(stated, SentenceModules(), labels)](LOGITS[:labels])
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert not is_cross_encoder(stated, SentenceModules())


@pytest.mark.parametrize(
    ("config", "in_file"),
    [
        ({OLD: IDENTITY}, ""),
        ({OLD: PATH}, ""),
        ({NEW: {"activation_fn": IDENTITY, "version": "4.0.1"}}, ""),
        ({NEW: {"activation_fn": PATH}, OLD: IDENTITY}, ""),
        ({NEW: {"activation_fn": IDENTITY}}, PATH),
        ({"problem_type": "regression"}, PATH),
        # It runs no code of others, and falls back to its default.
        ({OLD: "somebody.Own", "problem_type": "regression"}, ""),
    ],
)
def test_a_cross_encoder_is_read_as_sentence_transformers_reads_it(config: dict[str, Any], in_file: str) -> None:
    from sentence_transformers import CrossEncoder

    library: Any = SimpleNamespace(
        config=SimpleNamespace(**config), num_labels=1, activation_fn=None, trust_remote_code=False
    )
    for name in ("_resolve_activation_fn", "get_default_activation_fn"):
        setattr(library, name, getattr(CrossEncoder, name).__get__(library))
    function = library._resolve_activation_fn(in_file) if in_file else library.get_default_activation_fn()
    modules = SentenceModules(cross_encoder=bool(in_file), activation=in_file)
    assert is_cross_encoder(config, modules)
    torch.testing.assert_close(FUNCTIONS[activation(config, modules, 1)](LOGITS), function(LOGITS))


def test_several_labels_of_a_cross_encoder_are_probabilities_unless_it_says_otherwise() -> None:
    assert activation({OLD: IDENTITY}, SentenceModules(cross_encoder=True), 3) == "softmax"
    assert activation({OLD: PATH}, SentenceModules(), 3) == "sigmoid"


def test_another_function_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="Tanh is not served; served are Identity, Sigmoid, Softmax"):
        activation({OLD: "torch.nn.modules.activation.Tanh"}, SentenceModules(), 1)
