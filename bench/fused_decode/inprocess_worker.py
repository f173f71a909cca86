"""Our decode loop as a process: `-m bench.fused_decode.inprocess_worker FOLDER PRECISION KERNELS LENGTH`.

LENGTH: the most tokens of a request.
"""

from __future__ import annotations

import sys
from pathlib import Path

from bench.peers.protocol import serve_decoding
from shapeshift.kernels import kernel_build


def main() -> None:
    """Serve, after limiting the spinning of threads as the backend does: before torch is imported."""
    kernel_build.limit_spinning()
    from bench.fused_decode.inprocess import InProcess

    folder, precision, kernels, max_length = sys.argv[1:]
    serve_decoding(InProcess(Path(folder), precision, Path(kernels), int(max_length)).replay)


if __name__ == "__main__":
    main()
