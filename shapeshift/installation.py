"""Where the backends and the pins of this installation are: beside the library in a checkout, inside it in a wheel."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent

# The entry of Python's path from which `shapeshift` is imported.
IMPORT_PATH = _PACKAGE.parent

_ROOT = _PACKAGE if (_PACKAGE / "backends").is_dir() else IMPORT_PATH

# One folder for each backend, as Triton wants them.
BACKENDS = _ROOT / "backends"
# The wheels that `shapeshift setup` downloads, as a requirements file with exact versions.
SERVER_PINS = _ROOT / "requirements" / "server.txt"
# The packages that are tested together, with exact versions; a wheel has no such file.
PINS = _ROOT / "requirements" / "lock.txt"
