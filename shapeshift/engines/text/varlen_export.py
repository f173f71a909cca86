"""Lets a transformers model compute attention by `packed_attention`, which finds the texts of a pack by offsets.

A serving process does not import it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from shapeshift.engines.providers.packed_attention import packed_attention

_NAME = "shapeshift_packed"


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    sliding_window: int | None = None,
    longest: int = 0,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """See transformers' AttentionInterface. attention_mask: the offsets, [1, 1, 1, texts + 1]; longest: see
    `packed_attention`.

    transformers passes on whatever has four axes as it is.
    """
    # The window counts the token itself.
    reach = -1 if sliding_window is None else sliding_window - 1
    queries, keys, values = (one.transpose(1, 2)[0] for one in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    # As transformers' masks: a decoder's configuration may say that tokens attend to later ones.
    ahead = 0 if module.is_causal and getattr(module.config, "is_causal", True) else reach
    output = packed_attention(queries, keys, values, attention_mask[0, 0, 0], scale, reach, ahead, longest)
    return output[None], None


@contextmanager
def by_offsets(model: nn.Module) -> Iterator[None]:
    """Inside, `model` takes the offsets of a pack for its attention mask."""
    # Only who exports needs it.
    from transformers import AttentionInterface

    config: Any = model.config
    longest = getattr(config, "max_position_embeddings", None) or 0
    AttentionInterface.register(_NAME, partial(_attention, longest=longest))
    before = config._attn_implementation
    config._attn_implementation = _NAME
    try:
        yield
    finally:
        config._attn_implementation = before


def as_mask(offsets: torch.Tensor, model: nn.Module) -> Any:
    """`offsets` in the form of the masks of `model`, inside `by_offsets`."""
    mask = offsets[None, None, None]
    config: Any = model.config
    if "sliding_attention" not in (getattr(config, "layer_types", None) or ()):
        return mask
    return {"full_attention": mask, "sliding_attention": mask}
