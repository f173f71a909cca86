"""`python -m build_engines`, the entry of `make engines`: the same as `shapeshift engines`."""

import sys

from shapeshift.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["engines", *sys.argv[1:]]))
