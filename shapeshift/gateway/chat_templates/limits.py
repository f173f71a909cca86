"""How much a chat template may do: steps, time, and the text and values that it makes."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jinja2 import TemplateError
from jinja2.utils import Namespace

MAX_CHARACTERS = 1 << 20
"""Of a rendered text, and of every text that a template makes."""
MAX_SECONDS = 2.0
_MAX_STEPS = 100_000
# Characters of the template times steps: a step may put the whole template into a text.
_MAX_WORK = 1 << 28
# Whole numbers given to filters, which repeat spaces or items so often; and to functions.
MAX_FILTER_NUMBER, MAX_NUMBER = 256, 100_000
_MAX_BITS = 4096
# Values within the lists and dictionaries that a template makes, as often as it makes or writes them.
_MAX_VALUES = 2_000_000
# Of a width in a format.
_WIDE = re.compile(r"\d{4}")
_CONTAINERS = (list, tuple, dict, Namespace)
# Where Jinja's namespaces keep theirs.
_ATTRIBUTES = "_Namespace__attrs"
# Characters within lists, and those that any other value counts as.
_MAX_WITHIN, _OTHER_CHARACTERS = 16 * MAX_CHARACTERS, 8


class TemplateLimitError(TemplateError):
    """A template does more than it may."""


class _Budget:
    """What one rendering may still do."""

    def __init__(self, template_length: int) -> None:
        self._end = time.monotonic() + MAX_SECONDS
        self._steps = min(_MAX_STEPS, _MAX_WORK // max(1, template_length))
        self._left_characters = MAX_CHARACTERS
        self._values = _MAX_VALUES

    def step(self) -> None:
        self._steps -= 1
        if self._steps < 0:
            raise TemplateLimitError("the template takes too many steps")
        self.check_time()

    def check_time(self) -> None:
        if time.monotonic() > self._end:
            raise TemplateLimitError(f"the template takes more than {MAX_SECONDS:g} s")

    def count(self, values: int) -> None:
        self._values -= values
        if self._values < 0:
            raise TemplateLimitError("the template makes lists of too many values")
        self.check_time()

    def write(self, characters: int) -> None:
        self._left_characters -= characters
        if self._left_characters < 0:
            raise TemplateLimitError(f"the template makes more than {MAX_CHARACTERS} characters")


_budget: ContextVar[_Budget | None] = ContextVar("budget", default=None)


def step() -> None:
    """Count a step of the rendering that runs. This and the others raise TemplateLimitError."""
    budget = _budget.get()
    if budget is not None:
        budget.step()


def sized(value: Any) -> Any:
    """`value`, which the template has made, if it is not too large."""
    require_length(length(value))
    if isinstance(value, _CONTAINERS):
        characters(value)
    return value


def characters(value: Any) -> int:
    """Of `value` as text, about; every value within lists counts, as often as it is there."""
    if isinstance(value, str):
        return len(value)
    budget, total, left = _budget.get(), 0, [value]
    while left:
        one = left.pop()
        if isinstance(one, Namespace):
            one = getattr(one, _ATTRIBUTES)
        if isinstance(one, dict):
            left += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple):
            left += one
        else:
            total += len(one) if isinstance(one, str) else _OTHER_CHARACTERS
        if total > _MAX_WITHIN:
            raise TemplateLimitError(f"the template makes lists of more than {_MAX_WITHIN} characters")
        if budget is not None:
            budget.count(1)
    return total


def length(value: Any) -> int:
    """Characters of a text, values of a list; 0 for anything else."""
    return len(value) if isinstance(value, str | list | tuple | dict) else 0


def require_length(size: int) -> None:
    """Of a text or list that the template is about to make."""
    if size > MAX_CHARACTERS:
        raise TemplateLimitError(f"the template makes a text or list longer than {MAX_CHARACTERS}")


def require_numbers(values: Iterable[Any], most: int) -> None:
    """Of the arguments of a function or filter."""
    if any(isinstance(value, int) and abs(value) > most for value in values):
        raise TemplateLimitError(f"the template passes a number above {most}")


def require_narrow(text: str) -> None:
    """Of a text that may be a format."""
    if _WIDE.search(text) and ("%" in text or "{" in text):
        raise TemplateLimitError("the template formats with a width of more than 3 digits")


def require_product(operator: str, left: Any, right: Any) -> None:
    """Of the operands of * and **."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        if bits > _MAX_BITS:
            raise TemplateLimitError(f"the template makes a number of more than {_MAX_BITS} bits")
    elif operator == "*" and isinstance(left, int) != isinstance(right, int):
        count, items = (left, right) if isinstance(left, int) else (right, left)
        require_length(length(items) * max(0, count))


def written(value: Any) -> Any:
    """Called with every value that is put out."""
    budget = _budget.get()
    if budget is not None:
        budget.write(characters(value))
    return value


@contextmanager
def budget_of(template_length: int) -> Iterator[None]:
    """The budget of one rendering, of a template of so many characters."""
    token = _budget.set(_Budget(template_length))
    try:
        yield
    finally:
        _budget.reset(token)
