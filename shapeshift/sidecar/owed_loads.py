"""Models that the sidecar has unloaded because their process died, until it has loaded them again."""

from __future__ import annotations

import contextlib
import json
import threading
from pathlib import Path
from typing import Any

from shapeshift import files


class OwedLoads:
    """Thread-safe. In a file too, so that the next sidecar loads them if this one ends before. file: None for none."""

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._configs: dict[str, dict[str, Any]] = {}
        if file is not None:
            with contextlib.suppress(OSError, ValueError, AttributeError):
                found = json.loads(file.read_text())
                self._configs = {name: config for name, config in found.items() if isinstance(config, dict)}

    def names(self) -> frozenset[str]:
        """The models that are to be loaded again."""
        with self._lock:
            return frozenset(self._configs)

    def config(self, model: str) -> dict[str, Any] | None:
        """The configuration with which `model` was loaded; None if nothing is owed."""
        with self._lock:
            return self._configs.get(model)

    def add(self, model: str, config: dict[str, Any]) -> None:
        """Remember a model before it is unloaded. Raises OSError where the file cannot be written: nothing is owed."""
        with self._lock:
            self._write({**self._configs, model: config})
            self._configs[model] = config

    def remove(self, model: str) -> None:
        """Forget a model that is loaded."""
        with self._lock:
            if self._configs.pop(model, None) is not None:
                # What stays in the file is loaded once more by the next sidecar.
                with contextlib.suppress(OSError):
                    self._write(self._configs)

    def _write(self, configs: dict[str, dict[str, Any]]) -> None:
        if self._file is not None:
            files.replace_text(self._file, json.dumps(configs, indent=1) + "\n", durable=False)
