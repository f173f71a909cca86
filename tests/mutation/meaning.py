"""Where a change of a source means nothing to a caller, so that no test should notice it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

Place = tuple[int, int]
_GUARDS = ("frozen", "daemon", "slots")
_LAYOUT = ("indent", "ensure_ascii")


class Meaning:
    """The places of one source whose changes are left out; a place is a line, from 1, and a column, from 0."""

    def __init__(self, source: str) -> None:
        nodes = list(ast.walk(ast.parse(source)))
        self._silent = [_span(node) for one in nodes for node in _silent(one)]
        self._tuned = [_span(node) for one in nodes for node in _tuned(one)]

    def is_silent(self, place: Place) -> bool:
        """Whether the place is in one of these: the words of an error or of the log, an assertion, which holds anyway
        (`strict=True` of a `zip` is one), a type, how JSON is laid out, whether a copy that need not be waited for is
        (`non_blocking=True`; the other way round is a change), or a guard (`frozen`, `slots`: against later
        code; `daemon`: for the end of the interpreter).
        """
        return _within(place, self._silent)

    def is_tuned(self, place: Place) -> bool:
        """Whether a number there is one that a person tunes, a constant or a default: another one is not wrong."""
        return _within(place, self._tuned)


def parses(source: str) -> bool:
    """Whether a source is Python at all."""
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


def _silent(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        yield from node.exc.args
    elif isinstance(node, ast.Call) and _name(node.func).endswith("log"):
        yield from node.args
    elif isinstance(node, ast.Assert):
        yield node
    elif isinstance(node, ast.Call) and _name(node.func) == "zip":
        yield from (given.value for given in node.keywords if _is_true(given.value))
    elif isinstance(node, ast.keyword) and (node.arg in (*_GUARDS, *_LAYOUT) or _leaves_a_copy(node)):
        yield node.value
    elif isinstance(node, ast.ClassDef) and any(_name(base) == "Protocol" for base in node.bases):
        yield from node.body
    elif isinstance(node, ast.AnnAssign | ast.arg) and node.annotation is not None:
        yield node.annotation
    elif isinstance(node, ast.FunctionDef) and node.returns is not None:
        yield node.returns


def _tuned(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Module):
        yield from (one.value for one in node.body if isinstance(one, ast.Assign | ast.AnnAssign) and one.value)
    elif isinstance(node, ast.ClassDef):
        yield from (one.value for one in node.body if isinstance(one, ast.AnnAssign) and one.value)
    elif isinstance(node, ast.arguments):
        yield from (one for one in (*node.defaults, *node.kw_defaults) if one is not None)


def _name(node: ast.expr) -> str:
    """The last name of `a.b`, of `a[b]` that of `a`; empty for other expressions."""
    if isinstance(node, ast.Subscript):
        return _name(node.value)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _leaves_a_copy(node: ast.keyword) -> bool:
    return node.arg == "non_blocking" and _is_true(node.value)


def _is_true(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def _span(node: ast.AST) -> tuple[Place, Place]:
    located = node
    assert isinstance(located, ast.expr | ast.stmt) and located.end_lineno and located.end_col_offset is not None
    return (located.lineno, located.col_offset), (located.end_lineno, located.end_col_offset)


def _within(place: Place, spans: list[tuple[Place, Place]]) -> bool:
    return any(start <= place < end for start, end in spans)
