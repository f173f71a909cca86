"""From the token vectors of a pack to one vector for each of its rows. A serving process does not import it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from shapeshift.engines.casts import to_f32
from shapeshift.engines.text.sentence_modules import DenseLayer, SentenceModules, TowerLayer
from shapeshift.errors import InvalidInputError


class SentenceHead(nn.Module):
    """Pooling, dense layers and normalization: EMBEDDING of a pack."""

    def __init__(self, modules: SentenceModules) -> None:
        super().__init__()
        self.pooling = modules.pooling
        self.dense = dense_layers(modules.dense)
        self.normalize = bool(modules.normalize)
        self.terms = modules.terms

    def forward(self, hidden: torch.Tensor, segments: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Token vectors [1, tokens, hidden], see `pool`; returns [rows, width]."""
        vectors = self.dense(pool(hidden, segments, rows, self.pooling))
        return nn.functional.normalize(vectors, dim=-1) if self.normalize else torch.as_tensor(vectors)


class TokenVectors(nn.Module):
    """Vectors and weights of single tokens: TOKEN_EMBEDDING and TOKEN_WEIGHTS of a pack.

    first: the position of a row's first token; unweighted: the ids of special tokens.
    """

    def __init__(self, modules: SentenceModules, first: int, unweighted: Sequence[int]) -> None:
        super().__init__()
        self.dense, self.weight = (
            None if layer is None else dense_layers([layer]) for layer in (modules.token_dense, modules.token_weights)
        )
        self._first = first
        self._unweighted = tuple(unweighted)

    def vectors(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Token vectors [1, tokens, hidden] to [1, tokens, width]; zeros for a token that has none."""
        if self.dense is None:
            return to_f32(hidden)
        vectors = nn.functional.normalize(self.dense(to_f32(hidden)), dim=-1)
        return torch.where((positions != self._first).unsqueeze(-1), vectors, 0.0)

    def weights(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Token vectors [1, tokens, hidden] to [1, tokens]; ids: [1, tokens]."""
        assert self.weight is not None
        weights = self.weight(to_f32(hidden))[..., 0]
        for token in self._unweighted:
            weights = torch.where(ids != token, weights, 0.0)
        return torch.as_tensor(weights)


def term_weights(logits: torch.Tensor, terms: Sequence[str]) -> torch.Tensor:
    """The weights of the vocabulary before they are pooled, of the logits of a masked language model (SPLADE)."""
    weights = torch.log1p(torch.relu(logits))
    return torch.log1p(weights) if "log1p_relu" in terms else weights


def pool(hidden: torch.Tensor, segments: torch.Tensor, rows: torch.Tensor, pooling: Sequence[str]) -> torch.Tensor:
    """Token vectors [1, tokens, hidden] pooled over the tokens of each row, [rows, hidden x modes].

    segments: [1, tokens], the segment number of each token; rows: [rows], the segment numbers to pool.
    """
    member = segments.unsqueeze(1) == rows.view(1, -1, 1)
    # Counted in integers: bf16 cannot tell 300 from 301.
    place = torch.cumsum(member.to(torch.int64), dim=2)
    return torch.cat([_pooled(hidden, member, place, mode) for mode in pooling], dim=-1)


def _pooled(hidden: torch.Tensor, member: torch.Tensor, place: torch.Tensor, mode: str) -> torch.Tensor:
    """member: [1, rows, tokens]; place: the number of a row's tokens up to each token."""
    if mode == "max":
        return torch.where(member[0].unsqueeze(-1), hidden, -torch.inf).amax(1)
    if mode == "cls":
        weights = member & (place == 1)
    elif mode == "lasttoken":
        weights = member & (place == place[:, :, -1:])
    else:
        weights = member
    scaled = weights.to(hidden.dtype)
    if mode == "weightedmean":
        scaled = scaled * place.to(hidden.dtype)
    total = scaled.sum(2)[0].unsqueeze(-1).clamp(min=1.0)
    return torch.bmm(scaled, hidden)[0] / (total.sqrt() if mode == "mean_sqrt_len_tokens" else total)


def pool_one(hidden: torch.Tensor, pooling: Sequence[str]) -> torch.Tensor:
    """The reference of `pool`: token vectors [tokens, hidden] of one text, pooled to [hidden x modes]."""
    weights = torch.arange(1, len(hidden) + 1, dtype=hidden.dtype).unsqueeze(-1)
    vectors: dict[str, Callable[[], torch.Tensor]] = {
        "cls": lambda: hidden[0],
        "lasttoken": lambda: hidden[-1],
        "mean": lambda: hidden.mean(0),
        "mean_sqrt_len_tokens": lambda: hidden.sum(0) / len(hidden) ** 0.5,
        "weightedmean": lambda: (hidden * weights).sum(0) / weights.sum(),
        "max": lambda: hidden.amax(0),
    }
    return torch.cat([vectors[mode]() for mode in pooling])


def _weights(layer: DenseLayer) -> dict[str, torch.Tensor]:
    """The weight and the bias, if it has one."""
    from safetensors import safe_open
    from safetensors.torch import load_file

    if not isinstance(layer, TowerLayer):
        return {name.removeprefix("linear."): value.float() for name, value in load_file(layer.file).items()}
    with safe_open(str(layer.file), "pt") as opened:
        kinds = ("weight", "bias") if layer.bias else ("weight",)
        return {kind: opened.get_tensor(f"{layer.module}.{kind}").float() for kind in kinds}


def dense_layers(listed: Sequence[DenseLayer]) -> nn.Sequential:
    """Layers with their weights. Raises InvalidInputError for weights that do not fit their configuration."""
    layers: list[nn.Module] = []
    for layer in listed:
        linear = nn.Linear(layer.in_features, layer.out_features, layer.bias)
        try:
            linear.load_state_dict(_weights(layer))
        except Exception as error:  # noqa: BLE001  the libraries raise many types
            reason = str(error).partition("\n")[0]
            raise InvalidInputError(
                "checkpoint", str(layer.file), f"weights as its config.json says ({reason})"
            ) from None
        layers += [linear, getattr(nn, layer.activation)()]
    return nn.Sequential(*layers)
