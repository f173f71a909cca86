"""The transformer behind a text front: the reference that verifies engines and the module they come from.

Imports torch and transformers when used; nothing here runs in a serving process.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from shapeshift.engines.checkpoint import Checkpoint
from shapeshift.engines.protocol import INPUT_AXES, Array, Ids
from shapeshift.errors import UnsupportedError

# Families whose rows can lie side by side in one sequence: absolute positions that are an input, and
# attention that honours a full [tokens, tokens] mask. The number is the position of a row's first token
# (None: the padding id plus one, as RoBERTa counts).
_PACKING_FAMILIES: dict[str, int | None] = {"bert": 0, "roberta": None, "xlm-roberta": None}


class PackedEncoder(nn.Module):
    """A pack of rows (see `protocol`) to one pooled vector a row, [rows, hidden]."""

    # The argument names of `forward` are the input names in lower case; exporters rely on it.
    input_axes = INPUT_AXES
    output_names = ("EMBEDDING",)

    def __init__(self, model: nn.Module, pooling: str, normalize: bool, packs_rows: bool) -> None:
        super().__init__()
        self.model = model
        self.pooling = pooling
        self.normalize = normalize
        self.packs_rows = packs_rows

    def forward(
        self, input_ids: torch.Tensor, segments: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        if self.packs_rows:
            mask = (segments.unsqueeze(2) == segments.unsqueeze(1)).unsqueeze(1)
            hidden = self.model(input_ids=input_ids, attention_mask=mask, position_ids=positions).last_hidden_state
        else:
            mask = (segments > 0).to(torch.int64)
            hidden = self.model(input_ids=input_ids, attention_mask=mask).last_hidden_state
        member = (segments.unsqueeze(1) == rows.view(1, -1, 1)).to(hidden.dtype)
        if self.pooling == "cls":
            first = torch.cumsum(member, dim=2) == 1
            member = member * first.to(hidden.dtype)
        pooled = torch.bmm(member, hidden)[0] / member.sum(2)[0].unsqueeze(-1).clamp(min=1.0)
        return nn.functional.normalize(pooled, dim=-1) if self.normalize else pooled


class ReferenceModel:
    """The checkpoint as transformers computes it, f32, one text at a time and without packing."""

    def __init__(self, checkpoint: Checkpoint, pooling: str, normalize: bool) -> None:
        from transformers import AutoModel
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self.family = str(checkpoint.config.get("model_type", "unknown"))
        self.pooling = pooling
        self.normalize = normalize
        self._model = AutoModel.from_pretrained(
            checkpoint.folder, attn_implementation="sdpa", use_safetensors=True, dtype=torch.float32
        ).eval()
        limits = checkpoint.config.get("max_position_embeddings")
        if not limits:
            raise UnsupportedError(f"checkpoint: model_type {self.family} states no max_position_embeddings")
        self.max_tokens = int(limits) - self.position_offset
        self.hidden = int(checkpoint.config["hidden_size"])
        self.vocabulary = int(checkpoint.config["vocab_size"])

    @property
    def packs_rows(self) -> bool:
        return self.family in _PACKING_FAMILIES

    @property
    def position_offset(self) -> int:
        offset = _PACKING_FAMILIES.get(self.family, 0)
        return offset if offset is not None else int(self._model.config.pad_token_id) + 1

    def module(self, packs_rows: bool) -> PackedEncoder:
        """The module that providers export."""
        return PackedEncoder(self._model, self.pooling, self.normalize, packs_rows).eval()

    def embed(self, texts: Sequence[Ids]) -> Array:
        """Reference vectors of 1-D id arrays, FP32 [texts, hidden]."""
        with torch.inference_mode():
            return np.stack([self._embed_one(torch.from_numpy(text)) for text in texts])

    def _embed_one(self, ids: torch.Tensor) -> Array:
        hidden = self._model(input_ids=ids.unsqueeze(0)).last_hidden_state[0]
        pooled = hidden[0] if self.pooling == "cls" else hidden.mean(0)
        return (nn.functional.normalize(pooled, dim=-1) if self.normalize else pooled).numpy()
