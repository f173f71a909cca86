"""The Berkeley function calling leaderboard, a seeded part of it: the gateway beside llama.cpp on the same prompts.

Both answer greedily, by themselves and by the grammar of the tools. What an answer calls is read by the gateway, and of
llama.cpp's answers by its parser, beside the way in which the leaderboard reads models of this form.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import types
import zipfile
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from bench.peers.venv import without_torch
from shapeshift.gateway.answers.families import format_of
from tests import llama_cpp_source
from tests.gateway.served import BUILD, gateway, serving, with_template
from tests.gateway.test_gateway_answers import calls_of, read

if TYPE_CHECKING:
    from shapeshift.triton.embedded.server import TritonServer

pytestmark = [pytest.mark.long, pytest.mark.server, pytest.mark.timeout(3600)]
PACKAGE = "bfcl-eval==2026.3.23"
CATEGORIES = ("simple_python", "multiple", "parallel", "irrelevance")
CASES, SEED, MOST_TOKENS = 25, 7, 96
MODEL, TEMPLATE = "chat_calls", "Qwen-Qwen2.5-7B-Instruct"
TYPES = {"dict": "object", "float": "number", "tuple": "array"}
CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)
Calls = list[tuple[str, Any]]


@dataclass(frozen=True)
class Case:
    """One question. functions: as the leaderboard has them; truth: the calls that are right, none where none is."""

    category: str
    functions: list[dict[str, Any]]
    messages: list[dict[str, Any]]
    truth: list[dict[str, Any]]

    def body(self, choice: str) -> dict[str, Any]:
        """The request of a chat completion."""
        tools = [{"type": "function", "function": schema_of(one)} for one in self.functions]
        return {
            "model": MODEL,
            "messages": self.messages,
            "tools": tools,
            "tool_choice": choice,
            "temperature": 0,
            "max_tokens": MOST_TOKENS,
        }


def schema_of(value: Any) -> Any:
    """The leaderboard's schema as a JSON schema."""
    if isinstance(value, list):
        return [schema_of(one) for one in value]
    if not isinstance(value, dict):
        return value
    kind = value.get("type")
    converted = {name: schema_of(one) for name, one in value.items() if kind != "any" or name != "type"}
    return {**converted, "type": TYPES.get(kind, kind)} if isinstance(kind, str) and kind != "any" else converted


@cache
def package() -> Path:
    """The leaderboard's package, unpacked. Skips a test that cannot fetch it."""
    folder = BUILD / "sources"
    target = folder / PACKAGE.replace("==", "-")
    if not target.is_dir():
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", PACKAGE]
        if subprocess.run([*command, "-d", str(folder)], check=False).returncode:
            pytest.skip(f"no wheel of {PACKAGE}")
        with zipfile.ZipFile(next(folder.glob("bfcl_eval-*.whl"))) as wheel:
            wheel.extractall(target)
    return target


def cases() -> list[Case]:
    """So many of each category."""
    chosen, data = [], package() / "bfcl_eval" / "data"
    for category in CATEGORIES:
        file = f"BFCL_v4_{category}.json"
        lines = [json.loads(line) for line in (data / file).read_text().splitlines()]
        truths = data / "possible_answer" / file
        answers = [json.loads(line) for line in truths.read_text().splitlines()] if truths.is_file() else []
        truth_of = {one["id"]: one["ground_truth"] for one in answers}
        for line in random.Random(SEED).sample(lines, CASES):
            chosen.append(Case(category, line["function"], line["question"][0], truth_of.get(line["id"], [])))
    return chosen


def checker() -> Callable[..., dict[str, Any]]:
    """The leaderboard's own check of calls, without its clients of other models, which it only asks for a name."""
    sys.path.insert(0, str(package()))
    models = types.ModuleType("bfcl_eval.constants.model_config")
    models.MODEL_CONFIG_MAPPING = defaultdict(lambda: types.SimpleNamespace(underscore_to_dot=False))  # type: ignore[attr-defined]
    sys.modules[models.__name__] = models
    from bfcl_eval.constants.enums import Language  # type: ignore[import-not-found]
    from bfcl_eval.eval_checker.ast_eval.ast_checker import ast_checker  # type: ignore[import-not-found]

    def check(case: Case, calls: Calls) -> dict[str, Any]:
        if case.category == "irrelevance":
            return {"valid": not calls}
        named = [{name: arguments} for name, arguments in calls]
        checked: dict[str, Any] = ast_checker(case.functions, named, case.truth, Language.PYTHON, case.category, MODEL)
        return checked

    return check


@pytest.fixture(scope="module")
def answered(
    make_server: Callable[..., TritonServer],
    tmp_path_factory: pytest.TempPathFactory,
    free_ports: Callable[[int], list[int]],
) -> tuple[list[tuple[Case, str]], list[Calls], list[list[int]]]:
    """Cases with their choice of tools, the gateway's calls, and the tokens of each prompt. The server has ended."""
    asked = [(case, "auto") for case in cases()]
    asked += [(case, "required") for case in cases() if case.category in ("simple_python", "multiple")]
    folder = tmp_path_factory.mktemp("bfcl")
    template = (llama_cpp_source.models() / "templates" / f"{TEMPLATE}.jinja").read_text()
    with_template("chat", MODEL, template, folder / "repository")
    with (
        serving(make_server, (MODEL,), folder / "run", folder / "repository") as server,
        gateway(server, free_ports(1)[0], 1) as address,
    ):
        return (asked, *by_gateway(address, asked))


def by_gateway(url: str, asked: list[tuple[Case, str]]) -> tuple[list[Calls], list[list[int]]]:
    """The calls of each answer, and the tokens of each prompt."""
    with httpx2.Client(base_url=url, timeout=600) as client, ThreadPoolExecutor(8) as pool:

        def post(route: str, body: dict[str, Any]) -> Any:
            answer = client.post(route, json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()

        def ask(one: tuple[Case, str]) -> tuple[Calls, list[int]]:
            body = one[0].body(one[1])
            message = post("/v1/chat/completions", body)["choices"][0]["message"]
            functions = [call["function"] for call in message.get("tool_calls") or ()]
            prompt = post("/apply-template", body)["prompt"]
            tokens = post("/tokenize", {"model": MODEL, "prompt": prompt, "add_special_tokens": False})["tokens"]
            return [(function["name"], parsed(function["arguments"])) for function in functions], tokens

        answers = list(pool.map(ask, asked))
    return [calls for calls, _ in answers], [tokens for _, tokens in answers]


def parsed(text: str) -> Any:
    """What JSON says; of an answer that was cut: nothing."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return {}


def by_llama_cpp(prompts: list[list[int]], schemas: list[Any]) -> list[str]:
    """The texts of llama.cpp with the same model."""
    venv = without_torch("llama-cpp", BUILD)
    if not venv.is_ready():
        pytest.skip("no llama.cpp: run `python -m bench.peers.venv llama-cpp`")
    model = next((BUILD / "checkpoints" / "SmolLM2-135M-Instruct").glob("*.gguf"))
    asked = json.dumps([[*one, MOST_TOKENS] for one in zip(prompts, schemas, strict=True)])
    worker = Path(__file__).with_name("llama_cpp_texts.py")
    done = subprocess.run([venv.python, worker, model], input=asked, capture_output=True, text=True, check=True)
    texts: list[str] = json.loads(done.stdout)
    return texts


def bare(schema: Any) -> Any:
    """The schema without descriptions: of one that has no more, llama.cpp makes no grammar."""
    if isinstance(schema, list):
        return [bare(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    parts = {name: bare(part) for name, part in schema.items()}
    return {name: part for name, part in parts.items() if name != "description" or not isinstance(part, str)}


def grammar_of(case: Case) -> dict[str, Any]:
    """What an answer is that has to call one of the tools."""
    options = []
    for function in case.functions:
        schema = schema_of(function)
        properties = {"name": {"const": schema["name"]}, "arguments": bare(schema["parameters"])}
        options.append({"type": "object", "properties": properties, "required": ["name", "arguments"]})
    return {"anyOf": options}


def test_calls_are_right_as_often_as_those_of_llama_cpp(
    answered: tuple[list[tuple[Case, str]], list[Calls], list[list[int]]],
) -> None:
    asked, ours, prompts = answered
    texts = by_llama_cpp(prompts, [None if choice == "auto" else grammar_of(case) for case, choice in asked])
    form = format_of([(llama_cpp_source.models() / "templates" / f"{TEMPLATE}.jinja").read_text()])
    check, right = checker(), defaultdict[tuple[str, str], list[int]](lambda: [0, 0, 0])
    for (case, choice), calls, text in zip(asked, ours, texts, strict=True):
        if choice == "required":
            said = parsed(text)
            theirs = [(said["name"], said["arguments"])] if said else []
        else:
            tools = {one["name"]: schema_of(one)["parameters"] for one in case.functions}
            theirs = calls_of(read(text, form, tools=tools, streams=False))
            plain = [parsed(one) for one in CALL.findall(text)]
            whole = [one for one in plain if isinstance(one, dict) and one.get("name") in tools]
            assert theirs == [(one["name"], one["arguments"]) for one in whole if "arguments" in one], text
        counts = right[case.category, choice]
        for place, answer in enumerate((calls, theirs)):
            counts[place] += bool(check(case, answer)["valid"])
        counts[2] += calls == theirs
    print({" ".join(key): counts for key, counts in right.items()}, "right of each: gateway, llama.cpp; the same")
    for key, (mine, others, _) in right.items():
        # Weights of 4 bits round otherwise there: one answer in ten may be another one.
        assert mine >= others - CASES // 10, key
    assert sum(mine for mine, _, _ in right.values()) >= sum(others for _, others, _ in right.values()) - CASES // 10
