"""Imports between the project's files, read from the sources: also those inside functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path


@cache
def imports(file: Path, root: Path) -> tuple[tuple[str, int], ...]:
    """Every module that a source file imports anywhere in it, with the line; a name that is a module is one too."""
    return tuple(_imports(file, root))


def _imports(file: Path, root: Path) -> Iterator[tuple[str, int]]:
    package = file.relative_to(root).parent.parts
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield module, node.lineno
            for alias in node.names:
                if source_of(f"{module}.{alias.name}", root) is not None:
                    yield f"{module}.{alias.name}", node.lineno


def source_of(module: str, root: Path) -> Path | None:
    """The file of a module of the project."""
    place = root.joinpath(*module.split("."))
    found = [file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()]
    return found[0] if found else None


def closure(start: Path, root: Path) -> set[Path]:
    """`start`, and all files of the project that it imports, directly or not."""
    found: set[Path] = set()
    left = [start]
    while left:
        file = left.pop()
        if file not in found:
            found.add(file)
            left += [source for module, _ in imports(file, root) if (source := source_of(module, root)) is not None]
    return found


def import_graph(root: Path, *tops: str) -> dict[str, set[str]]:
    """The modules below the folders `tops`, and which of them each imports, by path; packages themselves left out."""
    files = [file for top in tops for file in sorted((root / top).rglob("*.py")) if file.name != "__init__.py"]
    names = {file: file.relative_to(root).as_posix() for file in files}
    return {
        name: {names[found] for module, _ in imports(file, root) if (found := source_of(module, root)) in names}
        for file, name in names.items()
    }


def strongly_connected(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """The circles of `graph`: groups of nodes that all reach one another (Tarjan), each sorted."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(graph[node]):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            at = stack.index(node)
            group = sorted(stack[at:])
            del stack[at:]
            if len(group) > 1 or node in graph[node]:
                found.append(group)

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found
