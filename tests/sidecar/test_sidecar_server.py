"""The sidecar beside a real Triton: start, dead models, failed loads, the freeze switch. The order matters: each test
starts from the server that the previous one left."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable

import pytest

from tests.sidecar.project import Command, Project, RunningServer, wait_until

pytestmark = pytest.mark.server
Start = Callable[..., Command]


def test_a_dry_run_logs_decisions_and_changes_nothing(command: Start, running: RunningServer, project: Project) -> None:
    dry = command("sidecar", "--dry-run")
    dry.wait_for("plan enc: no traffic yet, by plan_histogram")
    assert "(dry run: not applied)" in dry.output
    assert "load enc_w00 with 512" in dry.output
    assert running.workers() == {}
    assert project.report() == {}
    assert dry.end() == 0


def test_first_plan_then_reload_of_dead_worker_and_front(
    command: Start, running: RunningServer, project: Project
) -> None:
    project.set_texts({32: 0, 128: 0, 512: 0})
    sidecar = command("sidecar")
    wait_until(lambda: project.report().get("settled"), "the first plan is loaded")
    bins = running.workers()
    assert len(bins) == 3
    assert set(bins.values()) == {"32", "512"}
    victim = next(iter(bins))
    running.kill(victim)
    sidecar.wait_for(f"health {victim}: loaded in")
    assert running.workers("generation")[victim] == "1"
    assert running.workers()[victim] == bins[victim]
    running.kill("enc")
    sidecar.wait_for("health enc: loaded in")
    assert running.control.config("enc")["parameters"]["generation"]["string_value"] == "1"
    assert sidecar.end() == 0


def test_a_second_sidecar_is_refused_and_a_killed_one_is_replaced(
    command: Start, running: RunningServer, project: Project
) -> None:
    bins = running.workers()
    before = wait_until(lambda: len(found := running.pids()) == 1 + len(bins) and found, "all have beaten")
    killed = command("sidecar")
    killed.wait_for("keeps the loaded workers")
    second = command("sidecar")
    assert second.process.wait(timeout=120) == 2
    assert second.output.count("\n") == 1
    assert f"process {killed.process.pid} is the sidecar of {project.run}; stop it first" in second.output
    killed.end(signal.SIGKILL)
    victim = next(iter(bins))
    running.kill(victim)
    after = command("sidecar")
    after.wait_for(f"health {victim}: loaded in")
    assert running.workers() == bins
    others = {model: pids for model, pids in before.items() if model != victim}
    assert {model: running.pids()[model] for model in others} == others


def test_a_load_that_fails_keeps_the_last_good_plan(command: Start, running: RunningServer, project: Project) -> None:
    bins = running.workers()
    sidecar = command("sidecar", "--plan-period", "1.5")
    total = 0

    def kept() -> bool:
        # Only texts of the middle bin arrive: the plan needs that bin, and no worker can load it.
        nonlocal total
        total += 10_000
        project.set_texts({32: 0, 128: total, 512: 0})
        return "the last good plan stays: " in sidecar.output

    wait_until(kept, "a plan that cannot be carried out")
    assert "this bin cannot be loaded" in sidecar.output
    assert running.workers() == bins
    assert sidecar.process.poll() is None


def test_a_frozen_sidecar_decides_and_changes_nothing(command: Start, running: RunningServer, project: Project) -> None:
    assert command("sidecar", "--freeze").process.wait(timeout=120) == 0
    sidecar = command("sidecar")
    sidecar.wait_for("keeps the loaded workers")
    generations = running.workers("generation")
    victim = next(iter(generations))
    running.kill(victim)
    sidecar.wait_for("would be reloaded (frozen)")
    assert running.workers("generation") == generations
    assert project.report()["frozen"] is True
    asked = command("status", "--json", "--seconds", "1")
    assert asked.process.wait(timeout=120) == 0
    found = json.loads(asked.output)
    assert found["sidecar"]["frozen"] is True
    assert found["sidecar"]["pid"] == sidecar.process.pid
    states = {worker["name"]: worker["state"] for worker in found["workers"]}
    assert states[victim] == "dead"
    assert sum(state == "serving" for state in states.values()) == len(generations) - 1
    assert command("sidecar", "--thaw").process.wait(timeout=120) == 0
    sidecar.wait_for(f"health {victim}: loaded in")
    assert int(running.workers("generation")[victim]) == int(generations[victim]) + 1


def test_a_restarted_server_gets_its_workers_back(command: Start, running: RunningServer, project: Project) -> None:
    bins = running.workers()
    sidecar = command("sidecar")
    sidecar.wait_for("keeps the loaded workers")
    running.server.stop()
    sidecar.wait_for("no server answers")
    running.server.start().wait_ready()
    sidecar.wait_for("server server: answers again")
    wait_until(lambda: running.workers() == bins, "the same workers")
    assert sidecar.process.poll() is None
