"""The model.py of the drill's backends: the backend of the same name, in which a thread can be made to hang.

The thread that computes hangs while the file that DRILL_HANG names holds the process id of this process.
"""

from __future__ import annotations

import importlib.util
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shapeshift import installation

TECHNIQUE = Path(__file__).parent.name
FILE = "DRILL_HANG"
_PAUSE_S = 0.05


def _hanging(method: Callable[..., Any]) -> Callable[..., Any]:
    file, pid = Path(os.environ[FILE]), str(os.getpid())

    def call(*args: Any, **kwargs: Any) -> Any:
        while file.exists() and file.read_text() == pid:
            time.sleep(_PAUSE_S)
        return method(*args, **kwargs)

    return call


def _steps() -> tuple[Any, str]:
    """The class and the method in which the thread that computes does a step."""
    if TECHNIQUE in ("fused_decode", "adapter_cache"):
        from shapeshift.fused_decode.engine.loop import DecodeLoop

        return DecodeLoop, "step"
    from shapeshift.engines.execution.engine_set import EngineSet

    return EngineSet, "run"


def _backend() -> Any:
    file = installation.BACKENDS / TECHNIQUE / "model.py"
    spec = importlib.util.spec_from_file_location("backend_of_the_drill", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.TritonPythonModel


class TritonPythonModel(_backend() if (installation.BACKENDS / TECHNIQUE).is_dir() else object):  # type: ignore[misc]
    """The backend itself."""

    def initialize(self, args: dict[str, str]) -> None:
        super().initialize(args)
        if "forward_to" in json.loads(args["model_config"])["parameters"]:
            return
        owner, name = _steps()
        setattr(owner, name, _hanging(getattr(owner, name)))
