"""Engines of a GPU as a manifest describes them."""

from __future__ import annotations

from shapeshift.engines.manifest import EngineEntry, FileEntry, Latency, Manifest, Output

VOCABULARY, MAX_TOKENS = 1000, 64
SHAPES = {16: (16, 4), 32: (32, 8), 64: (None, None)}
"""Tokens and rows of the engine of each bin."""


def made(provider: str = "tensorrt", **outputs: tuple[int, ...]) -> Manifest:
    """Engines of two static lengths and any length, with one file each. outputs: dims; by default an EMBEDDING."""
    entries = []
    for edge, (tokens, rows) in SHAPES.items():
        latency = (Latency(edge, 1, edge / 16, edge / 16, edge / 16),)
        entries.append(EngineEntry(f"{tokens or 'dynamic'}.plan", tokens, rows, 0.0, 1.0, latency))
    return Manifest(
        model="front",
        checkpoint_sha256="",
        build_key="",
        provider=provider,
        provider_version="1",
        precision="f16",
        vocabulary=VOCABULARY,
        max_tokens=MAX_TOKENS,
        packs_rows=True,
        position_offset=2,
        reference="",
        tolerance="",
        hardware="",
        outputs=tuple(Output(name, "TYPE_FP32", dims) for name, dims in (outputs or {"EMBEDDING": (2,)}).items()),
        files={entry.file: FileEntry(1, "") for entry in entries},
        engines=tuple(entries),
    )
