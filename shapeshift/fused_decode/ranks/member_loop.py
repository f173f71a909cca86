"""What a child does: load its part, meet the other ranks, compute each batch that rank 0 sends."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from shapeshift.errors import ShapeshiftError
from shapeshift.fused_decode.ranks import messages
from shapeshift.fused_decode.ranks.collective import RankGroup
from shapeshift.fused_decode.ranks.member import RankSpec, load_member


def run(receive: Callable[[], bytes], send: Callable[[bytes], None]) -> int:
    """Returns only where the model cannot be loaded. An error of a step ends the process, which rank 0 notices.

    Sends its state when the part is loaded, and when the ranks have met.
    """
    spec = RankSpec.from_json(receive())
    group = RankGroup(spec.rank, spec.ranks, spec.device)
    try:
        model = load_member(spec, group)
    except (ShapeshiftError, OSError, RuntimeError, MemoryError) as error:
        send(_state(f"{type(error).__name__}: {error}"))
        return 1
    send(_state())
    group.connect(Path(spec.meeting))
    send(_state())
    while True:
        batch, sources, targets = messages.decode(receive())
        model.copy_blocks(sources, targets)
        model.forward(batch)


def _state(error: str = "") -> bytes:
    return json.dumps({"error": error}).encode()
