"""Our decode loop: `-m bench.fused_decode.inprocess_worker FOLDER PRECISION KERNELS LENGTH SHARES [ADAPTER ...]`.

LENGTH: the most tokens of a request; SHARES: 1 where prompts share the blocks with which they begin, else 0. ADAPTER:
PEFT folders; request i gets number i modulo their count.
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

    folder, precision, kernels, max_length, shares, *adapters = sys.argv[1:]
    paths = [Path(one) for one in adapters]
    loop = InProcess(Path(folder), precision, Path(kernels), int(max_length), shares == "1", paths)
    serve_decoding(loop.replay)


if __name__ == "__main__":
    main()
