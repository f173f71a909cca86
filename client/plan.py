"""From the replayer's settings to its list of requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from client.open_loop import Parameter, PlannedRequest
from shapeshift.settings import require
from shapeshift.workloads.load import ARRIVALS, Load
from shapeshift.workloads.text import TextMaker

INPUTS = ("text", "ids")
_CLS, _SEP, _FIRST_WORD, _LAST_WORD = 101, 102, 1996, 29612
"""Token ids of the vocabulary that the uncased BERT models share: texts are whole words between CLS and SEP."""


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Settings:
    """The settings of a replay; each field is a command-line option."""

    url: str = _option("localhost:8001", "host:port of the server's gRPC endpoint")
    model: str = _option("encode", "model to call")
    arrivals: str = _option("poisson", f"arrival process: {', '.join(ARRIVALS)}")
    rate: float = _option(50.0, "mean requests a second; csv has its own")
    duration_s: float = _option(10.0, "length of the run; a csv trace ends here or earlier")
    states: str = _option("0.6:8,2.6:2", "states of mmpp as weight:dwell_s pairs")
    trace: str = _option("", "CSV file of csv arrivals: at_s,length or the Azure LLM form")
    rate_factor: float = _option(1.0, "factor on the rate of csv arrivals")
    lengths: str = _option("short", "tokens of each text: short, long, or a number; csv has its own")
    max_length: int = _option(512, "tokens at which longer texts are cut")
    input: str = _option("text", "inputs: text (TEXT) or ids (INPUT_IDS, ATTENTION_MASK)")
    tokenizer: str = _option("", "tokenizer.json that makes the lengths of texts exact")
    truncate: bool = _option(True, "request parameter of TEXT requests: true or false")
    seed: int = _option(0, "determines arrivals, lengths and texts")
    timeout_s: float = _option(30.0, "time limit of each request, from its sending")
    drain_s: float = _option(30.0, "time to wait for answers after the last intended sending")
    max_in_flight: int = _option(4096, "with this many unanswered requests, the next one fails unsent")
    connect_timeout_s: float = _option(10.0, "time to wait for the server's first answer")
    warmup: int = _option(8, "unmeasured requests before the start")
    slo_ms: float | None = _option(None, "also report the share of requests answered within this time")
    json: str = _option("", "also write the report to this file")

    def __post_init__(self) -> None:
        require(self.input in INPUTS, "input", self.input, f"one of {', '.join(INPUTS)}")
        self.load()
        require(self.seed >= 0, "seed", self.seed, "must be at least 0")
        require(self.slo_ms is None or self.slo_ms > 0, "slo_ms", self.slo_ms, "must be above 0")

    def load(self) -> Load:
        """When the requests are sent, and how long they are."""
        return Load(**{field.name: getattr(self, field.name) for field in fields(Load) if hasattr(self, field.name)})


def plan(settings: Settings) -> list[PlannedRequest]:
    """The requests, in sending order. The same settings give the same requests.

    Raises InvalidInputError for invalid settings, and for settings that give no request.
    """
    rng = np.random.default_rng(settings.seed)
    requests = settings.load().draw(rng)
    make = _ids_row(rng) if settings.input == "ids" else _text_row(settings, rng)
    parameters: dict[str, Parameter] = {"truncate": settings.truncate} if settings.input == "text" else {}
    return [
        PlannedRequest(at, make(length), parameters)
        for at, length in zip(requests.at_s.tolist(), requests.length.tolist(), strict=True)
    ]


def _text_row(settings: Settings, rng: np.random.Generator) -> Callable[[int], dict[str, NDArray[Any]]]:
    maker = TextMaker(rng, _counter(settings.tokenizer) if settings.tokenizer else None)

    def make(tokens: int) -> dict[str, NDArray[Any]]:
        return {"TEXT": np.array([[maker.text(tokens).encode()]], dtype=np.object_)}

    return make


def _ids_row(rng: np.random.Generator) -> Callable[[int], dict[str, NDArray[Any]]]:
    def make(tokens: int) -> dict[str, NDArray[Any]]:
        words = rng.integers(_FIRST_WORD, _LAST_WORD, max(0, tokens - 2))
        ids = np.array([[_CLS, *words.tolist(), _SEP]], dtype=np.int64)
        return {"INPUT_IDS": ids, "ATTENTION_MASK": np.ones_like(ids)}

    return make


def _counter(path: str) -> Callable[[str], int]:
    from tokenizers import Tokenizer

    require(Path(path).is_file(), "tokenizer", path, "must be a tokenizer.json file")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return lambda text: len(tokenizer.encode(text).ids)
