"""The first level. Its engines run in the process of the cascade, so that an early answer needs no call."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from shapeshift.cascade.candidates.table import Candidate, CandidateTable
from shapeshift.cascade.policy.control import LevelOutput
from shapeshift.cascade.policy.routing import Array
from shapeshift.cascade.request import LevelResult
from shapeshift.cascade.settings import CascadeSettings
from shapeshift.engines import manifest
from shapeshift.engines.execution.executor import EngineExecutor
from shapeshift.engines.execution.loading import open_tokenizer
from shapeshift.engines.execution.request import TextRequest
from shapeshift.engines.manifest import Manifest
from shapeshift.engines.text.tokenizer import Encoded
from shapeshift.errors import EngineError
from shapeshift.serving.model_args import Log

_REGISTER = "run `shapeshift cascade register` again"


class FirstLevel:
    """The engines of one model and its tokenizer. manifest_sha256: the hash of their manifest."""

    def __init__(
        self,
        folder: Path,
        table: CandidateTable,
        candidate: Candidate,
        own: CascadeSettings,
        log: Log,
        device: int | None,
    ) -> None:
        model = candidate.levels[0]
        made = check_engines(folder / model, table, candidate, 0)
        self.max_tokens, self.precision = made.max_tokens, made.precision
        self.manifest_sha256 = manifest.sha256(folder / model)
        self._prompt = made.prompt(None)
        self._tokenizer = open_tokenizer(folder / model, made)
        self.executor = EngineExecutor(made, folder / model, own, log, device)

    def submit(
        self,
        rows: Sequence[Sequence[bytes]],
        truncate: bool,
        deadline: float | None,
        done: Callable[[LevelResult | Exception], None],
    ) -> list[int]:
        """Queue rows of one text or one pair; returns the number of tokens of each.

        deadline: monotonic seconds, or None. `done` is called once, from any thread.
        Raises InvalidInputError for an invalid text, OverloadedError where the queue is full: without calling `done`.
        """
        encoded = [
            self._tokenizer.encode_with_offsets(
                texts[0], texts[1] if len(texts) > 1 else None, number, truncate, self._prompt
            )
            for number, texts in enumerate(rows)
        ]

        def finished(request: TextRequest) -> None:
            try:
                result: LevelResult | Exception = request.error or _result(request, encoded)
            except Exception as error:  # noqa: BLE001  the engine thread must continue
                result = error
            done(result)

        latency_ms = None if deadline is None else max(1e-3, (deadline - time.monotonic()) * 1e3)
        self.executor.submit(TextRequest([one.ids for one in encoded], finished, latency_ms))
        return [len(one.ids) for one in encoded]


def check_engines(folder: Path, table: CandidateTable, candidate: Candidate, level: int) -> Manifest:
    """The manifest of the engines of a level, counted from 0.

    Raises EngineError where they are not the engines that were profiled.
    """
    model, is_last = candidate.levels[level], level + 1 == len(candidate.levels)
    made = manifest.load(folder)
    stated = table.model(model).checkpoint_sha256
    if stated and stated != made.checkpoint_sha256:
        raise EngineError(f"candidate table of {table.task}: {model} comes from another checkpoint; {_REGISTER}")
    offered = [output.name for output in made.outputs]
    needed = ["LOGITS", *(["EMBEDDING"] if table.is_regression and not is_last else [])]
    missing = [name for name in needed if name not in offered]
    if missing:
        raise EngineError(
            f"{model} has no output {', '.join(missing)}; list it in its config.pbtxt and run `shapeshift engines`"
        )
    if len(made.labels) != len(table.labels):
        wanted = f"the candidate table of {table.task} has {len(table.labels)}"
        raise EngineError(f"{model} has {len(made.labels)} labels, {wanted}; {_REGISTER}")
    made.check_files(folder, manifest.hashes_file(folder))
    return made


def _result(request: TextRequest, encoded: Sequence[Encoded]) -> LevelResult:
    outputs = [
        LevelOutput(
            request.outputs["LOGITS"][index],
            _of_row(request.outputs.get("IMPORTANCE"), index, len(one.offsets)),
            one.offsets,
            _of_row(request.outputs.get("EMBEDDING"), index),
        )
        for index, one in enumerate(encoded)
    ]
    return LevelResult(outputs, request.engine_ms)


def _of_row(values: Array | None, index: int, length: int | None = None) -> Array | None:
    return None if values is None else values[index][:length]
