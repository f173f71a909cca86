"""What quantised weights and caches lose, as the perplexity of a text; measured once for a checkpoint and a way."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shapeshift import files
from shapeshift.engines.checkpoint import Checkpoint, weight_files
from shapeshift.engines.gguf.tensors import is_gguf
from shapeshift.engines.hardware import cores, resolve_precision
from shapeshift.engines.text import tokenizer_files
from shapeshift.errors import InvalidInputError
from shapeshift.fused_decode.settings import QUANTISED, FusedDecodeSettings, computed
from shapeshift.settings import require

if TYPE_CHECKING:
    import torch

    from shapeshift.fused_decode.model.cpu_runtime import DecodeModel

TEXT = "perplexity.txt"
"""The file in a checkpoint's folder, or beside a GGUF file, that is measured."""
MOST_MORE = {"int8": 0.01, "int4": 0.05}
"""Above this share of the plain perplexity there is a warning."""
_CACHE = "int8"
WINDOW, MOST_TOKENS, PIECE = 512, 8192, 64
"""Tokens of a window, which begins without a context; most tokens of a text; tokens of a step."""


@dataclass(frozen=True)
class Perplexity:
    """Of a text, with quantised weights and cache, and with the weights of the checkpoint and a cache like them, in the
    precision `against`."""

    quantised: float
    plain: float
    against: str

    @property
    def more(self) -> float:
        """The share by which it is higher where it is quantised; below 0 where it is lower."""
        return self.quantised / self.plain - 1

    def line(self, params: FusedDecodeSettings, text: Path) -> str:
        """For the summary of a model; a warning where too much is lost."""
        line = f"perplexity {self.quantised:.2f} on {text.name}, {self.more:+.1%} against {self.against}"
        most = MOST_MORE.get(params.precision, MOST_MORE[_CACHE])
        return line if self.more <= most else f"WARNING: {line}, which is more than {most:.0%}"


def text_of(checkpoint: Checkpoint, params: FusedDecodeSettings) -> Path | None:
    """The text to measure; None where nothing is quantised, or there is no text.

    params: with the precision that `auto` stands for. A GGUF file in bf16 counts as quantised. Raises InvalidInputError
    where it is empty.
    """
    of_file = is_gguf(checkpoint.folder)
    if params.precision not in (*QUANTISED, *(["bf16"] if of_file else [])) and params.kv_precision != _CACHE:
        return None
    text = (weight_files(checkpoint.folder)[0].resolve().parent if of_file else checkpoint.folder) / TEXT
    if not text.is_file():
        return None
    require(text.stat().st_size > 0, TEXT, str(text), "a text that is not empty")
    return text


def measured(
    checkpoint: Checkpoint, params: FusedDecodeSettings, text: Path, remembered: Path, kernels: Path
) -> Perplexity:
    """Of `text` with the precision of `params`; taken from the file `remembered` where nothing has changed.

    kernels: the folder of compiled kernels.
    """
    # The numbers of a GGUF file are exact in F32 alone.
    plain = "f32" if is_gguf(checkpoint.folder) else resolve_precision(computed(params.precision))
    weights = params.precision if params.precision in (*QUANTISED, "bf16") else plain
    way = f"{weights}:{params.group_size}:{params.kv_precision}:{plain}"
    key = f"{checkpoint.sha256}:{way}:{files.file_sha256(text)}"
    record = _read(remembered)
    if key not in record:
        record[key] = [
            measure(checkpoint, text, params.native, kernels, precision, params.group_size, kv_precision)
            for precision, kv_precision in ((weights, params.kv_precision), (plain, "auto"))
        ]
        files.replace_text(remembered, json.dumps(record, indent=1))
    quantised, numbers = record[key]
    return Perplexity(quantised, numbers, plain)


def _read(remembered: Path) -> dict[str, list[float]]:
    try:
        record = json.loads(remembered.read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def measure(
    checkpoint: Checkpoint,
    text: Path,
    native: bool,
    kernels: Path,
    precision: str,
    group_size: int,
    kv_precision: str = "auto",
) -> float:
    """e to the mean negative log-likelihood of the text's tokens on this machine's CPU.

    The text is cut into windows of WINDOW tokens, or of as many as the model allows, whose first token is context
    alone; only MOST_TOKENS are read. Raises InvalidInputError for a text of fewer than two tokens.
    """
    # These import torch, which no other step of the build needs.
    import torch

    from shapeshift.fused_decode.model.architecture import Architecture
    from shapeshift.fused_decode.model.cpu_runtime import DecodeModel, ModelOptions

    tokens = tokenizer_files.of_library(checkpoint.folder)(text.read_text(encoding="utf-8"))["input_ids"]
    require(len(tokens) > 1, TEXT, str(text), "a text of at least two tokens")
    model = DecodeModel.load(
        checkpoint.folder,
        ModelOptions(
            precision=precision,
            group_size=group_size,
            kv_precision=kv_precision,
            slots=1,
            max_length=min(WINDOW, Architecture.read(checkpoint.folder).max_position),
            threads=cores(),
            native=native,
            cache_dir=kernels,
        ),
    )
    ids = torch.tensor(tokens[:MOST_TOKENS], dtype=torch.int64)
    windows = [window for window in torch.split(ids, model.max_length) if len(window) > 1]
    mean = sum(_loss(model, window) for window in windows) / sum(len(window) - 1 for window in windows)
    if not math.isfinite(mean):
        raise InvalidInputError("precision", precision, f"the logits of {text.name} are not finite")
    return math.exp(mean)


def _loss(model: DecodeModel, window: torch.Tensor) -> float:
    """The sum of the negative log-likelihoods of all tokens but the first."""
    import torch

    from shapeshift.fused_decode.interfaces import StepBatch

    total, slot = 0.0, torch.zeros(1, dtype=torch.int32)
    for start in range(0, len(window) - 1, PIECE):
        read, following = window[start:-1][:PIECE], window[start + 1 :][:PIECE]
        places = torch.arange(len(read))
        logits = model.forward(StepBatch(read, slot, slot + start, slot + len(read), places[:0], further=places))
        total -= float(logits.log_softmax(dim=-1)[places, following].sum())
    return total
