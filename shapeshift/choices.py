"""Interchangeable implementations, chosen by the name in a setting and imported at first use."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar, cast

from shapeshift.errors import InvalidInputError

T = TypeVar("T")


class Choices(Mapping[str, T], Generic[T]):
    """What the setting `parameter` can name.

    targets: "module:attribute" of each choice. A choice is imported at its first use, so that a process holds only
    the code that its settings name.
    """

    def __init__(self, parameter: str, targets: Mapping[str, str]) -> None:
        self._parameter = parameter
        self._targets = dict(targets)

    def __getitem__(self, name: str) -> T:
        """The choice called `name`. Raises InvalidInputError that names the parameter and every choice."""
        self.require(name)
        module, _, attribute = self._targets[name].partition(":")
        return cast(T, getattr(importlib.import_module(module), attribute))

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets)

    def __len__(self) -> int:
        return len(self._targets)

    def __contains__(self, name: object) -> bool:
        return name in self._targets

    def require(self, name: str) -> None:
        """Raise InvalidInputError unless `name` is one of the choices. Imports nothing."""
        if name not in self._targets:
            raise InvalidInputError(self._parameter, name, f"one of {', '.join(self._targets)}")
