"""Names say what a value is. Ten words that fit any value name none, except where they stood before."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
FILLERS = {"own", "found", "made", "given", "asked", "told", "stated", "known", "kept", "wanted"}
# Uses of a filler as a name, by package: a number goes down, never up.
LEFT = {
    "bench": 1,
}


def names(tree: ast.AST) -> Iterator[str]:
    """The variables, parameters and fields that a source gives a name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.arg):
            yield node.arg


def fillers(file: Path) -> list[str]:
    return [name for name in names(ast.parse(file.read_text(encoding="utf-8"))) if name.strip("_") in FILLERS]


def test_no_name_is_a_filler() -> None:
    counts: Counter[str] = Counter()
    for top in ("shapeshift", "backends", "bench", "build_engines", "client"):
        for file in (PROJECT / top).rglob("*.py"):
            parts = file.relative_to(PROJECT).parts
            counts["/".join(parts[: 2 if top == "shapeshift" and len(parts) > 2 else 1])] += len(fillers(file))
    assert {package: count for package, count in counts.items() if count > LEFT.get(package, 0)} == {}


def test_fillers_are_found(tmp_path: Path) -> None:
    source = "def f(given, x):\n    found = [own for own in x]\n    x.kept = 1\n    for asked, y in x: pass\n"
    (tmp_path / "a.py").write_text(source)
    assert sorted(fillers(tmp_path / "a.py")) == ["asked", "found", "given", "kept", "own"]
