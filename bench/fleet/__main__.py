"""`python -m bench.fleet`: what a fleet keeps through faults, on Ray on this machine, and what affinity gains."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from bench.common.foreign_load import ForeignLoad
from bench.common.output import Output, name_of_parts, program, progress
from shapeshift.settings import Choices

# Each measures, prints its table and adds its records to `output.data`; quick: in a minute.
PARTS: Choices[Callable[[Output, bool], None]] = Choices(
    "--parts",
    {
        "faults": "bench.fleet.faults.events:faults",
        "members": "bench.fleet.faults.events:members",
        "affinity": "bench.fleet.affinity:measure",
    },
)


@program
def main() -> int:
    """Measure the parts, and write table and data to build/bench/."""
    parser = argparse.ArgumentParser(prog="python -m bench.fleet", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="about a minute a part")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    options = parser.parse_args()
    parts = options.parts.split(",")
    for part in parts:
        PARTS.require(part)
    output = Output("fleet", {"nodes": "servers on this machine"}, name_of_parts("fleet", parts, list(PARTS)))
    for part in parts:
        progress(part)
        with ForeignLoad() as foreign:
            PARTS[part](output, options.quick)
        output.say(f"  cores that other programs used meanwhile: {foreign.cores:.2f}")
    output.save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
