"""`python -m tests.mutation`: change the sources one line at a time and say which changes no test notices."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.mutation import native
from tests.mutation.native import NativeChange
from tests.mutation.notice import Copy, FailsUnchangedError, NotCompiledError
from tests.mutation.sample import PACKAGES, Change, changed_files, package_of, sample

PROJECT = Path(__file__).resolve().parents[2]
SINCE = "HEAD~100"


def main() -> int:
    """Print one line for each change; 1 where fewer than the share are noticed, or a test fails unchanged."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("--since", default=SINCE, help="only files that differ from this commit (%(default)s)")
    parser.add_argument("--packages", default=",".join(PACKAGES), help="separated by commas (all nine)")
    parser.add_argument("--count", type=int, default=75)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kernels", help="in place of packages: kernels and headers by name, or `all`")
    parser.add_argument("--share", type=float, default=0.9, help="that must be noticed (%(default)g)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        copy = Copy(PROJECT, Path(folder))
        noticed = judged = flaky = 0
        for number, change in enumerate(_sampled(options), 1):
            try:
                verdict = copy.judge(change)
            except NotCompiledError:
                continue
            except FailsUnchangedError as error:
                flaky += 1
                print(f"{number:3} UNKNOWN  {error}", flush=True)
                continue
            judged += 1
            noticed += bool(verdict.test)
            said = "noticed" if verdict.test else "MISSED "
            where = f"{change.file}:{change.line}"
            print(f"{number:3} {said} {verdict.seconds:4.0f} s  {where}  {verdict.line}", flush=True)
    print(f"{noticed} of {judged} changes are noticed ({noticed / max(judged, 1):.0%})")
    return int(noticed < options.share * judged or flaky > 0)


def _sampled(options: argparse.Namespace) -> Sequence[Change | NativeChange]:
    if options.kernels:
        named = native.files(PROJECT, None if options.kernels == "all" else options.kernels.split(","))
        return native.sample(PROJECT, named, options.count, options.seed)
    packages = options.packages.split(",")
    files = [file for file in changed_files(PROJECT, options.since) if package_of(file) in packages]
    return sample(PROJECT, files, options.count, options.seed)


if __name__ == "__main__":
    sys.exit(main())
