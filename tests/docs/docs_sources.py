"""What the documentation's tests read from the code itself, without importing it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.docs.docs_pages import PROJECT

PACKAGES = ("shapeshift", "build_engines", "backends", "client", "bench")


def modules(*roots: str) -> dict[str, Path]:
    """Every module below the folders `roots` that holds code, by dotted name."""
    found = {}
    for root in roots:
        for path in sorted((PROJECT / root).rglob("*.py")):
            parts = path.relative_to(PROJECT).with_suffix("").parts
            if parts[-1] != "__init__":
                found[".".join(parts)] = path
    return found


def imports(path: Path) -> set[str]:
    """The dotted names that a file imports anywhere in it: `a.b` for `import a.b`, `a.b.c` for `from a.b import c`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def package(name: str) -> str:
    """The package that a dotted name lies in: two steps deep in the library, one elsewhere."""
    parts = name.split(".")
    return ".".join(parts[: 2 if parts[0] == "shapeshift" else 1])


def texts(path: Path) -> Iterator[str]:
    """Every string of a file; what an f-string fills in is written as …."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def metric_names() -> set[str]:
    """The names that the code's counters, gauges and histograms are exported under."""
    found: set[str] = set()
    for path in modules("shapeshift").values():
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args):
                continue
            name = node.args[0]
            if node.func.id in ("Counter", "Counters", "Gauge", "Histogram", "Info") and isinstance(name, ast.Constant):
                assert isinstance(name.value, str)
                endings = ("_bucket", "_sum", "_count") if node.func.id == "Histogram" else ("",)
                found |= {f"shapeshift_{name.value}{ending}" for ending in endings}
    return found
