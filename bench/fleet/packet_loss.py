"""Loss of packets on loopback by the kernel's netem, for one port. Needs root, `tc`, and a kernel with netem."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator, Sequence

from shapeshift.errors import UnsupportedError

_DEVICE = "lo"
# Class 1:3 of a prio qdisc gets only what a filter sends there: all other packets are of the first two.
_PRIO = "prio bands 3 priomap " + " ".join(["1"] * 16)


def netem_problem() -> str:
    """Why packets cannot be lost here, found in a network of its own; empty if they can."""
    if any(shutil.which(program) is None for program in ("tc", "unshare")):
        return "tc and unshare are not installed"
    try:
        _run(["unshare", "--net", "tc", *f"qdisc add dev {_DEVICE} root netem loss 1%".split()])
    except UnsupportedError as error:
        return str(error)
    return ""


@contextlib.contextmanager
def packet_loss(port: int, share: float) -> Iterator[None]:
    """Within the block, this share of the packets from and to the TCP port of loopback is lost.

    Raises UnsupportedError where the kernel refuses, also where loopback has a queueing discipline of its own.
    """
    _tc(f"qdisc add dev {_DEVICE} root handle 1: {_PRIO}")
    try:
        _tc(f"qdisc add dev {_DEVICE} parent 1:3 handle 30: netem loss {100 * share:g}%")
        for field in ("sport", "dport"):
            _tc(f"filter add dev {_DEVICE} parent 1: protocol ip u32 match ip {field} {port} 0xffff flowid 1:3")
        yield
    finally:
        _tc(f"qdisc del dev {_DEVICE} root")


def _tc(arguments: str) -> None:
    _run(["tc", *arguments.split()])


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        told = done.stderr.strip().splitlines()
        raise UnsupportedError(f"{' '.join(command)}: {told[-1] if told else f'status {done.returncode}'}")
