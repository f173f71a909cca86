"""API keys: a file with a line for each, its name, its hash and its limits, and the check of a request's key."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shapeshift.errors import InvalidInputError
from shapeshift.gateway.errors import ApiError, unavailable

_LOG = logging.getLogger("shapeshift.gateway")
_LIMITS = "requests_per_minute", "tokens_per_minute"
_LIMIT = re.compile(rf" ({'|'.join(_LIMITS)})=([1-9][0-9]{{0,8}})")
_LINE = re.compile(rf"([A-Za-z0-9._-]{{1,64}}) ([0-9a-f]{{64}})((?:{_LIMIT.pattern})*)")
_PREFIX = "sk-"


@dataclass(frozen=True)
class Key:
    """A key. Its limits are those of all keys of this name; None: no limit."""

    name: str
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


def hash_of(key: str) -> str:
    """What the file holds of a key. Keys are random, of 256 bits, so that a plain hash cannot be reversed."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()


def add(file: Path, name: str) -> str:
    """Make a key, append its name and hash to the file (mode 0600), and return the key, which is stored nowhere."""
    key = _PREFIX + secrets.token_urlsafe(32)
    line = f"{name} {hash_of(key)}"
    if not _LINE.fullmatch(line):
        raise InvalidInputError("key name", name, "1 to 64 letters, digits, '.', '_' or '-'")
    if file.exists() and name in ApiKeys(file).names():
        raise InvalidInputError("key name", name, f"a name that {file} does not have yet")
    # The last line of a file that was written by hand may have no end.
    held = file.read_bytes() if file.exists() else b""
    begin = "\n" if held and not held.endswith(b"\n") else ""
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "a") as stream:
        stream.write(f"{begin}{line}\n")
    return key


class ApiKeys:
    """The keys of a file, which is read again after `check_s`, and at every request while there are none.

    A line that is no key is logged and counted; the others hold. Raises InvalidInputError for a file that cannot be
    read, or that has such lines only. usual: the limits of a key whose line has none.
    """

    def __init__(self, file: Path, check_s: float = 1.0, usual: Key = Key("")) -> None:
        self._file = file
        self._check_s = check_s
        self._usual = usual
        self._content: bytes | None = None
        self._keys: dict[str, Key] = {}
        self._checked_at = 0.0
        self.num_broken = 0
        self._read()
        if self.num_broken and not self._keys:
            raise InvalidInputError("api_keys", str(file), "lines of a name and a hash, as --new-key writes them")

    def names(self) -> set[str]:
        """The names of the keys."""
        return {key.name for key in self._keys.values()}

    def find(self, key: str) -> Key | None:
        """The key, if the file has it. Raises InvalidInputError while the file cannot be read."""
        # None are there also while somebody writes the file.
        if not self._keys or time.monotonic() - self._checked_at > self._check_s:
            self._read()
        # The hash is looked up: how long that takes says nothing about any key.
        return self._keys.get(hash_of(key))

    def of(self, authorizations: Sequence[str]) -> Key | ApiError:
        """The key of a request with these headers `Authorization`, or the answer to one that may not come in."""
        scheme, _, key = authorizations[0].partition(" ") if len(authorizations) == 1 else ("", "", "")
        if len(authorizations) > 1:
            reason = "got several headers; one is allowed"
        elif scheme.lower() != "bearer" or not key.strip():
            reason = "no API key; send the header `Authorization: Bearer KEY`"
        else:
            try:
                if (entry := self.find(key.strip())) is not None:
                    return entry
            except InvalidInputError:
                return unavailable("api_keys: the gateway cannot read its keys, see its log; retry later")
            reason = "this API key is not known"
        return ApiError(401, f"Authorization: {reason}", code="invalid_api_key", headers={"www-authenticate": "Bearer"})

    def _read(self) -> None:
        self._checked_at = time.monotonic()
        try:
            content = self._file.read_bytes()
        except OSError as error:
            refusal = InvalidInputError("api_keys", str(self._file), f"a readable file ({error.strerror})")
            if self._content is not None:
                _LOG.error("%s; until it is back no key is accepted", refusal)
            self._content, self._keys = None, {}
            raise refusal from None
        if content != self._content:
            self._content, self._keys, self.num_broken = content, {}, 0
            # One line that is not UTF-8 is no key; the others are.
            for number, line in enumerate(content.decode(errors="replace").splitlines(), 1):
                self._take(number, line.strip())

    def _take(self, number: int, line: str) -> None:
        if match := _LINE.fullmatch(line):
            limits = {name: int(most) for name, most in _LIMIT.findall(match[3])}
            self._keys[match[2]] = replace(self._usual, name=match[1], **limits)
        elif line and not line.startswith("#"):
            self.num_broken += 1
            # Not what it holds, which may be a key.
            _LOG.error("api_keys: line %d of %s is not a name, a hash and limits; it is left out", number, self._file)
