"""Loss of packets on one port: what `tc` is told, and that nothing of it stays."""

from __future__ import annotations

import pytest

from bench.fleet import packet_loss
from shapeshift.errors import UnsupportedError


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The commands, which are not run."""
    found: list[str] = []
    monkeypatch.setattr(packet_loss, "_run", lambda command: found.append(" ".join(command)))
    return found


def test_only_packets_of_the_port_are_lost(told: list[str]) -> None:
    with packet_loss.packet_loss(4711, 0.02):
        inside = list(told)
    assert inside[0].startswith("tc qdisc add dev lo root handle 1: prio bands 3 priomap 1 1")
    assert inside[1] == "tc qdisc add dev lo parent 1:3 handle 30: netem loss 2%"
    assert [" ".join(one.split()[-6:]) for one in inside[2:]] == [
        "ip sport 4711 0xffff flowid 1:3",
        "ip dport 4711 0xffff flowid 1:3",
    ]
    assert told[len(inside) :] == ["tc qdisc del dev lo root"]


def test_nothing_stays_where_netem_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []

    def run(command: list[str]) -> None:
        found.append(" ".join(command))
        if "netem" in command:
            raise UnsupportedError("no netem")

    monkeypatch.setattr(packet_loss, "_run", run)
    with pytest.raises(UnsupportedError, match="no netem"), packet_loss.packet_loss(4711, 0.02):
        pass
    assert found[-1] == "tc qdisc del dev lo root"


def test_a_kernel_that_cannot_lose_packets_says_so_in_one_line() -> None:
    # Whether it can differs from machine to machine.
    problem = packet_loss.netem_problem()
    assert "\n" not in problem
    assert not problem or "tc" in problem
