"""Every figure of the GPU path: `make gpu`, or `python -m bench.gpu --parts engines,decode`.

It needs torch, transformers, peft and timm, no network, and Triton for the part `served` alone. Without a GPU it
rehearses: the same parts with small sizes on the CPU. Rehearsals write to build/bench/gpu/, measurements to profiles/.
"""

from __future__ import annotations

import json
import math
import re
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.common.output import FOLDER, parser, progress
from bench.gpu import adapters, decode, engines, images, memory, onnx, served, trace
from bench.gpu.device import Device
from bench.gpu.part import Part, Row
from client.report import head
from shapeshift.engines import hardware
from shapeshift.files import replace_text

PARTS: dict[str, Part[Any]] = {
    "engines": engines.PART,
    "onnx": onnx.PART,
    "decode": decode.PART,
    "adapters": adapters.PART,
    "images": images.PART,
    "memory": memory.PART,
    "trace": trace.PART,
    "served": served.PART,
}


def main(arguments: list[str] | None = None, parts: Mapping[str, Part[Any]] = PARTS) -> int:
    """Measure the parts, and print and write each row when it is there: a profile for each part."""
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
        described = {**about, "hardware": device.describe(), "part": name}
        file = profile_of(FOLDER / "gpu" / "rehearsal" if is_rehearsal else Path("profiles"), described)
        rows: list[Row] = []
        try:
            for row in run(parts[name], device, options.seed, options.minutes):
                rows.append(row)
                # What ends this process does not cost the rows before.
                replace_text(file, json.dumps({**described, "rows": rows}, indent=1) + "\n")
        except Exception:  # noqa: BLE001  a part that fails must not cost the others
            traceback.print_exc()
            failed.append(name)
            device.free()
            continue
        print(f"written: {file}")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def run(part: Part[Any], device: Device, seed: int, minutes: float = math.inf) -> Iterator[Row]:
    """The rows of a part, printed. No row is begun after its minutes, at most `minutes`; then it says so."""
    print(f"{part.what}:", flush=True)
    minutes = min(minutes, part.minutes)
    end = time.monotonic() + 60 * minutes
    for row in part.measure(device, part.rehearsal if device.number is None else part.full, seed):
        progress()
        # Without the columns that the row does not have.
        print("  " + ", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
        yield row
        if time.monotonic() > end:
            print(f"  stopped after {minutes:g} minutes; what is left is not measured", flush=True)
            break
    device.free()


def profile_of(folder: Path, described: Mapping[str, Any]) -> Path:
    """The file of a part's profile, which is named after it and its hardware; makes the folder."""
    name = str(described["hardware"].get("gpu") or described["hardware"]["cpu"]).partition(",")[0]
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"gpu-{described['part']}-{re.sub('[^a-z0-9]+', '-', name.lower()).strip('-')}.json"


if __name__ == "__main__":
    sys.exit(main())
