"""Heads of classifiers: from pooled or token vectors to logits. A serving process does not import it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from shapeshift.engines.text import heads
from shapeshift.errors import InvalidInputError


class LinearHead(nn.Module):
    """Logits of a pooled vector: weight [labels, hidden], bias [labels]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(weight.shape[1], weight.shape[0])
        self.linear.load_state_dict({"weight": weight, "bias": bias})

    def forward(self, pooled: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] to [rows, labels]."""
        return torch.as_tensor(self.linear(pooled))


LATE = "late"
"""The pooling of a head over the vectors of single tokens: the logits of a row are the mean of its tokens'."""


class SequenceHead(nn.Module):
    """The head of a sequence-classification checkpoint, over one vector for each row. `pooling` says which."""

    def __init__(self, pooling: str, *steps: nn.Module) -> None:
        super().__init__()
        self.pooling = pooling
        self.steps = nn.Sequential(*steps)

    def forward(self, pooled: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] to [rows, labels]."""
        # transformers' heads select the first of a row's tokens: each row is a sequence of one.
        return torch.as_tensor(self.steps(pooled.unsqueeze(1)))


class _First(nn.Module):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens[:, 0]


_SEQUENCE_HEADS: dict[str, Callable[[Any], SequenceHead]] = {
    "bert": lambda model: SequenceHead("cls", model.bert.pooler, model.classifier),
    "distilbert": lambda model: SequenceHead("cls", _First(), model.pre_classifier, nn.ReLU(), model.classifier),
    "albert": lambda model: SequenceHead(
        "cls", _First(), model.albert.pooler, model.albert.pooler_activation, model.classifier
    ),
    "deberta-v2": lambda model: SequenceHead("cls", model.pooler, model.classifier),
    "modernbert": lambda model: SequenceHead(model.config.classifier_pooling, _First(), model.head, model.classifier),
    "eurobert": lambda model: SequenceHead(
        {"bos": "cls"}.get(model.config.classifier_pooling, model.config.classifier_pooling),
        _First(),
        model.dense,
        model.activation,
        model.classifier,
    ),
    "nomic_bert": lambda model: SequenceHead("cls", model.nomic_bert.pooler, model.classifier),
    "gte": lambda model: SequenceHead("cls", model.gte.pooler, model.classifier),
    **dict.fromkeys(("llama", "qwen2", "qwen3"), lambda model: SequenceHead("lasttoken", _First(), model.score)),
}


def sequence_head(model: Any) -> SequenceHead:
    """The head of a transformers model for sequence classification of one of FAMILIES."""
    make = _SEQUENCE_HEADS.get(model.config.model_type)
    # The classifiers of RoBERTa, MPNet and ELECTRA pool themselves.
    return make(model) if make else SequenceHead("cls", model.classifier)


def token_head(model: Any) -> nn.Module:
    """The head of a transformers model for token classification: [1, tokens, hidden] to [1, tokens, labels]."""
    if model.config.model_type == "modernbert":
        return nn.Sequential(model.head, model.classifier)
    return model.score if hasattr(model, "score") else model.classifier  # type: ignore[no-any-return]


def answer_head(model: Any, answers: Sequence[int]) -> SequenceHead:
    """The logit of the first token of `answers` behind the last one of a text, less that of the second, if any."""
    layer = model.get_output_embeddings()
    rows = layer.weight.detach()[list(answers)]
    linear = nn.Linear(rows.shape[1], 1, bias=False)
    linear.weight.data = rows[:1] - rows[1:] if len(answers) > 1 else rows.clone()
    return SequenceHead("lasttoken", _First(), linear)


_LANGUAGE_HEADS: dict[str, Callable[[Any], nn.Module]] = {
    **dict.fromkeys(("bert", "deberta-v2", "nomic_bert"), lambda model: model.cls),
    "distilbert": lambda model: nn.Sequential(
        model.vocab_transform, model.activation, model.vocab_layer_norm, model.vocab_projector
    ),
    "albert": lambda model: model.predictions,
    "electra": lambda model: nn.Sequential(model.generator_predictions, model.generator_lm_head),
    "modernbert": lambda model: nn.Sequential(model.head, model.decoder),
}


def language_head(model: Any) -> nn.Module:
    """The head of a masked language model of one of FAMILIES: [1, tokens, hidden] to [1, tokens, vocabulary]."""
    make = _LANGUAGE_HEADS.get(model.config.model_type)
    return make(model) if make else model.lm_head


def linear_head(file: Path) -> LinearHead:
    """The head in a file of one's own (see `heads`). Raises InvalidInputError."""
    weight, bias = (torch.from_numpy(values.astype(np.float32)) for values in heads.read_head(file))
    return LinearHead(weight, bias)


def add_updates(encoder: nn.Module, file: Path) -> None:
    """Add the updates in a head file to the encoder's linear layers. Raises InvalidInputError naming a misfit."""
    layers = dict(encoder.named_modules())
    for name, (a, b) in heads.read_updates(file).items():
        layer, shape = layers.get(name), [len(b), a.shape[1]]
        if not isinstance(layer, nn.Linear) or list(layer.weight.shape) != shape:
            allowed = f"updates of linear layers that the first `layers` of the checkpoint have; none is {shape}"
            raise InvalidInputError("head", name, allowed)
        update = torch.from_numpy(b.astype(np.float32) @ a.astype(np.float32))
        layer.weight.data += update
