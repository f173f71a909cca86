"""The text of the demo checkpoint: the topics of help() and the docstrings of CPython 3.11 and 3.12."""

from __future__ import annotations

import ast
import inspect
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

SHORTEST = 24
"""Characters of the shortest docstring that is used."""
EXCLUDED = {"site-packages", "dist-packages", "test", "tests", "__pycache__", "ensurepip", "lib2to3", "idlelib"}
"""Folders that are no library code, or that some distributions package separately."""
EXCLUDED |= {"tkinter", "turtledemo", "distutils", "asyncore.py", "asynchat.py", "smtpd.py", "imp.py", "turtle.py"}
HELD_OUT = ("bisect.py", "calendar.py", "fractions.py", "selectors.py", "shutil.py", "textwrap.py")
"""Modules whose docstrings are not used for training."""


def training() -> list[str]:
    """Documents to train on: topics, then docstrings by file and line, without duplicates and held-out ones."""
    excluded = set(held_out())
    documents = dict.fromkeys(inspect.cleandoc(topics[name]) for name in sorted(topics))
    for path in modules():
        if path.name not in HELD_OUT:
            documents.update(dict.fromkeys(docstrings(path)))
    return [text for text in documents if text not in excluded]


def held_out() -> list[str]:
    """Docstrings of the modules HELD_OUT, without duplicates."""
    return list(dict.fromkeys(text for name in HELD_OUT for text in docstrings(library() / name)))


def library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def modules() -> Iterator[Path]:
    for path in sorted(library().rglob("*.py")):
        if not EXCLUDED & set(path.relative_to(library()).parts):
            yield path


def docstrings(path: Path) -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(path.read_bytes())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            if len(text) >= SHORTEST:
                yield text
