"""The process of a further rank of tensor parallelism: `python -m shapeshift.fused_decode.rank`.

Standard input is one end of a pipe to rank 0, which starts this process (`ranks.launcher`): the first message says what
to load, each further one is a batch. When the other end closes, the process ends at once, whatever it computes.
"""

from __future__ import annotations

import os
import sys
import threading
from multiprocessing.connection import Connection
from queue import SimpleQueue

from shapeshift.kernels import kernel_build


def main() -> int:
    """Compute this rank's part of each batch until the parent ends. The exit status."""
    connection = Connection(os.dup(sys.stdin.fileno()))
    received: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_receive, args=(connection, received), daemon=True).start()
    # Before torch is imported.
    kernel_build.limit_spinning()
    from shapeshift.fused_decode.ranks import member

    return member.run(received.get, connection.send_bytes)


def _receive(connection: Connection, received: SimpleQueue[bytes]) -> None:
    """Pass messages on until the parent is gone; then end the process, which may be within a step."""
    try:
        while True:
            received.put(connection.recv_bytes())
    finally:
        os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
