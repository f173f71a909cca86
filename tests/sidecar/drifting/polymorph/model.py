"""The polymorph backend with emulated engines that answer wrongly, all of them or those of one process.

The file `wrong` beside config.pbtxt holds the number of a process, or `all`.
"""

import os
import runpy
from pathlib import Path
from typing import Any

from shapeshift import installation
from shapeshift.engines.providers.emulated import EmulatedEngine

SWITCH = Path("wrong")
_run = EmulatedEngine.run


def _may_be_wrong(self: EmulatedEngine, *arguments: Any) -> Any:
    outputs = _run(self, *arguments)
    if SWITCH.is_file() and SWITCH.read_text() in (str(os.getpid()), "all"):
        return {name: values[..., ::-1] for name, values in outputs.items()}
    return outputs


setattr(EmulatedEngine, "run", _may_be_wrong)  # noqa: B010
_backend = runpy.run_path(str(installation.BACKENDS / "polymorph" / "model.py"))


class TritonPythonModel(_backend["TritonPythonModel"]):  # type: ignore[misc, valid-type]
    def initialize(self, args: dict[str, str]) -> None:
        global SWITCH
        SWITCH = Path(args["model_repository"]) / "wrong"
        super().initialize(args)
