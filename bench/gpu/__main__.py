"""Every figure of the GPU path: `make gpu`, or `python -m bench.gpu --parts engines,decode`.

It needs torch, transformers, peft and timm, no Triton and no network. Without a GPU it rehearses: the same parts with
small sizes on the CPU, in seconds. Rehearsals write to build/bench/gpu/, measurements to profiles/.
"""

from __future__ import annotations

import json
import math
import re
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.common.output import FOLDER, parser, progress
from bench.gpu import adapters, decode, engines, images, memory, onnx, trace
from bench.gpu.device import Device
from bench.gpu.part import Part, Row
from client.report import head
from shapeshift.engines import hardware

PARTS: dict[str, Part[Any]] = {
    "engines": engines.PART,
    "onnx": onnx.PART,
    "decode": decode.PART,
    "adapters": adapters.PART,
    "images": images.PART,
    "memory": memory.PART,
    "trace": trace.PART,
}


def main(arguments: list[str] | None = None, parts: Mapping[str, Part[Any]] = PARTS) -> int:
    """Measure the parts, print each row when it is there, and write a profile for each part."""
    parse = parser("gpu", __doc__, parts=tuple(parts))
    parse.add_argument("--device", type=int, default=0, help="number of the GPU (%(default)s)")
    parse.add_argument("--minutes", type=float, default=math.inf, help="of each part at most; what it says of itself")
    parse.add_argument("--rehearse", action="store_true", help="small sizes on the CPU, also where there is a GPU")
    options = parse.parse_args(arguments)
    is_rehearsal = options.rehearse or not hardware.gpus()
    device = Device(None if is_rehearsal else options.device)
    command = " ".join(["python -m bench.gpu", *(sys.argv[1:] if arguments is None else arguments)])
    about: dict[str, Any] = {"command": command, "seed": options.seed, "precision": device.precision}
    about |= {"rehearsal": True} if is_rehearsal else {}
    print(head({"settings": about, "hardware": device.describe()}), flush=True)
    failed = []
    for name in options.parts:
        try:
            rows = run(parts[name], device, options.seed, options.minutes)
        except Exception:  # noqa: BLE001  a part that fails must not cost the others
            traceback.print_exc()
            failed.append(name)
            device.free()
            continue
        folder = FOLDER / "gpu" / "rehearsal" if is_rehearsal else Path("profiles")
        print(f"written: {write(folder, name, {**about, 'hardware': device.describe()}, rows)}")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def run(part: Part[Any], device: Device, seed: int, minutes: float = math.inf) -> list[Row]:
    """The rows of a part, printed. No row is begun after its minutes, at most `minutes`; then it says so."""
    print(f"{part.what}:", flush=True)
    minutes = min(minutes, part.minutes)
    rows, end = [], time.monotonic() + 60 * minutes
    for row in part.measure(device, part.rehearsal if device.number is None else part.full, seed):
        progress()
        # Without the columns that the row does not have.
        print("  " + ", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
        rows.append(row)
        if time.monotonic() > end:
            print(f"  stopped after {minutes:g} minutes; what is left is not measured", flush=True)
            break
    device.free()
    return rows


def write(folder: Path, part: str, head: dict[str, Any], rows: list[Row]) -> Path:
    """Write the profile of a part, which is named after it and its hardware; returns the file."""
    name = str(head["hardware"].get("gpu") or head["hardware"]["cpu"]).partition(",")[0]
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"gpu-{part}-{re.sub('[^a-z0-9]+', '-', name.lower()).strip('-')}.json"
    file.write_text(json.dumps({**head, "part": part, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return file


if __name__ == "__main__":
    sys.exit(main())
