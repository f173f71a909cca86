"""The key for model control, shared memory, tracing and logging. Only users who can read its file can use these."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from pathlib import Path

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
        draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        descriptor = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_hex(16) + "\n")
            with contextlib.suppress(FileExistsError):
                os.link(draft, path)
        finally:
            draft.unlink()
    return read_key(path)


def is_exposed(path: Path) -> bool:
    """Whether the mode of a key's file lets other users read it. Raises OSError.

    A file of a volume has the mode that whoever mounts it gives to all its files, and nobody can change it: one of a
    Secret of Kubernetes, which has the link `..data` beside it, or one that is mounted read-only.
    """
    if (path.parent / "..data").is_symlink() or os.statvfs(path).f_flag & os.ST_RDONLY:
        return False
    return bool(path.stat().st_mode & 0o077)


def read_key(path: Path) -> str:
    """The key in `path`. Raises NotFoundError if it is missing, ShapeshiftError if it `is_exposed`."""
    try:
        text = path.read_text().strip()
        exposed = is_exposed(path)
    except FileNotFoundError:
        raise NotFoundError(f"no key at {path}; `shapeshift serve` creates it") from None
    except OSError as error:
        raise ShapeshiftError(f"cannot read the key {path}: {error.strerror}; run as its owner") from error
    if exposed:
        raise ShapeshiftError(f"other users can read {path}; run `chmod 600` on it, or delete it to get a new key")
    if not _KEY.fullmatch(text):
        raise ShapeshiftError(f"{path} does not contain 32 hexadecimal digits; delete it to get a new key")
    return text
