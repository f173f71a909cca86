"""Replay an open-loop trace of texts against a model over gRPC.

    python client/replay.py --model encode --arrivals poisson --rate 100 --duration-s 30
    python client/replay.py --arrivals csv --trace conv.csv --rate-factor 4 --json report.json

Every latency counts from the instant at which the request is due. `--help` lists the options; programs call
`client.open_loop.replay`.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # When Python runs a file, it searches packages in the file's folder, not in the project's.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from client.command import main

    sys.exit(main())
