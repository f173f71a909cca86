"""The torch module that providers export: from a pack of rows to one value per row or token.

A serving process does not import it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from shapeshift.engines.casts import to_f32
from shapeshift.engines.interfaces import INPUT_AXES
from shapeshift.engines.providers.packed_attention import offsets_of
from shapeshift.engines.text.families import Family
from shapeshift.engines.text.pooling import SentenceHead, TokenVectors, pool, term_weights
from shapeshift.engines.text.task_heads import LATE, LinearHead, SequenceHead
from shapeshift.engines.text.varlen_export import as_mask, by_offsets


class Pack(NamedTuple):
    """The inputs of an engine, see `interfaces`."""

    ids: torch.Tensor
    segments: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor


class RowOutputs(nn.Module):
    """The outputs `output_names` of the token vectors of a pack, in that order.

    embedding, tokens: what makes vectors of them; head: of LOGITS, TOKEN_LOGITS or TERM_WEIGHTS, if one of them is
    wanted; head_names: of its parameters in the checkpoint, none where they are of another file; padding: the id that
    pads texts, None: there is none; type_stride: see `PackedEncoder`.
    """

    def __init__(
        self,
        output_names: Sequence[str],
        embedding: SentenceHead,
        tokens: TokenVectors,
        head: nn.Module | None,
        padding: int | None,
        type_stride: int,
        head_names: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.output_names = tuple(output_names)
        self.head_names = tuple(head_names)
        self.embedding = embedding
        self.tokens = tokens
        self.head = head
        self.padding = padding
        self.type_stride = type_stride
        # Methods: `cast` copies the module, and of a function the copy would have that of the original.
        self._outputs: dict[str, Callable[[torch.Tensor, Pack], torch.Tensor]] = {
            "EMBEDDING": self._embedding,
            "LOGITS": self._logits,
            "TOKEN_LOGITS": self._token_logits,
            "TOKEN_EMBEDDING": self._token_embedding,
            "TOKEN_WEIGHTS": self._token_weights,
            "TERM_WEIGHTS": self._term_weights,
        }

    def forward(
        self,
        hidden: torch.Tensor,
        input_ids: torch.Tensor,
        segments: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        attentions: Sequence[torch.Tensor] = (),
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """hidden: [1, tokens, width]; attentions: the probabilities of each layer, for IMPORTANCE."""
        pack = Pack(input_ids, segments, positions, rows)
        results = tuple(
            importance(attentions, pack) if name == "IMPORTANCE" else self._outputs[name](hidden, pack)
            for name in self.output_names
        )
        return results if len(results) > 1 else results[0]

    def _before_padding(self, pack: Pack) -> torch.Tensor:
        """The segments of the tokens that the head pools: one of the last token takes the last that is no padding, or
        the first."""
        if self.padding is None or not isinstance(self.head, SequenceHead) or self.head.pooling != "lasttoken":
            return pack.segments
        return torch.where((pack.ids != self.padding) | (pack.positions == 0), pack.segments, 0)

    def _embedding(self, hidden: torch.Tensor, pack: Pack) -> torch.Tensor:
        return torch.as_tensor(self.embedding(to_f32(hidden), pack.segments, pack.rows))

    def _logits(self, hidden: torch.Tensor, pack: Pack) -> torch.Tensor:
        assert self.head is not None
        segments = self._before_padding(pack)
        if isinstance(self.head, LinearHead):
            return torch.as_tensor(self.head(self.embedding(to_f32(hidden), segments, pack.rows)))
        if self.head.pooling == LATE:
            return pool(self.head(to_f32(hidden)[0]).unsqueeze(0), segments, pack.rows, ["mean"])
        return torch.as_tensor(self.head(pool(to_f32(hidden), segments, pack.rows, [str(self.head.pooling)])))

    def _token_logits(self, hidden: torch.Tensor, _: Pack) -> torch.Tensor:
        assert self.head is not None
        return torch.as_tensor(self.head(to_f32(hidden)))

    def _token_embedding(self, hidden: torch.Tensor, pack: Pack) -> torch.Tensor:
        return self.tokens.vectors(hidden, pack.positions)

    def _token_weights(self, hidden: torch.Tensor, pack: Pack) -> torch.Tensor:
        ids = pack.ids % self.type_stride if self.type_stride else pack.ids
        return self.tokens.weights(hidden, ids)

    def _term_weights(self, hidden: torch.Tensor, pack: Pack) -> torch.Tensor:
        """Of a pack of one row."""
        weights = term_weights(self._token_logits(hidden, pack), self.embedding.terms)
        weights = torch.where((pack.segments > 0).unsqueeze(-1), weights, 0.0)
        return weights.sum(1) if "sum" in self.embedding.terms else weights.amax(1)


def importance(attentions: Sequence[torch.Tensor], pack: Pack) -> torch.Tensor:
    """The attention that each token receives, summed over layers, heads and queries (Tabi, section 4.2)."""
    queries = (pack.segments > 0).to(torch.float32).unsqueeze(1)
    layers = [torch.bmm(queries, to_f32(weights.sum(1))) for weights in attentions]
    return torch.stack(layers).sum(0)[:, 0]


class PackedEncoder(nn.Module):
    """Maps a pack of rows (see `interfaces`) to the outputs `output_names`, in that order.

    model: a transformers model without a task's head; embedding, tokens: what makes vectors of its output; head: of
    LOGITS, TOKEN_LOGITS or TERM_WEIGHTS, if one of them is wanted; type_stride: the number added to the ids of a pair's
    second text, 0 if the model has no token types; head_names: see `RowOutputs`.
    The argument names of `forward` are the input names in lower case; exporters rely on this.
    """

    input_axes = INPUT_AXES

    def __init__(
        self,
        model: nn.Module,
        family: Family,
        embedding: SentenceHead,
        tokens: TokenVectors,
        output_names: Sequence[str] = ("EMBEDDING",),
        head: nn.Module | None = None,
        type_stride: int = 0,
        head_names: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.model = model
        self.family = family
        self.output_names = tuple(output_names)
        self.type_stride = type_stride
        self._packs_by_offsets = False
        # A decoder's keys and values are of no further use.
        config: Any = model.config
        config.use_cache = False
        padding = config.pad_token_id
        self.row_outputs = RowOutputs(output_names, embedding, tokens, head, padding, type_stride, head_names)

    def cast(self, dtype: torch.dtype) -> PackedEncoder:
        """Compute the model in `dtype`, in place; what follows it, pooling and heads, stays in f32."""
        # A head may share weights with the model.
        self.row_outputs = copy.deepcopy(self.row_outputs)
        self.model.to(dtype)
        return self

    @contextmanager
    def with_packed_attention(self) -> Iterator[None]:
        """Inside, attention is the operator `packed_attention`, where the model can use it: not with a bias of its
        own, nor where its probabilities are outputs."""
        config: Any = self.model.config
        family = self.family
        if not family.packs_rows or family.biases_attention or config._attn_implementation != "sdpa":
            yield
            return
        with by_offsets(self.model):
            self._packs_by_offsets = True
            try:
                yield
            finally:
                self._packs_by_offsets = False

    def forward(
        self, input_ids: torch.Tensor, segments: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        output = self._run(input_ids, segments, positions, rows)
        attentions = output.attentions if "IMPORTANCE" in self.output_names else ()
        results: torch.Tensor | tuple[torch.Tensor, ...] = self.row_outputs(
            output.last_hidden_state, input_ids, segments, positions, rows, attentions
        )
        return results

    def _run(self, ids: torch.Tensor, segments: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> Any:
        options: dict[str, Any] = {}
        if self.type_stride:
            types = (ids >= self.type_stride).to(torch.int64)
            ids = ids - types * self.type_stride
            options["token_type_ids"] = types
        if "IMPORTANCE" in self.output_names:
            options["output_attentions"] = True
        if not self.family.packs_rows:
            return self.model(input_ids=ids, attention_mask=(segments > 0).to(torch.int64), **options)
        if self._packs_by_offsets:
            mask = as_mask(offsets_of(segments, rows), self.model)
        else:
            mask = self._attention_mask(segments, positions)
        return self.model(input_ids=ids, attention_mask=mask, position_ids=positions, **options)

    def _attention_mask(self, segments: torch.Tensor, positions: torch.Tensor) -> Any:
        """[1, 1, tokens, tokens]; for a model with layers of local attention one for each kind of layer."""
        config: Any = self.model.config
        allowed = segments.unsqueeze(2) == segments.unsqueeze(1)
        # Positions count within a row, and only tokens of one row see each other.
        distance = positions.unsqueeze(2) - positions.unsqueeze(1)
        if self.family.causal:
            allowed = allowed & (distance >= 0)
        if "sliding_attention" not in (getattr(config, "layer_types", None) or ()):
            return self._in_form(allowed)
        reach = config.sliding_window - (1 if self.family.counts_itself else 0)
        local = allowed & (distance.abs() <= reach)
        return {"full_attention": self._in_form(allowed), "sliding_attention": self._in_form(local)}

    def _in_form(self, allowed: torch.Tensor) -> torch.Tensor:
        """The eager attention adds the mask to the scores; the fused one takes it as it is."""
        mask = allowed.unsqueeze(1)
        config: Any = self.model.config
        if config._attn_implementation != "eager":
            return mask
        # Added to a score, the lowest number of its type makes its probability zero.
        dtype: Any = self.model.dtype
        return torch.where(mask, 0.0, torch.finfo(dtype).min).to(dtype)
