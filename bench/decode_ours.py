"""Our decode loop as a process: `python -m bench.decode_ours FOLDER PRECISION KERNELS`."""

from __future__ import annotations

import sys
from pathlib import Path

from bench.peers.decode_worker import serve
from shapeshift.fused_decode import waiting

SLOTS, MAX_LENGTH = 32, 320


def main() -> None:
    """As the backend does, say how threads wait before torch is imported."""
    waiting.arrange()
    from bench.decode_inprocess import InProcess

    folder, precision, kernels = sys.argv[1:]
    serve(InProcess(Path(folder), precision, Path(kernels)).replay)


if __name__ == "__main__":
    main()
