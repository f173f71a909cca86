"""The torch module that providers export: from a pack of rows to one value per row or token.

A serving process does not import it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from shapeshift.engines.interfaces import INPUT_AXES

# Added to an attention score to make its probability zero.
_MASKED = torch.finfo(torch.float32).min


class LinearHead(nn.Module):
    """Logits of a pooled vector: weight [labels, hidden], bias [labels]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(weight.shape[1], weight.shape[0])
        self.linear.load_state_dict({"weight": weight, "bias": bias})

    def forward(self, pooled: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] to [rows, labels]."""
        return torch.as_tensor(self.linear(pooled))


class FirstTokenHead(nn.Module):
    """The head of a sequence-classification checkpoint, which reads the first token of a row."""

    def __init__(self, pooler: nn.Module | None, classifier: nn.Module) -> None:
        super().__init__()
        self.pooler = pooler
        self.classifier = classifier

    def forward(self, first: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] to [rows, labels]."""
        sequences = first.unsqueeze(1)
        return torch.as_tensor(self.classifier(sequences if self.pooler is None else self.pooler(sequences)))


class PackedEncoder(nn.Module):
    """Maps a pack of rows (see `interfaces`) to the outputs `output_names`, in that order.

    model: the encoder, or with `whole_model` the checkpoint with its own head, which must not pack rows;
    type_stride: the number added to the ids of a pair's second text, 0 if the model has no token types.
    The argument names of `forward` are the input names in lower case; exporters rely on this.
    """

    input_axes = INPUT_AXES

    def __init__(
        self,
        model: nn.Module,
        pooling: str,
        normalize: bool,
        packs_rows: bool,
        output_names: Sequence[str] = ("EMBEDDING",),
        head: LinearHead | FirstTokenHead | None = None,
        whole_model: bool = False,
        type_stride: int = 0,
    ) -> None:
        super().__init__()
        self.model = model
        self.pooling = pooling
        self.normalize = normalize
        self.packs_rows = packs_rows
        self.output_names = tuple(output_names)
        self.head = head
        self.whole_model = whole_model
        self.type_stride = type_stride
        self._outputs: dict[str, Callable[..., torch.Tensor]] = {
            "EMBEDDING": self._embedding,
            "LOGITS": self._logits,
            "IMPORTANCE": self._importance,
        }

    def forward(
        self, input_ids: torch.Tensor, segments: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        found = self._run(input_ids, segments, positions)
        results = tuple(self._outputs[name](found, segments, rows) for name in self.output_names)
        return results if len(results) > 1 else results[0]

    def _run(self, ids: torch.Tensor, segments: torch.Tensor, positions: torch.Tensor) -> Any:
        options: dict[str, Any] = {}
        if self.type_stride:
            types = (ids >= self.type_stride).to(torch.int64)
            ids = ids - types * self.type_stride
            options["token_type_ids"] = types
        needs_attention = "IMPORTANCE" in self.output_names
        if needs_attention:
            options["output_attentions"] = True
        if self.whole_model:
            options["output_hidden_states"] = True
        if self.packs_rows:
            mask = (segments.unsqueeze(2) == segments.unsqueeze(1)).unsqueeze(1)
            # The eager attention, which returns its probabilities, adds the mask to the scores.
            mask = torch.where(mask, 0.0, _MASKED) if needs_attention else mask
            return self.model(input_ids=ids, attention_mask=mask, position_ids=positions, **options)
        return self.model(input_ids=ids, attention_mask=(segments > 0).to(torch.int64), **options)

    def _hidden(self, found: Any) -> torch.Tensor:
        return torch.as_tensor(found.hidden_states[-1] if self.whole_model else found.last_hidden_state)

    def _pooled(self, found: Any, segments: torch.Tensor, rows: torch.Tensor, pooling: str) -> torch.Tensor:
        hidden = self._hidden(found)
        member = (segments.unsqueeze(1) == rows.view(1, -1, 1)).to(hidden.dtype)
        if pooling == "cls":
            first = torch.cumsum(member, dim=2) == 1
            member = member * first.to(hidden.dtype)
        return torch.bmm(member, hidden)[0] / member.sum(2)[0].unsqueeze(-1).clamp(min=1.0)

    def _embedding(self, found: Any, segments: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        pooled = self._pooled(found, segments, rows, self.pooling)
        return nn.functional.normalize(pooled, dim=-1) if self.normalize else pooled

    def _logits(self, found: Any, segments: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        if isinstance(self.head, LinearHead):
            return torch.as_tensor(self.head(self._embedding(found, segments, rows)))
        if self.head is not None:
            return torch.as_tensor(self.head(self._pooled(found, segments, rows, "cls")))
        # There is one row. Its logits fill every slot, so that the output shape follows ROWS.
        return torch.as_tensor(found.logits).index_select(0, rows - rows)

    def _importance(self, found: Any, segments: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The attention that each token receives, summed over layers, heads and queries (Tabi, section 4.2)."""
        queries = (segments > 0).to(torch.float32).unsqueeze(1)
        layers = [torch.bmm(queries, weights.sum(1)) for weights in found.attentions]
        return torch.stack(layers).sum(0)[:, 0]
