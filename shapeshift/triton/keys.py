"""The key for model control, shared memory, tracing and logging. Only users who can read its file can use these."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from pathlib import Path

from shapeshift import files
from shapeshift.errors import NotFoundError, ShapeshiftError

HTTP_HEADER = "shapeshift-key"
KEY_VARIABLE = "SHAPESHIFT_KEY"
GRPC_HEADER = f"triton-grpc-protocol-{HTTP_HEADER}"
RESTRICTED = "model-repository,shared-memory,trace,logging"

_KEY = re.compile(r"[0-9a-f]{32}")


def ensure_key(path: Path) -> str:
    """The key in `path`: 32 hexadecimal digits. A missing file is created, readable only by its owner."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.draft_of(path) as draft:
            files.replace_private(draft, f"{secrets.token_hex(16)}\n".encode())
            with contextlib.suppress(FileExistsError):
                os.link(draft, path)
    return read_key(path)


def read_key(path: Path) -> str:
    """The key in `path`. Raises NotFoundError if it is missing, ShapeshiftError if other users can read it."""
    try:
        text = path.read_text().strip()
        exposed = files.is_exposed(path)
    except FileNotFoundError:
        raise NotFoundError(f"no key at {path}; `shapeshift serve` creates it") from None
    except OSError as error:
        raise ShapeshiftError(f"cannot read the key {path}: {error.strerror}; run as its owner") from error
    if exposed:
        raise ShapeshiftError(f"other users can read {path}; run `chmod 600` on it, or delete it to get a new key")
    if not _KEY.fullmatch(text):
        raise ShapeshiftError(f"{path} does not contain 32 hexadecimal digits; delete it to get a new key")
    return text
