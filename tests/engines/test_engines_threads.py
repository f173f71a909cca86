"""What engines do to the threads and signals of their process. Each test has a fresh process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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


# Two models, closed in the order in which they were opened.
CLOSED_IN_ORDER = """
import gc, os, signal, sys
from pathlib import Path

from shapeshift.engines.providers.openvino import PROVIDER

first, second = (PROVIDER.open(Path(sys.argv[1]), "f32", 1).engine(None, None) for _ in range(2))
del first
gc.collect()
del second
gc.collect()
signal.signal(signal.SIGTERM, lambda *_: print("handled", flush=True))
os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.fixture(scope="module")
def relu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model of one operation."""
    import numpy as np
    import openvino
    from openvino import opset13

    folder = tmp_path_factory.mktemp("relu")
    x = opset13.parameter([-1, -1], np.float32, name="x")
    y = opset13.relu(x)
    y.output(0).get_tensor().set_names({"y"})
    openvino.save_model(openvino.Model([y], [x], "relu"), folder / "model.xml")
    return folder


def run(program: str, model: Path) -> subprocess.CompletedProcess[str]:
    # A process whose threads wait for each other does not end by itself.
    command = [sys.executable, "-c", program, str(model)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_concurrent_first_calls_do_not_deadlock(relu: Path) -> None:
    done = run(FIRST_CALLS, relu)
    assert done.stdout.split() == ["6.0", "6.0"], done.stderr


def test_a_signal_is_handled_after_models_are_closed(relu: Path) -> None:
    """It ended the process on a CPU with AMX; see `_one_core`."""
    done = run(CLOSED_IN_ORDER, relu)
    assert (done.returncode, done.stdout) == (0, "handled\n"), done.stderr


def test_a_serving_process_does_not_import_the_conversion_of_models() -> None:
    script = "import sys\nfrom shapeshift.engines.providers.openvino import PROVIDER\nPROVIDER.version()\n"
    script += "assert 'openvino' in sys.modules and not [name for name in sys.modules if 'tools.ovc' in name]\n"
    script += "import openvino.tools.ovc\nassert openvino.tools.ovc.convert_model"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=100)
