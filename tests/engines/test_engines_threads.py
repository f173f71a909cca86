"""Concurrent first calls of engine threads in a fresh process do not deadlock."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# A slow NumpyVersion, which the binding calls while it makes its table of types, lets both threads come to it.
FIRST_CALLS = """
import sys, threading, time
from pathlib import Path

import numpy as np
import numpy.lib

usual = numpy.lib.NumpyVersion.__init__

def slow(self, version):
    time.sleep(0.2)
    usual(self, version)

numpy.lib.NumpyVersion.__init__ = slow
from shapeshift.engines.providers.openvino import PROVIDER

runtime = PROVIDER.open(Path(sys.argv[1]), "f32", 1)
engines = [runtime.engine(None, None) for _ in range(2)]
answers = []

def run(engine):
    answers.append(engine.run({"x": np.ones((2, 3), np.float32)})["y"].sum())

threads = [threading.Thread(target=run, args=(engine,), daemon=True) for engine in engines]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(*answers)
"""


def test_concurrent_first_calls_do_not_deadlock(tmp_path: Path) -> None:
    import numpy as np
    import openvino
    from openvino import opset13

    x = opset13.parameter([-1, -1], np.float32, name="x")
    y = opset13.relu(x)
    y.output(0).get_tensor().set_names({"y"})
    openvino.save_model(openvino.Model([y], [x], "relu"), tmp_path / "model.xml")
    # A process whose threads wait for each other does not end by itself.
    done = subprocess.run(
        [sys.executable, "-c", FIRST_CALLS, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.split() == ["6.0", "6.0"], done.stderr
