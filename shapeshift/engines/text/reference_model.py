"""The checkpoint in transformers: the reference for verification, and the module that engines are exported from.

A serving process does not import it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from shapeshift.engines.checkpoint import Checkpoint
from shapeshift.engines.interfaces import Array, Ids
from shapeshift.engines.text import heads
from shapeshift.engines.text.export_module import FirstTokenHead, LinearHead, PackedEncoder
from shapeshift.errors import InvalidInputError, UnsupportedError

# Families that can pack rows: they take absolute positions as an input and a full [tokens, tokens] attention mask. The
# number is the position of a row's first token (None: the padding id plus one, as in RoBERTa).
_PACKING_FAMILIES: dict[str, int | None] = {"bert": 0, "roberta": None, "xlm-roberta": None}


class ReferenceModel:
    """The checkpoint computed by transformers in f32, one text at a time, without packing.

    outputs: of EMBEDDING, LOGITS and IMPORTANCE; layers: the number of first layers to compute, 0: all;
    head: a file with a linear head over the pooled vector (`heads`), None: the checkpoint's own (for LOGITS);
    pairs: whether texts may be pairs.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        pooling: str,
        normalize: bool,
        outputs: Sequence[str] = ("EMBEDDING",),
        layers: int = 0,
        head: Path | None = None,
        pairs: bool = False,
    ) -> None:
        self.family = str(checkpoint.config.get("model_type", "unknown"))
        self.pooling = pooling
        self.normalize = normalize
        self.outputs = tuple(outputs)
        self._own_head = "LOGITS" in outputs and head is None
        self._model = _load(checkpoint, self._own_head, "IMPORTANCE" in outputs, layers)
        self._linear = _linear_head(head) if head is not None else None
        limits = checkpoint.config.get("max_position_embeddings")
        if not limits:
            raise UnsupportedError(f"checkpoint: model_type {self.family} has no max_position_embeddings")
        self.max_tokens = int(limits) - self.position_offset
        self.hidden = int(self._model.config.hidden_size)
        self._ids = int(checkpoint.config["vocab_size"])
        self.type_stride = self._ids if pairs and int(getattr(self._model.config, "type_vocab_size", 0)) > 1 else 0

    @property
    def vocabulary(self) -> int:
        """The number of ids, including those of a pair's second text."""
        return self._ids + self.type_stride

    @property
    def packs_rows(self) -> bool:
        return self.family in _PACKING_FAMILIES

    @property
    def position_offset(self) -> int:
        offset = _PACKING_FAMILIES.get(self.family, 0)
        return offset if offset is not None else int(self._model.config.pad_token_id) + 1

    def module(self, packs_rows: bool) -> PackedEncoder:
        """The module that providers export."""
        own: LinearHead | FirstTokenHead | None = self._linear
        model, whole = self._model, self._own_head and not self.packs_rows
        if self._own_head and not whole:
            model = self._model.base_model
            # RoBERTa's classifier selects the first token itself.
            pooler = model.pooler if self.family == "bert" else None
            own = FirstTokenHead(pooler, self._model.classifier)
        module = PackedEncoder(
            model, self.pooling, self.normalize, packs_rows, self.outputs, own, whole, self.type_stride
        )
        return module.eval()

    def compute(self, ids: Ids) -> dict[str, Array]:
        """The outputs of one text: EMBEDDING [hidden], LOGITS [labels], IMPORTANCE [tokens]."""
        with torch.inference_mode():
            return {name: value.numpy() for name, value in self._compute(torch.from_numpy(ids)).items()}

    def _compute(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        options: dict[str, Any] = {"output_hidden_states": True, "output_attentions": "IMPORTANCE" in self.outputs}
        if self.type_stride:
            options["token_type_ids"] = (ids >= self.type_stride).long().unsqueeze(0)
            ids = ids % self.type_stride
        result = self._model(input_ids=ids.unsqueeze(0), **options)
        hidden = result.hidden_states[-1][0]
        pooled = hidden[0] if self.pooling == "cls" else hidden.mean(0)
        vector = nn.functional.normalize(pooled, dim=-1) if self.normalize else pooled
        values = {"EMBEDDING": vector}
        if "LOGITS" in self.outputs:
            values["LOGITS"] = self._linear(vector.unsqueeze(0))[0] if self._linear is not None else result.logits[0]
        if "IMPORTANCE" in self.outputs:
            values["IMPORTANCE"] = torch.stack(result.attentions).sum((0, 1, 2, 3))
        return {name: values[name] for name in self.outputs}


def _load(checkpoint: Checkpoint, with_head: bool, with_attention: bool, layers: int) -> Any:
    from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    config = AutoConfig.from_pretrained(checkpoint.folder)
    if layers > config.num_hidden_layers:
        raise InvalidInputError("layers", layers, f"at most {config.num_hidden_layers} for this checkpoint")
    if layers:
        config.num_hidden_layers = layers
    kind = AutoModelForSequenceClassification if with_head else AutoModel
    # Only the eager attention returns its probabilities.
    model, report = kind.from_pretrained(
        checkpoint.folder,
        config=config,
        attn_implementation="eager" if with_attention else "sdpa",
        use_safetensors=True,
        dtype=torch.float32,
        output_loading_info=True,
    )
    if with_head and report["missing_keys"]:
        missing = ", ".join(sorted(report["missing_keys"])[:3])
        allowed = f"a sequence-classification checkpoint for LOGITS, or a head ({missing} missing)"
        raise InvalidInputError("checkpoint", str(checkpoint.folder), allowed)
    return model.eval()


def _linear_head(file: Path) -> LinearHead:
    weight, bias = (torch.from_numpy(values.astype(np.float32)) for values in heads.read_head(file))
    return LinearHead(weight, bias)
