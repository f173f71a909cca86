"""What the documentation's tests read from the code itself: almost nothing of it is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from shapeshift.fleet.metrics_proxy import CERTIFICATE_EXPIRY
from tests.docs.docs_pages import PROJECT

_KINDS = {
    "Counter": "counter",
    "Counters": "counter",
    "Gauge": "gauge",
    "Gauges": "gauge",
    "Info": "gauge",
    "Histogram": "histogram",
}
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


class Metric(NamedTuple):
    """A metric as the code declares it. labels: those beside `model` and `pid`; packages: of the library, in order."""

    kind: str
    labels: tuple[str, ...]
    help: str = ""
    packages: tuple[str, ...] = ()


@cache
def declared_metrics() -> Mapping[str, Metric]:
    """The code's metrics by exported name. Parsing the whole library takes a second, so each process does it once."""
    metrics: dict[str, Metric] = {}
    for module, path in modules("shapeshift").items():
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args):
                continue
            kind, name = _KINDS.get(node.func.id), node.args[0]
            if kind is not None and isinstance(name, ast.Constant) and isinstance(name.value, str):
                key = f"shapeshift_{name.value}"
                before = metrics.get(key, Metric(kind, ()))
                packages = dict.fromkeys((*before.packages, package(module).rpartition(".")[2]))
                helps = dict.fromkeys((*filter(None, before.help.split(" / ")), *_text(node.args[1:2])))
                metrics[key] = Metric(kind, tuple(_labels(node, tree)), " / ".join(helps), tuple(packages))
    return MappingProxyType(metrics)


def _text(nodes: list[ast.expr]) -> list[str]:
    """The strings among `nodes`; what an f-string fills in is written as …."""
    parts = [node.values if isinstance(node, ast.JoinedStr) else [node] for node in nodes]
    strings = [[str(part.value) if isinstance(part, ast.Constant) else "…" for part in some] for some in parts]
    return ["".join(some) for some in strings if some != ["…"]]


def exported_names() -> set[str]:
    """The names of the series on the metrics page: a histogram has three. A node adds one of its own."""
    endings = {"histogram": ("_bucket", "_sum", "_count")}
    return {CERTIFICATE_EXPIRY} | {
        name + ending for name, metric in declared_metrics().items() for ending in endings.get(metric.kind, ("",))
    }


def _labels(call: ast.Call, tree: ast.Module) -> list[str]:
    """The labels of one metric: a dictionary, a variable that is one, or what `Counters` and `Info` make of theirs."""
    kind = call.func.id if isinstance(call.func, ast.Name) else ""
    if kind == "Histogram":
        return ["le"]
    if kind in ("Counters", "Gauges"):
        return [str(node.value) for node in call.args[2:3] if isinstance(node, ast.Constant)]
    if kind == "Info":
        called = {node.id for node in ast.walk(call) if isinstance(node, ast.Name)}
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in called]
        return [key for function in functions for node in ast.walk(function) for key in _keys(node)]
    given = [*call.args[1:], *(keyword.value for keyword in call.keywords)]
    for node in given:
        if keys := _keys(node):
            return keys
        if isinstance(node, ast.Name):
            for other in ast.walk(tree):
                if isinstance(other, ast.Assign) and ast.unparse(other.targets[0]) == node.id and _keys(other.value):
                    return _keys(other.value)
    return []


def _keys(node: ast.AST) -> list[str]:
    """The keys of a dictionary of constant keys; none for anything else."""
    keys = node.keys if isinstance(node, ast.Dict) else []
    return [str(key.value) for key in keys if isinstance(key, ast.Constant)]
