"""Jinja's sandbox for chat templates, which come with a checkpoint: they reach nothing, and end soon.

Jinja's own sandbox keeps a template from Python's objects. This one also counts the steps of its loops, its calls and
the text that it makes, and refuses a template that goes on for too long or makes too much.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any, cast

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from shapeshift.gateway.chat_templates import limits
from shapeshift.gateway.chat_templates.text import MODULO, joined, require_makes_little


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Compiles and renders chat templates as transformers does, within limits.

    Blocks are trimmed, `break`, `continue` and `generation` blocks are known, and so are the functions raise_exception
    and strftime_now; tojson leaves non-ASCII characters and HTML as they are.
    """

    intercepted_binops = frozenset(("*", "**", "+", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _Generation],
            finalize=limits.written,
            # Nothing is computed while a template is compiled, outside of any budget.
            optimized=False,
        )
        self.filters["tojson"] = _to_json
        self.filters = {name: _checked(name, one) for name, one in self.filters.items()}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        del self.globals["lipsum"]

    def render(self, template: Any, length: int, values: dict[str, Any]) -> str:
        """The text of `template`, which `from_string` made of a source of so many characters.

        Raises TemplateLimitError beyond a limit, and whatever the template raises.
        """
        parts, total = [], 0
        with limits.budget_of(length):
            for part in template.generate(**values):
                limits.step()
                parts.append(part)
                total += len(part)
                limits.require_length(total)
        return "".join(parts)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805  Jinja's names
        limits.step()
        limits.require_numbers((*args, *kwargs.values()), limits.MAX_NUMBER)
        # Jinja wraps the method `format` of a text.
        method = getattr(__obj, "__wrapped__", __obj)
        if isinstance(text := getattr(method, "__self__", None), str):
            limits.require_narrow(text)
            if method.__name__ == "join" and args:
                args = (joined(text, args[0]), *args[1:])
            require_makes_little(method.__name__, text, args, kwargs)
            # Its numbers are widths and counts.
            limits.require_numbers((*args, *kwargs.values()), limits.MAX_FILTER_NUMBER)
        return limits.sized(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        limits.step()
        if operator in ("*", "**"):
            limits.require_product(operator, left, right)
        elif operator == "+":
            limits.require_length(limits.length(left) + limits.length(right))
        elif isinstance(left, str):
            limits.require_narrow(left)
            require_makes_little(MODULO, left, [right], {})
        return limits.sized(super().call_binop(context, operator, left, right))

    def counted(self, items: Iterable[Any]) -> Iterator[Any]:
        """`items` of a loop, one step each."""
        for item in items:
            limits.step()
            yield item

    def concat(self, parts: Iterable[str]) -> str:
        """The text of a macro or a block, in the name that compiled templates call."""
        texts = list(parts)
        limits.require_length(sum(map(len, texts)))
        return "".join(texts)

    def joined(self, *parts: Any) -> str:
        """The operator `~`."""
        limits.require_length(sum(map(limits.characters, parts)))
        return "".join(map(str, parts))

    def made(self, value: Any) -> Any:
        """A list, tuple or dictionary that the template writes out."""
        return limits.sized(value)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Counting().visit(super()._parse(source, name, filename))
        return tree


class _Counting(NodeTransformer):
    """Puts the environment's checks into loops and concatenations, which Jinja compiles to Python's own."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802  Jinja's name
        self.generic_visit(node)
        node.iter = _call("counted", [cast(nodes.Expr, node.iter)])
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802  Jinja's name
        self.generic_visit(node)
        return _call("joined", node.nodes)

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802  Jinja's name
        self.generic_visit(node)
        return _call("made", [node])

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802  Jinja's name
        self.generic_visit(node)
        return _call("made", [node])

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802  Jinja's name
        self.generic_visit(node)
        return _call("made", [node]) if node.ctx == "load" else node


class _Generation(Extension):
    """`{% generation %}` marks what an assistant writes, for training: here it is what it encloses."""

    tags = {"generation"}  # noqa: RUF012  Jinja's attribute

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _call(name: str, arguments: list[nodes.Expr]) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None)


def _checked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter `name` with checks of its arguments and its result."""
    first = 2 if hasattr(function, "jinja_pass_arg") else 1

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        limits.step()
        limits.require_numbers((*args[first:], *kwargs.values()), limits.MAX_FILTER_NUMBER)
        before, value, given = args[: first - 1], args[first - 1], args[first:]
        if name == "format" and isinstance(value, str):
            limits.require_narrow(value)
        if name == "join":
            value = joined(kwargs.get("d", given[0] if given else ""), value)
        require_makes_little(MODULO if name == "format" else name, value, given, kwargs)
        return limits.sized(function(*before, value, *given, **kwargs))

    return checked


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)  # noqa: DTZ005  the local time, as in transformers
