"""What the process table says of the processes of a run, from a folder that looks like /proc."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from shapeshift.triton.embedded import processes
from shapeshift.triton.embedded.processes import Entry, Stub
from shapeshift.triton.embedded.run_record import Identity, Member, Record

SERVER, STUB = 100, "triton_python_b"
PREFIX = "shapeshift-run-"
OWNER = Identity(50, 5)


class Table:
    """A process table that tests write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "self").mkdir()

    def add(
        self,
        pid: int,
        name: str = "python",
        *,
        state: str = "S",
        parent: int = 1,
        session: int = 1,
        start: int = 7,
        command: Sequence[str] = (),
    ) -> Identity:
        """One process. The fields are those of proc(5): the 22nd is the start."""
        (self.folder / str(pid)).mkdir(exist_ok=True)
        between = " ".join(str(900 + field) for field in range(7, 22))
        text = f"{pid} ({name}) {state} {parent} 901 {session} {between} {start} 999 998"
        (self.folder / str(pid) / "stat").write_text(text)
        (self.folder / str(pid) / "cmdline").write_bytes(b"".join(f"{one}\0".encode() for one in command))
        return Identity(pid, start)

    def add_stub(self, pid: int, region: str, instance: str, *, parent: int = SERVER, session: int = 1) -> Identity:
        """A process of a Python model."""
        command = ("stub", "model.py", region, "3", "4", "5", "6", "python", instance, "DEFAULT")
        return self.add(pid, STUB, parent=parent, session=session, command=command)


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Table:
    for name in ("proc", "shm"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(processes, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(processes, "_SHM", tmp_path / "shm")
    return Table(tmp_path / "proc")


def record(guard: int = 60, members: tuple[Member, ...] = (), regions: tuple[str, ...] = ()) -> Record:
    return Record(OWNER, Identity(guard, 6), Identity(SERVER, 7), PREFIX, members, regions)


def pids(found: Sequence[Member]) -> list[int]:
    return sorted(member.pid for member in found)


def test_a_process_has_its_start_parent_session_and_state(table: Table) -> None:
    table.add(9, "a name) (of 2 S 3", state="T", parent=4, session=5, start=77)
    assert processes.look_up(9) == Entry(Identity(9, 77), "a name) (of 2 S 3", 4, 5, "T")
    assert processes.identify(9) == Identity(9, 77)


@pytest.mark.parametrize("text", [b"", b"9 (a", b"9 (a) S", b"9 (a) S x y z", b"\xff\xff"])
def test_an_entry_that_cannot_be_read_is_no_process(table: Table, text: bytes) -> None:
    table.add(9)
    table.add_stub(103, f"{PREFIX}1", "a_0_0")
    (table.folder / "9" / "stat").write_bytes(text)
    assert processes.look_up(9) is None
    assert pids(processes.members(record())) == [103]


def test_a_process_that_is_not_there_has_ended(table: Table) -> None:
    assert processes.look_up(9) is None
    assert processes.identify(9) == Identity(9, 0)
    assert not processes.is_alive(Identity(9, 7)) and not processes.is_suspended(9) and processes.stub(9) is None


@pytest.mark.parametrize(("state", "is_there"), [("S", True), ("R", True), ("T", True), ("Z", False), ("X", False)])
def test_a_zombie_has_ended(table: Table, state: str, is_there: bool) -> None:
    identity = table.add(9, STUB, state=state)
    assert (processes.look_up(9) is not None, processes.is_alive(identity)) == (is_there, is_there)


def test_a_pid_that_another_process_has_is_not_alive(table: Table) -> None:
    table.add(9, start=8)
    assert processes.is_alive(Identity(9, 8)) and not processes.is_alive(Identity(9, 7))


@pytest.mark.parametrize(("state", "suspended"), [("T", True), ("t", False), ("S", False), ("Z", False)])
def test_suspended_is_what_a_signal_has_stopped(table: Table, state: str, suspended: bool) -> None:
    table.add(9, state=state)
    assert processes.is_suspended(9) is suspended


def test_the_process_of_a_model_names_its_instance_and_its_server(table: Table) -> None:
    identity = table.add_stub(9, "r", "encode_0_1")
    assert processes.stub(9) == Stub(identity, SERVER, "encode_0_1")
    table.add(10, "python", command=["x"] * 12)
    assert processes.stub(10) is None
    identity = table.add(11, STUB, command=["stub", "model.py"])
    assert processes.stub(11) == Stub(identity, 1, "")


def test_a_process_that_ends_while_it_is_read_names_no_instance(table: Table) -> None:
    identity = table.add_stub(9, "r", "encode_0_1")
    (table.folder / "9" / "cmdline").unlink()
    assert processes.stub(9) == Stub(identity, SERVER, "")


@pytest.mark.parametrize(
    ("server", "instance", "succeeds"),
    [(SERVER, "encode_0_0", True), (SERVER, "encode_0_1", False), (SERVER + 1, "encode_0_0", False)],
)
def test_a_successor_is_of_the_same_instance_and_server(
    table: Table, server: int, instance: str, succeeds: bool
) -> None:
    ended = Stub(Identity(9, 1), SERVER, "encode_0_0")
    table.add(8, "python")
    assert not processes.has_successor(ended)
    table.add_stub(10, "r", instance, parent=server)
    assert processes.has_successor(ended) is succeeds


def test_members_are_the_recorded_ones_and_those_of_the_prefix(table: Table) -> None:
    table.add(SERVER, session=2)
    recorded, reused = table.add(101), table.add(102, start=8)
    table.add_stub(103, f"{PREFIX}1", "a_0_0", parent=1)
    table.add_stub(104, "another-1", "a_0_0", parent=1)
    table.add(105, command=["python", "x.py", f"{PREFIX}2"])
    known = (Member(recorded.pid, recorded.start), Member(reused.pid, 7))
    found = processes.members(record(members=known))
    assert pids(found) == [SERVER, 101, 103]
    assert {member.pid: member.region for member in found} == {SERVER: "", 101: "", 103: f"{PREFIX}1"}


def test_the_session_counts_while_a_process_of_the_run_is_in_it(table: Table) -> None:
    table.add(105, session=SERVER)
    # Another session may have the id since.
    assert processes.members(record()) == []
    table.add_stub(103, f"{PREFIX}1", "a_0_0", session=1)
    assert pids(processes.members(record())) == [103]
    table.add_stub(104, f"{PREFIX}2", "a_0_1", session=SERVER)
    assert pids(processes.members(record())) == [103, 104, 105]


@pytest.mark.parametrize("is_guard", [True, False])
def test_children_of_the_calling_process_are_members_where_it_is_the_guard(table: Table, is_guard: bool) -> None:
    table.add(110, parent=os.getpid())
    table.add(111, parent=1)
    # What the kernel started has the parent 0.
    table.add(112, parent=0)
    found = processes.members(record(guard=os.getpid() if is_guard else 60))
    assert pids(found) == ([110] if is_guard else [])


def test_a_refreshed_record_has_the_members_and_the_regions_that_exist(table: Table, tmp_path: Path) -> None:
    for name in (f"{PREFIX}1", "recorded", "of-a-member", "foreign"):
        (tmp_path / "shm" / name).touch()
    member = table.add_stub(103, "of-a-member", "a_0_0", parent=1)
    table.add(104)
    known = (Member(member.pid, member.start), Member(999, 1))
    # Anybody may make one; it is not that of a stub, and a record with it could not be read again.
    (Path(os.fsdecode(os.fsencode(tmp_path / "shm" / PREFIX) + b"\xff"))).touch()
    found = processes.refresh(record(members=known, regions=("recorded", "gone")))
    assert found.members == (Member(103, 7, "of-a-member"),)
    assert found.regions == ("of-a-member", "recorded", f"{PREFIX}1")


def test_without_shared_memory_there_are_no_regions(table: Table, tmp_path: Path) -> None:
    (tmp_path / "shm").rmdir()
    assert processes.refresh(record(regions=("recorded",))).regions == ()
    processes.remove_regions(record(regions=("recorded",)))


class Signals:
    """Stands for the kernel: which signals were sent, in order; processes end by them as `ends` says."""

    def __init__(self, table: Table, ends: Sequence[tuple[int, int]]) -> None:
        self.sent: list[tuple[int, int]] = []
        self.now = 0.0
        self._table, self._ends = table, ends

    def kill(self, pid: int, number: int) -> None:
        self.sent.append((pid, number))
        if (pid, number) in self._ends:
            (self._table.folder / str(pid) / "stat").unlink()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


def signals(monkeypatch: pytest.MonkeyPatch, table: Table, *ends: tuple[int, int]) -> Signals:
    found = Signals(table, ends)
    monkeypatch.setattr(processes.os, "kill", found.kill)
    monkeypatch.setattr(processes, "time", found)
    return found


def run_of_two(table: Table) -> Record:
    table.add(SERVER)
    other = table.add_stub(103, f"{PREFIX}1", "a_0_0")
    return record(members=(Member(other.pid, other.start),))


def test_a_server_is_asked_to_end_and_its_processes_to_go_on(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of_two(table)
    kernel = signals(monkeypatch, table, (SERVER, signal.SIGTERM), (103, signal.SIGKILL))
    processes.stop(run, grace_s=5.0)
    # The server alone is told to end; a suspended one of the others would hold it up.
    assert kernel.sent == [(SERVER, signal.SIGTERM), (103, signal.SIGCONT), (103, signal.SIGKILL)]
    assert kernel.now < 5.0


def test_a_server_that_does_not_end_has_its_grace_and_is_killed(
    table: Table, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = run_of_two(table)
    for name in (f"{PREFIX}1", "foreign"):
        (tmp_path / "shm" / name).touch()
    kernel = signals(monkeypatch, table, (SERVER, signal.SIGKILL), (103, signal.SIGKILL))
    processes.stop(run, grace_s=5.0)
    assert sorted(kernel.sent[-2:]) == [(SERVER, signal.SIGKILL), (103, signal.SIGKILL)]
    assert signal.SIGKILL not in [number for _, number in kernel.sent[:-2]]
    assert 5.0 <= kernel.now <= 5.1
    assert [path.name for path in (tmp_path / "shm").iterdir()] == ["foreign"]


def test_without_grace_all_are_killed_at_once(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of_two(table)
    kernel = signals(monkeypatch, table, (SERVER, signal.SIGKILL), (103, signal.SIGKILL))
    processes.stop(run, grace_s=0.0)
    assert {number for _, number in kernel.sent} == {signal.SIGKILL} and len(kernel.sent) == 2


def test_processes_that_cannot_be_killed_hold_nothing_up(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of_two(table)
    kernel = signals(monkeypatch, table)
    processes.stop(run, grace_s=2.0)
    assert 3.0 <= kernel.now <= 3.5


def test_kill_says_whether_the_process_was_running_and_may_be_killed(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = table.add(9)
    kernel = signals(monkeypatch, table)
    assert processes.kill(identity) and kernel.sent == [(9, signal.SIGKILL)]
    assert not processes.kill(Identity(9, identity.start + 1)) and not processes.kill(Identity(10, 7))
    assert len(kernel.sent) == 1

    def refuse(pid: int, number: int) -> None:
        raise PermissionError

    monkeypatch.setattr(processes.os, "kill", refuse)
    assert not processes.kill(identity)


@pytest.mark.parametrize(("network", "is_ours"), [("net:[1]", True), ("net:[2]", False)])
def test_a_container_that_listens_in_a_network_of_its_own_does_not_listen_here(
    network: str, is_ours: bool, table: Table
) -> None:
    for name, link in (("self", "net:[1]"), (str(SERVER), network)):
        (table.folder / name / "ns").mkdir(parents=True)
        (table.folder / name / "ns" / "net").symlink_to(link)
    server = table.folder / str(SERVER)
    (server / "net").mkdir()
    row = "0: 0100007F:1F41 00000000:0000 0A 00000000:00000000 00:00000000 00000000 0 0 4711 1"
    (server / "net" / "tcp").write_text(f"  sl  local_address rem_address st\n{row}\n")
    (server / "fd").mkdir()
    (server / "fd" / "3").symlink_to("socket:[4711]")
    assert processes.listens(SERVER, 8001) is is_ours
    assert not processes.listens(SERVER, 8002)
