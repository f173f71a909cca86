"""The polymorph backend with emulated engines, one thread of which can be made to hang.

The file `hang` beside config.pbtxt holds the name of a thread and the number of a process: while it exists, that thread
of that process sleeps at its next step.
"""

import os
import runpy
import time
from pathlib import Path
from typing import Any

from shapeshift import installation
from shapeshift.engines.providers.emulated import EmulatedEngine
from shapeshift.engines.text.tokenizer import TextTokenizer
from shapeshift.serving.responses import SingleResponse

SWITCH = Path("hang")
_STEPS = {
    "execute": (TextTokenizer, "encode"),
    "engine-0": (EmulatedEngine, "run"),
    "responses": (SingleResponse, "next_response"),
}


def _may_hang(thread: str, kind: type, name: str) -> None:
    step = getattr(kind, name)

    def run(*arguments: Any) -> Any:
        while SWITCH.is_file() and SWITCH.read_text() == f"{thread} {os.getpid()}":
            time.sleep(0.1)
        return step(*arguments)

    setattr(kind, name, run)


for _thread, _step in _STEPS.items():
    _may_hang(_thread, *_step)


_backend = runpy.run_path(str(installation.BACKENDS / "polymorph" / "model.py"))


class TritonPythonModel(_backend["TritonPythonModel"]):  # type: ignore[misc, valid-type]
    def initialize(self, args: dict[str, str]) -> None:
        global SWITCH
        SWITCH = Path(args["model_repository"]) / "hang"
        super().initialize(args)
