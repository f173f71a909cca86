"""Latencies of one-thread engines while several are busy: `python -m bench.polymorph.busy_engines FOLDER TOKENS...`.

The process runs the static engines of FOLDER in turn until its standard input closes. Then it prints the median
milliseconds of each as one line of JSON. `profile` starts several processes at once.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from shapeshift.engines import manifest
from shapeshift.engines.providers import lookup
from shapeshift.engines.text.packing import pack


def profile(folder: Path, tokens: Sequence[int], processes: int, seconds: float) -> list[float]:
    """Median milliseconds of one text in engines of `tokens` tokens while `processes` of them are busy."""
    command = [sys.executable, "-m", "bench.polymorph.busy_engines", str(folder), *map(str, tokens)]
    started = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(processes)
    ]
    pipes = [(process.stdin, process.stdout) for process in started]
    for _, stdout in pipes:
        assert stdout is not None
        stdout.readline()
    # All have loaded their engines: from now on they measure at the same time.
    for stdin, _ in pipes:
        assert stdin is not None
        stdin.write("go\n")
        stdin.flush()
    time.sleep(seconds)
    for stdin, _ in pipes:
        assert stdin is not None
        stdin.close()
    medians = [json.loads(stdout.readline()) for _, stdout in pipes if stdout is not None]
    for process in started:
        process.wait()
    return [float(ms) for ms in np.median(medians, axis=0)]


def main() -> int:
    """Run one of the processes."""
    folder, tokens = Path(sys.argv[1]), [int(text) for text in sys.argv[2:]]
    built = manifest.load(folder)
    runtime = lookup.PROVIDERS[built.provider].open(folder, built.precision, threads=1)
    engines = [runtime.engine(length, 1) for length in tokens]
    inputs = [pack([np.ones(length, np.int64)], length, 1, built.position_offset) for length in tokens]
    print("loaded", flush=True)
    sys.stdin.readline()
    ended = threading.Event()

    def until_closed() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=until_closed, daemon=True).start()
    times: list[list[float]] = [[] for _ in tokens]
    while not ended.is_set() or not times[-1]:
        for engine, tensors, own in zip(engines, inputs, times, strict=True):
            before = time.perf_counter()
            engine.run(tensors)
            own.append((time.perf_counter() - before) * 1e3)
    print(json.dumps([float(np.median(own)) for own in times]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
