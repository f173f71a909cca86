"""Latencies of one-thread engines while so many of them are busy at once: `python -m bench.busy FOLDER TOKENS...`.

The process runs the static engines of FOLDER in turn for as long as its standard input stays open, and prints
the median milliseconds of each as one line of JSON. `profile` starts several at once.
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

from shapeshift.engines import manifest, registry
from shapeshift.engines.packing import pack


def profile(folder: Path, tokens: Sequence[int], processes: int, seconds: float) -> list[float]:
    """Median milliseconds of one text in engines of `tokens` tokens with `processes` of them busy, medians over all."""
    command = [sys.executable, "-m", "bench.busy", str(folder), *map(str, tokens)]
    started = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(processes)
    ]
    pipes = [(process.stdin, process.stdout) for process in started]
    for _, out in pipes:
        assert out is not None
        out.readline()
    # All are loaded: what they measure from here on, they measure together.
    for given, _ in pipes:
        assert given is not None
        given.write("go\n")
        given.flush()
    time.sleep(seconds)
    for given, _ in pipes:
        assert given is not None
        given.close()
    medians = [json.loads(out.readline()) for _, out in pipes if out is not None]
    for process in started:
        process.wait()
    return [float(ms) for ms in np.median(medians, axis=0)]


def main() -> int:
    """One of the processes."""
    folder, tokens = Path(sys.argv[1]), [int(text) for text in sys.argv[2:]]
    made = manifest.load(folder)
    runtime = registry.provider(made.provider).open(folder, made.precision, threads=1)
    engines = [runtime.engine(length, 1) for length in tokens]
    inputs = [pack([np.ones(length, np.int64)], length, 1, made.position_offset) for length in tokens]
    print("loaded", flush=True)
    sys.stdin.readline()
    ended = threading.Event()

    def until_closed() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=until_closed, daemon=True).start()
    times: list[list[float]] = [[] for _ in tokens]
    while not ended.is_set() or not times[-1]:
        for engine, given, kept in zip(engines, inputs, times, strict=True):
            before = time.perf_counter()
            engine.run(given)
            kept.append((time.perf_counter() - before) * 1e3)
    print(json.dumps([float(np.median(kept)) for kept in times]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
