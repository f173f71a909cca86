"""Jinja's sandbox for chat templates, set up as transformers sets it up (`apply_chat_template`)."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


def compiled(source: str) -> Template:
    """The template of `source`. Raises TemplateError, or what Python's compiler raises for a source that it refuses."""
    return _ENVIRONMENT.from_string(source)


def names_read(source: str) -> frozenset[str]:
    """The names that the template of `source` expects to be given. Raises as `compiled`."""
    return frozenset(meta.find_undeclared_variables(_ENVIRONMENT.parse(source)) - _ENVIRONMENT.globals.keys())


class _Generation(Extension):
    """`{% generation %}` marks what an assistant writes, for training: here it is what it encloses."""

    tags = {"generation"}  # noqa: RUF012  Jinja's attribute

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_enclosed"), [], [], body).set_lineno(line)

    def _enclosed(self, caller: Macro) -> str:
        return caller()


class _Dict:
    """Python's `dict` without its other attributes, which lead out of the sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """Jinja's namespace without names that begin with an underscore, which lead out of the sandbox."""

    # `self` may be the name of a value.
    def __init__(*args: Any, **kwargs: Any) -> None:  # noqa: N805
        self, *positional = args
        values = dict(*positional, **kwargs)
        for name in values:
            _require_public(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _require_public(name)
        super().__setitem__(name, value)


def _require_public(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no {name!r}: its names begin with a letter")


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own filter escapes what means something in HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)  # noqa: DTZ005  the local time, as in transformers


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment


_ENVIRONMENT = _environment()
