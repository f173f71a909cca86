"""SmolLM2's answers to 40 questions: `chat` of Triton beside llama.cpp, greedily, one question at a time.

    ours           the front `chat` over the GGUF file, a gRPC stream for each question
    llama.cpp      in-process, on the same file
    llama.cpp f32  in-process, on a file with the same numbers in F32

The systems take turns at each question. An answer is right if it has one of the accepted words. Times are medians over
questions and rounds; ratios are medians of ours over theirs at the same question.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np
import tritonclient.grpc as triton
from tokenizers import Tokenizer

from bench.common.foreign_load import ForeignLoad
from bench.common.models import SHIPPED, generator, write_front
from bench.common.output import BUILD, FOLDER, Output, Row, empty, program, progress
from bench.common.server import loaded_server
from bench.common.worker import Worker
from bench.peers import gguf_in_f32
from bench.peers.protocol import DecodeRequest
from bench.peers.venv import without_torch
from shapeshift.build_engines.hub.sources import find_checkpoint
from shapeshift.build_engines.paths import BuildPaths
from shapeshift.engines.checkpoint import weight_files
from shapeshift.engines.hardware import cores
from shapeshift.engines.text import chat_template_files
from shapeshift.engines.text.tokenizer import FILE_NAME as TOKENIZER_FILE
from shapeshift.fused_decode.model.architecture import Architecture
from shapeshift.fused_decode.settings import WEIGHT_BITS, resolve
from shapeshift.serving.chat_templates.conversation import ChatTemplate

QUESTIONS: dict[str, list[str]] = json.loads(Path(__file__).with_name("questions.json").read_text())
"""Accepted words by question."""
CHECKPOINT, CHAT = "SmolLM2-135M-Instruct", "chat"
OURS, SAME_FILE, IN_F32 = "ours", "llama.cpp", "llama.cpp f32"
NEW_TOKENS, MAX_LENGTH, SLOTS = 32, 512, 4


@dataclass(frozen=True)
class Answer:
    """Its text, milliseconds to its first token, and tokens a second after that; not a number for a single one."""

    text: str
    first_ms: float
    per_second: float


class Asked(Protocol):
    """What answers the prompt of a question."""

    def ask(self, prompt: str) -> Answer: ...


class Ours:
    """The front CHAT of a server."""

    def __init__(self, url: str) -> None:
        self._client = triton.InferenceServerClient(url)
        self._responses: SimpleQueue[tuple[float, Any, Any]] = SimpleQueue()
        self._client.start_stream(lambda result, error: self._responses.put((time.perf_counter(), result, error)))
        self.close = self._client.close

    def ask(self, prompt: str) -> Answer:
        values = {
            "text_input": np.array([prompt.encode()], np.object_),
            "stream": np.array([True]),
            "max_tokens": np.array([NEW_TOKENS], np.int32),
            "temperature": np.array([0.0], np.float32),
            "return_num_output_tokens": np.array([True]),
        }
        kinds = {"object": "BYTES", "bool": "BOOL", "int32": "INT32", "float32": "FP32"}
        inputs = [triton.InferInput(name, [1], kinds[value.dtype.name]) for name, value in values.items()]
        for tensor, value in zip(inputs, values.values(), strict=True):
            tensor.set_data_from_numpy(value)
        start = time.perf_counter()
        self._client.async_stream_infer(CHAT, inputs, enable_empty_final_response=True)
        text, counts, stamps = b"", [], []
        while True:
            stamp, result, error = self._responses.get(timeout=60)
            if error is not None:
                raise error
            if result.as_numpy("text_output") is not None:
                text += result.as_numpy("text_output")[0]
                counts.append(int(result.as_numpy("num_output_tokens")[0]))
                stamps.append(stamp - start)
            if result.get_response().parameters["triton_final_response"].bool_param:
                return _answer(text.decode(), counts, stamps)


class LlamaCpp:
    """A worker of llama.cpp over a file; `tokenizer`, `ends`: of the model."""

    def __init__(self, worker: Worker, tokenizer: Tokenizer, ends: set[int]) -> None:
        self._worker, self._tokenizer, self._ends = worker, tokenizer, ends

    def ask(self, prompt: str) -> Answer:
        ids = self._tokenizer.encode(prompt, add_special_tokens=False).ids
        answer = self._worker.ask(requests=[vars(DecodeRequest(0.0, ids, NEW_TOKENS))], options={})
        tokens, stamps = answer["tokens"][0], answer["stamps"][0]
        # It goes on behind the end, up to its number of tokens.
        length = next((place for place, token in enumerate(tokens) if token in self._ends), len(tokens))
        counted = min(length + 1, len(tokens))
        return _answer(self._tokenizer.decode(tokens[:length]), [1] * counted, stamps[:counted])


def _answer(text: str, counts: list[int], stamps: list[float]) -> Answer:
    later, span_s = sum(counts[1:]), stamps[-1] - stamps[0]
    return Answer(text, stamps[0] * 1e3, later / span_s if later else float("nan"))


def is_right(question: str, text: str) -> bool:
    """Whether the text has one of the accepted words."""
    return any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) for word in QUESTIONS[question])


@program
def main() -> int:
    """Ask, print, and write tables and data to build/bench/."""
    parser = argparse.ArgumentParser(prog="python -m bench.fused_decode.questions", description=__doc__.splitlines()[0])
    parser.add_argument("--precision", choices=("auto", *WEIGHT_BITS), default="auto", help="of our weights")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    folder = find_checkpoint(CHECKPOINT, BuildPaths(Path(), BUILD, SHIPPED)).folder
    precision = resolve(options.precision, packed_bits=Architecture.read(folder).packed_bits)
    settings = {"model": CHECKPOINT, "precision": precision, "threads": cores(), "rounds": options.rounds}
    output = Output("fused_decode.questions", settings, "questions")
    with ExitStack() as stack, ForeignLoad() as foreign:
        answers = _asked(start(stack, folder, precision), prompts(folder), options.rounds)
    rows = report(answers)
    output.table(f"{len(QUESTIONS)} questions; others used {foreign.cores / cores():.0%} of the machine", rows)
    texts = {question: {name: one[0].text for name, one in of.items()} for question, of in answers.items()}
    output.data |= {"systems": rows, "foreign": foreign.cores / cores(), "answers": texts}
    output.save()
    return 0


def prompts(folder: Path) -> dict[str, str]:
    """The prompts by question, as the checkpoint's template writes them."""
    files = chat_template_files.read(folder)
    template = ChatTemplate(str(files.text), files.special_tokens)
    return {question: template.render([{"role": "user", "content": question}], None) for question in QUESTIONS}


def start(stack: ExitStack, folder: Path, precision: str) -> dict[str, Asked]:
    """The systems, which end with `stack`."""
    tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
    ends = json.loads((folder / "config.json").read_text())["eos_token_id"]
    python = without_torch("llama-cpp", BUILD).ensure()
    file = weight_files(folder)[0]
    plain = gguf_in_f32.write(file, BUILD / "peers" / "llama-cpp-work" / f"{folder.name}-f32.gguf")
    systems: dict[str, Asked] = {}
    for name, source, cache in ((SAME_FILE, file, "f16"), (IN_F32, plain, "f32")):
        command = [str(python), "-m", "bench.peers.llama_cpp_worker", str(source), str(cores()), cache, str(MAX_LENGTH)]
        worker = Worker(name, command, FOLDER / "run" / f"{name.replace(' ', '-')}.log")
        stack.callback(worker.stop)
        worker.wait_ready()
        systems[name] = LlamaCpp(worker, tokenizer, {ends} if isinstance(ends, int) else {*ends})
    repository = FOLDER / "questions-repository"
    empty(repository)
    write_front(SHIPPED / CHAT, repository / CHAT, generator(folder, precision, SLOTS, MAX_LENGTH))
    server = stack.enter_context(loaded_server({CHAT: 0}, (repository,)))
    return {OURS: stack.enter_context(closing(Ours(server.grpc_url))), **systems}


def _asked(systems: dict[str, Asked], asked: dict[str, str], rounds: int) -> dict[str, dict[str, list[Answer]]]:
    """The answers of each round by question and system; those of an unmeasured round before are dropped."""
    for system in systems.values():
        for prompt in [*asked.values()][:3]:
            system.ask(prompt)
    answers: dict[str, dict[str, list[Answer]]] = {question: {name: [] for name in systems} for question in asked}
    shuffle = random.Random(0)
    for number in range(rounds):
        progress(f"round {number + 1} of {rounds}")
        for question, prompt in asked.items():
            for name in shuffle.sample([*systems], len(systems)):
                answers[question][name].append(systems[name].ask(prompt))
    return answers


def report(answers: dict[str, dict[str, list[Answer]]]) -> list[Row]:
    """A row for each system: right answers, first token in ms, tokens a second, and ours over it."""
    rows: list[Row] = []
    for name in next(iter(answers.values())):
        row: dict[str, object] = {
            "system": name,
            "right": sum(is_right(question, of[name][0].text) for question, of in answers.items()),
        }
        for column, field in (("first token, ms", "first_ms"), ("tokens/s", "per_second")):
            values = [[getattr(one, field) for one in of[name]] for of in answers.values()]
            ours = [[getattr(one, field) for one in of[OURS]] for of in answers.values()]
            row[column] = float(np.nanmedian(values))
            if name != OURS:
                row[f"ours over it, {column.split(',')[0]}"] = float(np.nanmedian(np.divide(ours, values)))
        rows.append(row)
    return rows


if __name__ == "__main__":
    sys.exit(main())
