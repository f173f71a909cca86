"""Others that act on the same server: a second writer of model control, a second sidecar; and threads that hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial

from bench.drill import models
from bench.drill.faults.scene import Fault, Scene
from bench.drill.faults.signals import WHOLE_AFTER_STOP_S, WHOLE_S
from shapeshift.errors import ShapeshiftError
from shapeshift.triton.embedded import processes
from shapeshift.triton.keys import KEY_VARIABLE, read_key

_WRITES = 6
_SECOND_S = 5.0
_HUNG_S = 30.0


def faults() -> Iterator[Fault]:
    """Each of them."""
    yield Fault("a second writer of model control", _second_writer, WHOLE_S, holders=("encode",), held_s=_HUNG_S)
    yield Fault("two sidecars, and SIGKILL a front", _two_sidecars, WHOLE_S, holders=("encode",), held_s=_SECOND_S + 1)
    # A hung process takes requests, forwarded ones too, until another has replaced it.
    for front, holders in (("encode", ("encode",)), ("generate", ("generate", "generate_unary"))):
        yield Fault(
            f"a thread of {front} hangs", partial(_hang, front), WHOLE_AFTER_STOP_S, holders=holders, held_s=_HUNG_S
        )


def _second_writer(scene: Scene) -> bool:
    """It reloads a front again and again while the sidecar heals that front and a worker."""
    with scene.site.control() as control:
        for number in range(_WRITES):
            try:
                config = control.config("encode")
                config["parameters"]["queue_rows"] = {"string_value": str(1000 + number)}
                if number == 1:
                    os.kill(scene.site.pid("encode"), signal.SIGKILL)
                if number == 2:
                    control.unload(f"{models.WITH_WORKERS}_w01")
                control.load("encode", config)
            except ShapeshiftError as error:
                scene.say(f"the second writer: {error}")
    return False


def _two_sidecars(scene: Scene) -> bool | str:
    """One with the same build folder must end at once; one with another also heals the front."""
    settings = scene.site.settings
    command = [sys.executable, "-P", "-m", "shapeshift.cli.main", "sidecar"]
    same = subprocess.run([*command, "--build", str(models.FOLDER)], capture_output=True, text=True, timeout=60.0)
    if same.returncode == 0:
        return "the second sidecar of a build folder did not refuse"
    scene.say(f"the second sidecar of the build folder: {same.stderr.strip()}")
    command += ["--build", str(models.FOLDER / "second"), "--repository", str(models.REPOSITORY)]
    command += ["--server", scene.site.grpc_url, "--metrics", f"http://127.0.0.1:{settings.metrics_port}/metrics"]
    environment = {**os.environ, KEY_VARIABLE: read_key(settings.key_file)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as second:
        try:
            time.sleep(_SECOND_S)
            os.kill(scene.site.pid("encode"), signal.SIGKILL)
            time.sleep(_SECOND_S)
        finally:
            second.terminate()
    return False


def _hang(front: str, scene: Scene) -> bool:
    """A thread sleeps until the sidecar has replaced its process."""
    hung = processes.identify(scene.site.pid(front))
    scene.hang.write_text(str(hung.pid))
    end = time.monotonic() + _HUNG_S
    while processes.is_alive(hung) and time.monotonic() < end:
        time.sleep(0.1)
    if processes.is_alive(hung):
        scene.say(f"{front}: still hung after {_HUNG_S:g} s")
    scene.hang.unlink()
    return True
