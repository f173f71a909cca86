"""The adapters that requests may ask for: the registry and multi_lora.json, looked at again and again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError

from shapeshift.adapter_cache import multi_lora, peft, record, registry
from shapeshift.adapter_cache.cache import AdapterCache
from shapeshift.adapter_cache.peft import Base
from shapeshift.adapter_cache.record import Adapter
from shapeshift.errors import InvalidInputError, ShapeshiftError
from shapeshift.serving.log import Log

_BAD = (ShapeshiftError, SafetensorError, OSError)
"""What reading an adapter may raise."""


class Catalogue:
    """What is known, by the name that requests use. `look` is called by one thread, `find` by any.

    What a change of the registry brings is checked to the last weight before it may be asked for, beside what is
    served. An entry that is refused changes nothing: what its name stood for before stays.
    """

    def __init__(self, folder: Path, fixed: Mapping[str, Path], base: Base, cache: AdapterCache, width: int, log: Log):
        """fixed: adapters of multi_lora.json; width: bytes of an element of the pool."""
        self._folder = folder
        self._base = base
        self._cache = cache
        self._width = width
        self._log = log
        self._known: dict[str, Adapter] = {}
        self._stamp: registry.Stamp = None
        self._refused: dict[str, registry.Entry] = {}
        self._fixed = self._read_fixed(fixed)
        self._known = dict(self._fixed)
        self.look(first=True)

    def __len__(self) -> int:
        return len(self._known)

    def all(self) -> list[Adapter]:
        """Whatever may be asked for."""
        return list(self._known.values())

    def find(self, name: str) -> Adapter:
        """The adapter that `name` stands for now. Raises NotFoundError naming some that are known."""
        found = self._known.get(name)
        if found is None:
            registry.check_name(name, "parameter lora_name")
            raise registry.unknown(name, list(self._known), "lora_name")
        return found

    def look(self, first: bool = False) -> bool:
        """Take over what has changed in the registry; whether something has. Never raises.

        first: whether the weights may be left to be checked when they are loaded.
        """
        stamp = registry.stamp(self._folder)
        if stamp == self._stamp and not first:
            return False
        self._stamp = stamp
        try:
            entries = registry.read(self._folder)
        except ShapeshiftError as error:
            self._refuse(f"the registry stays as it was: {error}")
            return False
        self._take_over(entries, first)
        return True

    def _take_over(self, entries: Mapping[str, registry.Entry], first: bool) -> None:
        known = dict(self._fixed)
        for name, entry in entries.items():
            if name in self._fixed:
                self._refuse_once(name, entry, f"{multi_lora.FILE} names another one")
                continue
            old = self._known.get(name)
            if old is not None and old.sha256 == entry.sha256 and old.error is None and _as_read(old):
                known[name] = old
                continue
            made = None if self._refused.get(name) == entry else self._read(name, entry, first)
            if made is not None or old is not None:
                known[name] = made or old  # type: ignore[assignment]
        for name, adapter in known.items():
            if self._known.get(name) is not adapter:
                self._cache.known.add(adapter)
        gone = [adapter for name, adapter in self._known.items() if known.get(name) is not adapter]
        self._known = known
        for adapter in gone:
            self._cache.known.withdraw(adapter)
        self._refused = {name: entry for name, entry in self._refused.items() if entries.get(name) == entry}
        own = known.keys() - self._fixed.keys()
        self._pin([known[name] for name, entry in sorted(entries.items()) if entry.pinned and name in own])

    def _read(self, name: str, entry: registry.Entry, first: bool) -> Adapter | None:
        try:
            folder = registry.place(self._folder, entry)
            source = peft.read(folder, self._base)
            # After the reading: what changes from here on is noticed by the stamp that was read.
            unchanged = entry.stamps == registry.stamps(folder)
            if not first:
                if registry.digest(folder) != entry.sha256:
                    raise InvalidInputError("sha256", entry.sha256, "the hash of the files, which have changed")
                peft.require_finite(source)
            return self._made(name, entry.sha256, source, verified=not first or unchanged)
        except _BAD as error:
            self._refuse_once(name, entry, str(error))
            return None

    def _made(self, name: str, sha256: str, source: peft.PeftAdapter, verified: bool) -> Adapter:
        made = record.make(name, sha256, source, self._base.architecture, self._width)
        made.verified = verified
        if made.elements > self._cache.largest:
            room = self._cache.largest * self._width >> 20
            raise InvalidInputError("adapter", name, f"{made.info.bytes} bytes do not fit into adapter_mb ({room})")
        return made

    def _read_fixed(self, fixed: Mapping[str, Path]) -> dict[str, Adapter]:
        made = {}
        for name, folder in fixed.items():
            try:
                source = peft.read(folder, self._base)
                made[name] = self._made(name, registry.digest(folder), source, verified=True)
                self._cache.known.add(made[name])
            except _BAD as error:
                self._refuse(f"adapter {name} of {multi_lora.FILE} is refused: {error}")
        return made

    def _pin(self, wanted: list[Adapter]) -> None:
        """Pin those that leave room in the reserve for any other one."""
        largest = max((one.elements for one in self._known.values() if one not in wanted), default=0)
        left = self._cache.largest - largest
        chosen = []
        for one in wanted:
            if one.elements > left:
                self._refuse(f"adapter {one.label} is not pinned: adapter_mb leaves too little beside it")
                continue
            left -= one.elements
            chosen.append(one)
        self._cache.ahead.pin(chosen)

    def _refuse_once(self, name: str, entry: registry.Entry, why: str) -> None:
        if self._refused.get(name) != entry:
            self._refused[name] = entry
            self._refuse(f"adapter {name} is refused: {why}")

    def _refuse(self, text: str) -> None:
        self._cache.meters.refused.add()
        self._log(text)


def _as_read(known: Adapter) -> bool:
    """Whether its weights' file is still the one that was read: mended by adding it again, it has another time."""
    return registry.stamps(known.source.folder)[-1:] == (known.source.stamp,)
