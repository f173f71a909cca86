"""What a checkpoint says of the answers of its classifier, by the rules of the libraries that write it.

These are transformers' TextClassificationPipeline and sentence-transformers' CrossEncoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shapeshift.engines.text.sentence_modules import SentenceModules
from shapeshift.errors import InvalidInputError, UnsupportedError
from shapeshift.serving.description import IDENTITY, SIGMOID, SOFTMAX

_SINGLE_LABEL, _MULTI_LABEL, _REGRESSION = (
    "single_label_classification",
    "multi_label_classification",
    "regression",
)
_OF_CLASSES = {"Identity": IDENTITY, "Sigmoid": SIGMOID, "Softmax": SOFTMAX}
# The key of config.json before version 4 of sentence-transformers, and after.
_OLD_KEY, _SECTION, _KEY = "sbert_ce_default_activation_function", "sentence_transformers", "activation_fn"


def is_cross_encoder(config: Mapping[str, Any], modules: SentenceModules) -> bool:
    """Whether the files say that rows are pairs of texts; config: the checkpoint's config.json."""
    return modules.cross_encoder or bool(_stated(config, modules))


def activation(config: Mapping[str, Any], modules: SentenceModules, labels: int) -> str:
    """The function that makes scores of the logits of so many labels: IDENTITY, SIGMOID or SOFTMAX.

    Raises UnsupportedError for another function, InvalidInputError for a problem_type that transformers refuses.
    """
    class_name = _stated(config, modules)
    # sentence-transformers runs no code that is not torch's, and takes its default instead.
    if class_name.startswith("torch."):
        function = _OF_CLASSES.get(class_name.rpartition(".")[2])
        if function is None:
            raise UnsupportedError(
                f"{_KEY}: {class_name} is not served; served are {', '.join(_OF_CLASSES)} of torch.nn"
            )
        # Identity of several labels is what it writes where nobody chose.
        if function != IDENTITY or labels == 1:
            return function
    problem = config.get("problem_type")
    allowed = [_MULTI_LABEL, _REGRESSION, *([_SINGLE_LABEL] if labels > 1 else [])]
    if problem is not None and problem not in allowed:
        raise InvalidInputError("problem_type", problem, f"one of {', '.join(allowed)} for {labels} labels")
    if problem == _REGRESSION and not is_cross_encoder(config, modules):
        return IDENTITY
    return SIGMOID if problem == _MULTI_LABEL or labels == 1 else SOFTMAX


def _stated(config: Mapping[str, Any], modules: SentenceModules) -> str:
    section = config.get(_SECTION)
    in_section = section.get(_KEY) if isinstance(section, dict) else None
    return str(modules.activation or in_section or config.get(_OLD_KEY) or "")
