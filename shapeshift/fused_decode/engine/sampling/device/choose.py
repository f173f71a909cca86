"""The next token of each row, chosen where the logits lie."""

from __future__ import annotations

import numpy as np
import torch

from shapeshift.fused_decode.engine.sampling.device.draw import draw
from shapeshift.fused_decode.engine.sampling.device.edits import DeviceLogits, moved
from shapeshift.fused_decode.engine.sampling.device.logprobs import ListedLogprobs, list_logprobs
from shapeshift.fused_decode.engine.sampling.sampler import (
    NO_LOGPROBS,
    Chosen,
    Integers,
    SamplingTable,
    uniforms,
)


class DeviceChoice:
    """See `sampler.Choice`: tokens on their way from the device."""

    def __init__(
        self, tokens: torch.Tensor, finite: torch.Tensor, listing: Integers, listed: ListedLogprobs | None
    ) -> None:
        """finite: BOOL [rows]; listing: the rows whose logprobs are `listed`."""
        self.tokens = tokens
        self._listing = listing
        self._listed = listed
        # From a GPU into page-locked memory, which torch takes for copies that are not waited for.
        self._both = torch.stack([tokens, finite.long()]).to("cpu", non_blocking=True)
        self._event: torch.cuda.Event | None = None
        if tokens.is_cuda:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(tokens.device))

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def result(self) -> Chosen:
        self.wait()
        ids, finite = self._both.numpy()
        logprobs = {} if self._listed is None else dict(zip(self._listing.tolist(), self._listed.result(), strict=True))
        return Chosen(ids, finite.astype(bool), logprobs)


@torch.inference_mode()
def choose(table: SamplingTable, logits: torch.Tensor, slots: Integers, lengths: Integers) -> DeviceChoice:
    """See `sampler.Sampler.choose`."""
    listing = np.flatnonzero(table.logprobs[slots] != NO_LOGPROBS)
    # Before the edits: logprobs are those of the model.
    plain = logits[moved(listing, logits)] if listing.size else None
    edited = table.edits.rows(slots)
    if edited.size:
        table.edits.apply(DeviceLogits(logits), edited, slots, lengths)
    best, ids = logits.max(dim=1)
    finite = best.isfinite()
    random = np.flatnonzero(table.temperature[slots] > 0)
    if random.size:
        rows = moved(random, logits)
        drawn = _drawn(table, logits[rows], best[rows], slots[random], lengths[random])
        ids[rows] = torch.where(finite[rows], drawn, ids[rows])
    listed = None
    if plain is not None:
        listed = list_logprobs(plain, ids[moved(listing, logits)], table.logprobs[slots[listing]])
    return DeviceChoice(ids, finite, listing, listed)


def _drawn(
    table: SamplingTable, values: torch.Tensor, best: torch.Tensor, slots: Integers, lengths: Integers
) -> torch.Tensor:
    """A random token of each row, INT64 [rows]; meaningless where the row is not finite."""
    top_k, top_p, min_p = table.top_k[slots], table.top_p[slots], table.min_p[slots]
    scores = (values - best[:, None]) / moved(table.temperature[slots], values)[:, None]
    return draw(
        scores,
        moved(top_k, values) if top_k.any() else None,
        moved(top_p, values) if (top_p < 1).any() else None,
        moved(min_p, values) if min_p.any() else None,
        moved(uniforms(table.seed[slots], lengths), values),
    )
