"""What a process holds after calls of many shapes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os, sys
from pathlib import Path
import numpy as np
from shapeshift.engines.providers.openvino import MODEL_FILE, PROVIDER
import openvino
from openvino import opset13 as ops

given = ops.parameter([-1, 64], np.float32, name="ROWS_OF_64")
given.output(0).get_tensor().set_names({"X"})
value = given
for layer in range(4):
    weight = np.random.default_rng(layer).standard_normal((64, 64 + layer)).astype(np.float32)
    value = ops.softmax(ops.matmul(value, ops.constant(weight), False, False), 1)
    value = ops.matmul(value, ops.constant(np.ascontiguousarray(weight.T)), False, False)
value.output(0).get_tensor().set_names({"Y"})
folder = Path(sys.argv[1])
openvino.save_model(openvino.Model([value], [given]), folder / MODEL_FILE, compress_to_fp16=False)
engine = PROVIDER.open(folder, "f32", threads=1).engine(None, None)

def after(first, last):
    for rows in range(first, last):
        engine.run({"X": np.ones((rows, 64), np.float32)})
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

begun = after(1, 200)
sys.stdout.write(f"{after(200, 1000) - begun}")
"""


def test_a_dynamic_engine_keeps_a_bounded_number_of_shapes(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], check=True, capture_output=True, text=True, timeout=300
    )
    # Without a bound 800 more shapes take 500 MiB.
    assert float(ran.stdout) < 50
