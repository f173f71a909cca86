"""The sidecar beside a real Triton: start, deaths, failures, the freeze switch. In this order: each goes on from
what the one before has left in the server, as a sidecar does."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable

import pytest

from tests.scheduler.house import Command, House, Watched, wait_until

pytestmark = pytest.mark.server
Start = Callable[..., Command]
QUICK = ("--health-period", "0.25")


def test_a_dry_run_says_what_it_would_do_and_does_nothing(command: Start, watched: Watched, house: House) -> None:
    dry = command("scheduler", "--dry-run", *QUICK)
    dry.wait_for("plan enc: no traffic yet, by plan_histogram")
    assert "(dry run: nothing is done)" in dry.said
    assert "load enc_w00 with 512" in dry.said
    assert watched.workers() == {}
    assert house.report() == {}
    assert dry.end() == 0


def test_start_and_the_death_of_worker_and_front(command: Start, watched: Watched, house: House) -> None:
    house.offer({32: 0, 128: 0, 512: 0})
    sidecar = command("scheduler", *QUICK)
    wait_until(lambda: house.report().get("settled"), "the first plan is loaded")
    bins = watched.workers()
    assert len(bins) == 3
    assert set(bins.values()) == {"32", "512"}
    victim = next(iter(bins))
    watched.kill(victim)
    sidecar.wait_for(f"health {victim}: loaded in")
    assert watched.workers("generation")[victim] == "1"
    assert watched.workers()[victim] == bins[victim]
    watched.kill("enc")
    sidecar.wait_for("health enc: loaded in")
    assert watched.control.config("enc")["parameters"]["generation"]["string_value"] == "1"
    assert sidecar.end() == 0


def test_a_second_sidecar_is_refused_and_one_that_was_killed_goes_on(
    command: Start, watched: Watched, house: House
) -> None:
    bins = watched.workers()
    before = wait_until(lambda: len(found := watched.pids()) == 1 + len(bins) and found, "all have beaten")
    killed = command("scheduler", *QUICK)
    killed.wait_for("goes on with what is loaded")
    second = command("scheduler", *QUICK)
    assert second.process.wait(timeout=30) == 2
    assert second.said.count("\n") == 1
    assert f"process {killed.process.pid} is the scheduler of {house.run}; stop it first" in second.said
    killed.end(signal.SIGKILL)
    victim = next(iter(bins))
    watched.kill(victim)
    after = command("scheduler", *QUICK)
    after.wait_for(f"health {victim}: loaded in")
    assert watched.workers() == bins
    others = {model: pids for model, pids in before.items() if model != victim}
    assert {model: watched.pids()[model] for model in others} == others


def test_a_load_that_fails_keeps_the_last_good_plan(command: Start, watched: Watched, house: House) -> None:
    bins = watched.workers()
    sidecar = command("scheduler", *QUICK, "--plan-period", "1.5")
    total = 0

    def kept() -> bool:
        # Nothing but the middle bin comes in, all the time: the plan needs it, and no worker can load it.
        nonlocal total
        total += 10_000
        house.offer({32: 0, 128: total, 512: 0})
        return "the last good plan stays: " in sidecar.said

    wait_until(kept, "a plan that cannot be carried out")
    assert "this bin cannot be loaded" in sidecar.said
    assert watched.workers() == bins
    assert sidecar.process.poll() is None


def test_frozen_it_decides_and_does_nothing(command: Start, watched: Watched, house: House) -> None:
    assert command("scheduler", "--freeze").process.wait(timeout=30) == 0
    sidecar = command("scheduler", *QUICK)
    sidecar.wait_for("goes on with what is loaded")
    generations = watched.workers("generation")
    victim = next(iter(generations))
    watched.kill(victim)
    sidecar.wait_for("would be loaded again (frozen)")
    assert watched.workers("generation") == generations
    assert house.report()["frozen"] is True
    asked = command("status", "--json", "--seconds", "1")
    assert asked.process.wait(timeout=30) == 0
    found = json.loads(asked.said)
    assert found["scheduler"]["frozen"] is True
    assert found["scheduler"]["pid"] == sidecar.process.pid
    states = {worker["name"]: worker["state"] for worker in found["workers"]}
    assert states[victim] == "dead"
    assert sum(state == "serving" for state in states.values()) == len(generations) - 1
    assert command("scheduler", "--thaw").process.wait(timeout=30) == 0
    sidecar.wait_for(f"health {victim}: loaded in")
    assert int(watched.workers("generation")[victim]) == int(generations[victim]) + 1


def test_a_server_that_restarts_gets_its_workers_back(command: Start, watched: Watched, house: House) -> None:
    bins = watched.workers()
    sidecar = command("scheduler", *QUICK)
    sidecar.wait_for("goes on with what is loaded")
    watched.server.stop()
    sidecar.wait_for("no server answers")
    watched.server.start().wait_ready(timeout_s=60)
    sidecar.wait_for("server server: answers again")
    wait_until(lambda: watched.workers() == bins, "the same workers")
    assert sidecar.process.poll() is None
