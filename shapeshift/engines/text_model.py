"""The transformer behind a text front: the reference that verifies engines and the module they come from.

Imports torch and transformers when used; nothing here runs in a serving process.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from shapeshift.engines import heads
from shapeshift.engines.checkpoint import Checkpoint
from shapeshift.engines.protocol import Array, Ids
from shapeshift.engines.text_module import FirstTokenHead, LinearHead, PackedEncoder
from shapeshift.errors import InvalidInputError, UnsupportedError

# Families whose rows can lie side by side in one sequence: absolute positions that are an input, and
# attention that honours a full [tokens, tokens] mask. The number is the position of a row's first token
# (None: the padding id plus one, as RoBERTa counts).
_PACKING_FAMILIES: dict[str, int | None] = {"bert": 0, "roberta": None, "xlm-roberta": None}


class ReferenceModel:
    """The checkpoint as transformers computes it, f32, one text at a time and without packing.

    outputs: those of EMBEDDING, LOGITS and IMPORTANCE that are wanted; layers: how many of the first ones, 0: all;
    head: a file with a linear head over the pooled vector (`heads`), None: the checkpoint's own, if LOGITS are wanted;
    pairs: whether texts may come in pairs.
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
            raise UnsupportedError(f"checkpoint: model_type {self.family} states no max_position_embeddings")
        self.max_tokens = int(limits) - self.position_offset
        self.hidden = int(self._model.config.hidden_size)
        self._ids = int(checkpoint.config["vocab_size"])
        self.type_stride = self._ids if pairs and int(getattr(self._model.config, "type_vocab_size", 0)) > 1 else 0

    @property
    def vocabulary(self) -> int:
        """The number of ids, those of a pair's second text counted."""
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
            # RoBERTa's classifier takes the first token itself.
            pooler = model.pooler if self.family == "bert" else None
            own = FirstTokenHead(pooler, self._model.classifier)
        module = PackedEncoder(
            model, self.pooling, self.normalize, packs_rows, self.outputs, own, whole, self.type_stride
        )
        return module.eval()

    def embed(self, texts: Sequence[Ids]) -> Array:
        """Reference vectors of 1-D id arrays, FP32 [texts, hidden]."""
        return np.stack([self.compute(text)["EMBEDDING"] for text in texts])

    def compute(self, ids: Ids) -> dict[str, Array]:
        """The wanted outputs of one text: EMBEDDING [hidden], LOGITS [labels], IMPORTANCE [tokens]."""
        with torch.inference_mode():
            return {name: value.numpy() for name, value in self._compute(torch.from_numpy(ids)).items()}

    def _compute(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        wanted: dict[str, Any] = {"output_hidden_states": True, "output_attentions": "IMPORTANCE" in self.outputs}
        if self.type_stride:
            wanted["token_type_ids"] = (ids >= self.type_stride).long().unsqueeze(0)
            ids = ids % self.type_stride
        found = self._model(input_ids=ids.unsqueeze(0), **wanted)
        hidden = found.hidden_states[-1][0]
        pooled = hidden[0] if self.pooling == "cls" else hidden.mean(0)
        vector = nn.functional.normalize(pooled, dim=-1) if self.normalize else pooled
        values = {"EMBEDDING": vector}
        if "LOGITS" in self.outputs:
            values["LOGITS"] = self._linear(vector.unsqueeze(0))[0] if self._linear is not None else found.logits[0]
        if "IMPORTANCE" in self.outputs:
            values["IMPORTANCE"] = torch.stack(found.attentions).sum((0, 1, 2, 3))
        return {name: values[name] for name in self.outputs}


def _load(checkpoint: Checkpoint, with_head: bool, weighs: bool, layers: int) -> Any:
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
    # Only the plain attention tells its probabilities.
    model, report = kind.from_pretrained(
        checkpoint.folder,
        config=config,
        attn_implementation="eager" if weighs else "sdpa",
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
    weight, bias = (torch.from_numpy(values.astype(np.float32)) for values in heads.tensors(file))
    return LinearHead(weight, bias)
