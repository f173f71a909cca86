"""API keys: a file with a line `name hash` for each, and the check of a request's key."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import time
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from shapeshift.errors import InvalidInputError
from shapeshift.gateway.errors import ApiError

_LINE = re.compile(r"([A-Za-z0-9._-]{1,64}) ([0-9a-f]{64})")
_PREFIX = "sk-"
_CHECK_S = 1.0
# Without a key: what a load balancer asks.
_OPEN = ("/health",)


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
    """The keys of a file, which is read again when it changes. Raises InvalidInputError for an invalid line."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._names: dict[str, str] = {}
        self._stamp = (0, 0)
        self._checked_at = 0.0
        self._read()

    def names(self) -> set[str]:
        """The names of the keys."""
        return {*self._names.values()}

    def holds(self, key: str) -> bool:
        """Whether the file has this key. While its new content is invalid, the old one holds."""
        if time.monotonic() - self._checked_at > _CHECK_S:
            try:
                self._read()
            except InvalidInputError:
                self._stamp = (0, 0)
        # The hash is looked up: how long that takes says nothing about any key.
        return hash_of(key) in self._names

    def _read(self) -> None:
        self._checked_at = time.monotonic()
        try:
            stat = self._file.stat()
            if (stat.st_mtime_ns, stat.st_size) == self._stamp:
                return
            lines = self._file.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInputError("api_keys", str(self._file), f"a readable file ({error})") from None
        found = {}
        for number, line in enumerate(lines, 1):
            if line.strip() and not line.startswith("#"):
                if (match := _LINE.fullmatch(line.strip())) is None:
                    raise InvalidInputError("api_keys", f"{self._file} line {number}", "a name and a hash in each line")
                found[match[2]] = match[1]
        self._names, self._stamp = found, (stat.st_mtime_ns, stat.st_size)


class RequireKey:
    """Answers requests without a key of `keys` with status 401."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN and (refusal := self._refusal(scope)):
            await refusal.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        given = [value.decode("latin-1") for name, value in scope["headers"] if name == b"authorization"]
        headers = {"www-authenticate": "Bearer"}
        if len(given) > 1:
            text = "Authorization: got several headers; one is allowed"
            return ApiError(401, text, code="invalid_api_key", headers=headers)
        scheme, _, key = given[0].partition(" ") if given else ("", "", "")
        if scheme.lower() != "bearer" or not key.strip():
            text = "Authorization: no API key; send the header `Authorization: Bearer KEY`"
            return ApiError(401, text, code="invalid_api_key", headers=headers)
        if not self._keys.holds(key.strip()):
            return ApiError(401, "Authorization: this API key is not known", code="invalid_api_key", headers=headers)
        return None
