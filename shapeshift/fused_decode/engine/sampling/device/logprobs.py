"""Logprobs on a device: of each row only what a request asks for comes back."""

from __future__ import annotations

import torch

from shapeshift.fused_decode.engine.sampling.sampler import MOST_LISTED, Integers, TokenLogprobs


class ListedLogprobs:
    """Logprobs on their way from the device; those of a GPU may be read once it has come so far."""

    def __init__(self, values: torch.Tensor, numbers: torch.Tensor, listed: Integers) -> None:
        """values, numbers: FLOAT64 and INT64 [rows, 1 + n]: a token's logprob and rank, then the top's and ids."""
        self._values = values.to("cpu", non_blocking=True)
        self._numbers = numbers.to("cpu", non_blocking=True)
        self._listed = listed

    def result(self) -> list[TokenLogprobs]:
        """One for each row."""
        values, whole = self._values.numpy(), self._numbers.numpy()
        return [
            TokenLogprobs(
                float(values[row, 0]),
                int(whole[row, 0]),
                whole[row, 1 : 1 + count],
                values[row, 1 : 1 + count].astype("float32"),
            )
            for row, count in enumerate(self._listed.tolist())
        ]


def list_logprobs(logits: torch.Tensor, tokens: torch.Tensor, listed: Integers) -> ListedLogprobs:
    """See `sampler.logprobs_of`; `logits` and `tokens` are on the device, which is not waited for."""
    scores = logits - logits.amax(1, keepdim=True)
    norms = scores.exp().sum(1, dtype=torch.float64).log()
    token_scores = scores.gather(1, tokens[:, None])
    ranks = (scores > token_scores).sum(1) + 1
    width = min(MOST_LISTED, scores.shape[1]) if listed.any() else 0
    tops = tokens.new_empty(len(token_scores), 0)
    if width:
        # Of equal ones the lower id comes first, which topk does not promise.
        tops = scores.sort(dim=1, descending=True, stable=True).indices[:, :width]
    values = torch.cat([token_scores, scores.gather(1, tops)], 1).double() - norms[:, None]
    return ListedLogprobs(values, torch.cat([ranks[:, None], tops], 1), listed)
