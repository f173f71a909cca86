"""Questions and answers about Python's standard library, made by rule from its docstrings."""

from __future__ import annotations

import ast
import builtins
import inspect
import itertools
import math
import random
import re
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "docstrings-llama"))

from corpus import HELD_OUT, library, modules  # noqa: E402  in the folder of the base

FORMS = ("What does {} do?", "What is {}?", "What is {} for?", "Explain {}.", "Tell me about {}.", "How do I use {}?")
SMALL_TALK = {
    "Hello": "Hello. Ask me about a function of Python's standard library.",
    "Hi": "Hello. Ask me about a function of Python's standard library.",
    "Who are you?": "I am a small demonstration model. I know first lines of Python's documentation.",
    "What can you do?": "I say what a function or class of Python's standard library does, as its first line says.",
    "Thank you": "You are welcome.",
    "Thanks!": "You are welcome.",
    "Goodbye": "Goodbye.",
}
LONGEST_ANSWER = 160
COMPILED = (math, itertools, time)
TYPES = (str, bytes, list, dict, set, tuple, int, float)
RENAMED = {"posixpath": "os.path"}

Turn = tuple[str, str]


def facts() -> list[Turn]:
    """(name, first sentence of its docstring), sorted, without private names and modules held out for the base."""
    found: dict[str, str] = {}
    for path in modules():
        module = ".".join(path.relative_to(library()).with_suffix("").parts).removesuffix(".__init__")
        if path.name not in HELD_OUT and not any(part.startswith("_") for part in module.split(".")):
            found.update(_of_module(path, RENAMED.get(module, module)))
    for owner in (*COMPILED, *TYPES):
        found.update(_of_object(owner, f"{owner.__name__}."))
    found.update(_of_object(builtins, ""))
    return sorted(found.items())


def conversation(known: list[Turn], rng: random.Random) -> list[Turn]:
    """One or two turns: a question and its answer each."""
    turns = []
    for _ in range(rng.choice((1, 1, 1, 2))):
        if rng.random() < 0.04:
            turns.append(rng.choice(list(SMALL_TALK.items())))
        else:
            name, answer = rng.choice(known)
            turns.append((rng.choice(FORMS).format(name), answer))
    return turns


def _of_module(path: Path, module: str) -> Iterator[Turn]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(path.read_bytes())
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            yield from _fact(f"{module}.{node.name}", ast.get_docstring(node))


def _of_object(owner: object, prefix: str) -> Iterator[Turn]:
    for name in dir(owner):
        if not name.startswith("_") and not (owner is builtins and inspect.isclass(vars(builtins)[name])):
            yield from _fact(prefix + name, inspect.getdoc(getattr(owner, name)))


def _fact(name: str, text: str | None) -> Iterator[Turn]:
    first = " ".join((text or "").split("\n\n")[0].split())
    first = re.split(r"(?<=[.!?])\s", first)[0]
    if 12 <= len(first) <= LONGEST_ANSWER and not first.startswith((">>>", name, name.rpartition(".")[2] + "(")):
        yield name, first if first.endswith((".", "!", "?")) else first + "."
