"""What a process that generates imports of torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROJECT = Path(__file__).resolve().parents[2]
LEAN = "from shapeshift.kernels.kernel_build import import_torch; import_torch()"
UNUSED = ("torch._meta_registrations", "torch._decomp.decompositions", "torch.export")


def printed(script: str) -> Any:
    """What a process prints as JSON."""
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    command = [sys.executable, "-c", f"import json, sys\n{script}"]
    ran = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return json.loads(ran.stdout)


def test_a_process_that_generates_imports_no_shapes_for_compilers() -> None:
    """Its runtime neither, and the results of torch are the same."""
    compute = """
import torch, shapeshift.fused_decode.front, shapeshift.fused_decode.model.cpu_runtime
torch.manual_seed(1)
weights, tokens = torch.randn(8, 8, dtype=torch.bfloat16), torch.randn(3, 8, dtype=torch.bfloat16)
with torch.inference_mode():
    mixed = (tokens @ weights).float()[None]
    sums = torch.nn.functional.scaled_dot_product_attention(mixed, mixed, mixed).softmax(-1).tolist()
"""
    loaded = f"print(json.dumps([sums, [name in sys.modules for name in {UNUSED}]]))"
    lean, whole = printed(LEAN + compute + loaded), printed(compute + loaded)
    assert lean[0] == whole[0]
    assert (lean[1], whole[1]) == ([False] * len(UNUSED), [True] * len(UNUSED))


def test_whoever_compiles_gets_the_shapes() -> None:
    found = printed(f"""{LEAN}
import torch._meta_registrations
shape = torch.ops.aten.convolution(torch.empty(1, 2, 9, device="meta"), torch.empty(4, 2, 3, device="meta"),
                                   None, [1], [0], [1], False, [0], 1).shape
print(json.dumps([hasattr(torch._meta_registrations, "register_meta"), list(shape)]))""")
    assert found == [True, [1, 4, 7]]


@pytest.mark.long
def test_whoever_exports_gets_the_exporter() -> None:
    found = printed(f"""{LEAN}
import torch._meta_registrations, torch.export
class Module(torch.nn.Module):
    def forward(self, x):
        return x + 1
exported = torch.export.export(Module(), (torch.zeros(2),))
print(json.dumps(exported.module()(torch.ones(2)).tolist()))""")
    assert found == [2.0, 2.0]


@pytest.mark.parametrize("collects", [True, False])
def test_garbage_is_collected_afterwards_as_before(collects: bool) -> None:
    before = "" if collects else "import gc; gc.disable()\n"
    assert printed(f"{before}{LEAN}\nimport gc\nprint(json.dumps(gc.isenabled()))") is collects


def test_an_imported_torch_stays() -> None:
    assert printed(f"import torch\n{LEAN}\nprint(json.dumps('torch._meta_registrations' in sys.modules))") is True
