"""`python -m tests.mutation`: change the sources one line at a time and say which changes no test notices."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.mutation.notice import Copy
from tests.mutation.sample import PACKAGES, changed_files, package_of, sample

PROJECT = Path(__file__).resolve().parents[2]
SINCE = "HEAD~100"


def main() -> int:
    """Print one line for each change; 1 where fewer than the share are noticed."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("--since", default=SINCE, help="only files that differ from this commit (%(default)s)")
    parser.add_argument("--packages", default=",".join(PACKAGES), help="separated by commas (all nine)")
    parser.add_argument("--count", type=int, default=75)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", type=float, default=0.9, help="that must be noticed (%(default)g)")
    options = parser.parse_args()
    packages = options.packages.split(",")
    files = [file for file in changed_files(PROJECT, options.since) if package_of(file) in packages]
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        copy = Copy(PROJECT, Path(folder))
        noticed = 0
        sampled = sample(PROJECT, files, options.count, options.seed)
        for number, change in enumerate(sampled, 1):
            verdict = copy.judge(change)
            noticed += bool(verdict.test)
            said = "noticed" if verdict.test else "MISSED "
            where = f"{change.file}:{change.line}"
            print(f"{number:3} {said} {verdict.seconds:4.0f} s  {where}  {verdict.line}", flush=True)
    print(f"{noticed} of {len(sampled)} changes are noticed ({noticed / len(sampled):.0%})")
    return int(noticed < options.share * len(sampled))


if __name__ == "__main__":
    sys.exit(main())
