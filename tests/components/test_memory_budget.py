"""A node's memory: its limits, its ledger, and what is left of others."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.errors import MemoryBudgetError
from ftckpt.memory import ledger, memory_limits
from ftckpt.memory import ledger as ledger_module
from ftckpt.memory.directory import SMP_LOCK_NAME, node_directory
from ftckpt.memory.ledger import FileKind, Ledger, LedgerEntry, refusal, require, slots_to_allocate
from ftckpt.memory.locks import FileLock
from ftckpt.memory.mapping import create_mapping
from ftckpt.memory.memory_limits import check_budget, may_hang, room_in
from ftckpt.model.snapshot import SnapshotId
from tests.support.arenas import Rank, on_all, ranks
from tests.support.errors import lacks, raises

pytestmark = pytest.mark.usefixtures("as_flags")

# --- the memory check ---


GIB = 1 << 30


class Host:
    """A pretended host: /proc, /sys/fs/cgroup and a tmpfs of any size."""

    def __init__(self, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = base / "shm"
        self.proc = base / "proc"
        self.cgroups = base / "cgroup"
        for directory in (self.path, self.proc / "self", self.cgroups):
            directory.mkdir(parents=True)
        self.statvfs = SimpleNamespace(f_blocks=1 << 30, f_bavail=16 * GIB // 4096, f_frsize=4096)
        monkeypatch.setattr(os, "statvfs", lambda path: self.statvfs)
        self.put(self.proc / "meminfo", f"MemTotal: 99 kB\nMemAvailable:   {12 * GIB >> 10} kB\n")
        self.mounts("tmpfs")

    def put(self, path: Path, text: object) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")

    def mounts(self, kind: str) -> None:
        lines = [
            "1 0 8:1 / / rw - ext4 /dev/sda rw",
            f"2 1 0:9 / {self.path} rw,nosuid shared:3 - {kind} {kind} rw",
            f"3 1 0:9 / {self.path}-other rw - overlay overlay rw",
            "broken line",
        ]
        self.put(self.proc / "self" / "mountinfo", "\n".join(lines))

    def cgroup(self, line: str, base: str, limit: object, usage: object, cache: tuple[str, int] = ("", 0)) -> None:
        """One group with a limit; ``base`` is its directory below the cgroup root."""
        version_1 = base.startswith(("memory", "cpu,memory"))
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if version_1 else ("memory.max", "memory.current")
        self.put(self.proc / "self" / "cgroup", f"12:cpuset:/x\n1:name=systemd:/y\n{line}")
        for name, value in zip(names, (limit, usage), strict=True):
            self.put(self.cgroups / base / name, value)
        self.put(self.cgroups / base / "memory.stat", f"anon 5\n{cache[0]} {cache[1]}\nslab 4")

    def check(self, need: int) -> None:
        check_budget(self.path / "not" / "yet", need, proc=self.proc, cgroup_root=self.cgroups)

    def refusal(self, need: int) -> str:
        with pytest.raises(MemoryBudgetError) as caught:
            self.check(need)
        assert "\n" not in str(caught.value)
        return str(caught.value)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """One on which nothing is reserved for others."""
    monkeypatch.setattr(memory_limits, "reserve_of", lambda size_bytes: 0)
    return Host(tmp_path, monkeypatch)


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """A file system shared by arenas and others' shared memory: 64 MiB, 60 of them free."""
    host = Host(tmp_path, monkeypatch)
    monkeypatch.setattr(memory_limits, "_SHARED", host.path)
    host.put(host.proc / "meminfo", f"MemTotal: {64 * GIB >> 10} kB\nMemAvailable: {12 * GIB >> 10} kB\n")
    host.statvfs = SimpleNamespace(f_blocks=(64 << 20) // 4096, f_bavail=(60 << 20) // 4096, f_frsize=4096)
    return host


def test_shared_memory_is_not_taken_to_the_last(shared: Host) -> None:
    shared.check(44 << 20)
    text = shared.refusal((44 << 20) + 1)
    assert not lacks(text, "44.0 MiB", str(shared.path), "16.0 MiB")


def test_memory_of_the_host_and_of_a_cgroup_is_not_taken_to_the_last(shared: Host) -> None:
    shared.statvfs.f_blocks = 0
    shared.check(11 * GIB - (64 << 20))
    assert "MemAvailable, plus 1.1 GiB" in shared.refusal(11 * GIB - (64 << 20) + 1)
    shared.cgroup("0::/job", "job", 8 * GIB, 6 * GIB)
    shared.check((2 << 30) - (192 << 20))
    assert not lacks(shared.refusal((2 << 30) - (192 << 20) + 1), "/job", "8.0 GiB", "192.0 MiB")


def test_a_tmpfs_of_arenas_alone_is_taken_to_the_last(shared: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_limits, "_SHARED", Path("/dev/shm"))
    shared.check(60 << 20)
    assert room_in(shared.path) == 60 << 20


def test_a_slot_that_is_allocated_in_training_leaves_others_their_reserve(shared: Host) -> None:
    """Others may have taken more since the start."""

    def allocate(nbytes: int) -> None:
        create_mapping(shared.path / str(nbytes), nbytes).close()

    shared.statvfs.f_bavail = (20 << 20) // 4096
    allocate(4 << 20)
    with raises(MemoryBudgetError, str(5 << 20), str(4 << 20)):
        allocate(5 << 20)
    shared.statvfs.f_bavail = 0
    allocate(1 << 20)  # what no arena can do without


def test_a_small_tmpfs_binds(host: Host) -> None:
    host.statvfs.f_bavail = (64 << 20) // 4096
    text = host.refusal(65 << 20)
    assert not lacks(text, "64.0 MiB", str(host.path))
    assert not lacks(text, "-o", "remount,size=…", str(host.path), "--shm-size") and "--ftckpt-arena" in text


@pytest.mark.parametrize(
    ("line", "base", "name"),
    [
        pytest.param("0::/job/step", "job/step", "/job/step", id="version 2"),
        pytest.param("4:memory:/slurm/job", "memory/slurm/job", "/slurm/job", id="version 1"),
        pytest.param("0::/job", "unified/job", "/job", id="the unified part of a mixed host"),
        pytest.param("0::/../../outside", ".", "/", id="a group outside the namespace"),
    ],
)
def test_a_cgroup_binds(host: Host, line: str, base: str, name: str) -> None:
    host.cgroup(line, base, 8 * GIB, 5 * GIB)
    host.check(3 * GIB)
    free = f"only 3.0 GiB are free in cgroup {name} (limit 8.0 GiB): raise the memory limit"
    assert free in host.refusal(3 * GIB + 1)


def test_a_parent_group_binds(host: Host) -> None:
    host.cgroup("0::/pod/container", "pod/container", "max", 5 * GIB)
    host.cgroup("0::/pod/container", "pod", 4 * GIB, 3 * GIB)
    assert not lacks(host.refusal(2 * GIB), "1.0 GiB", "/pod", "4.0 GiB")


@pytest.mark.parametrize(
    ("line", "base", "name"), [("0::/g", "g", "inactive_file"), ("4:memory:/g", "memory/g", "total_inactive_file")]
)
def test_idle_file_cache_counts_as_free(host: Host, line: str, base: str, name: str) -> None:
    host.cgroup(line, base, 4 * GIB, 4 * GIB, (name, 2 * GIB))
    host.check(2 * GIB)
    assert not lacks(host.refusal(2 * GIB + 1), "2.0 GiB")


@pytest.mark.parametrize(
    "kind, hangs", [("nfs4", True), ("lustre", True), ("fuse.sshfs", True), ("tmpfs", False), ("xfs", False)]
)
def test_file_systems_of_other_machines_may_hang(host: Host, kind: str, hangs: bool) -> None:
    host.mounts(kind)
    assert may_hang(host.path / "not" / "yet", host.proc) == hangs
    assert not may_hang(host.path.parent, host.proc), "on the disk of this machine"
    (host.proc / "self" / "mountinfo").unlink()
    assert may_hang(host.path, host.proc), "nobody knows what it is"
    assert not may_hang(None)


# --- the ledger ---


SNAPSHOTS = [SnapshotId(lineage, iteration) for lineage in (b"a" * 16, b"b" * 16) for iteration in (3, 4, 5)]
_named = st.sampled_from([None, *SNAPSHOTS])
_slot = st.tuples(st.sampled_from([FileKind.SLOT, FileKind.DAMAGED]), _named)
_parity = st.tuples(st.just(FileKind.PARITY), _named)
_other = st.tuples(st.just(FileKind.OTHER), st.none())
_arena = st.lists(st.one_of(_slot, _parity, _other), min_size=1, max_size=8)
_needed = st.sets(st.sampled_from(SNAPSHOTS), max_size=3)


def in_use(arenas: list[list[tuple[FileKind, SnapshotId | None]]]) -> Ledger:
    return Ledger(tuple(
        LedgerEntry(f"file{number}", 1 << number, arena=f"arena{index}", kind=kind, snapshot=snapshot)
        for index, arena in enumerate(arenas)
        for number, (kind, snapshot) in enumerate(arena)
    ))  # fmt: skip


ledgers = st.lists(_arena, max_size=4).map(in_use)


def free(ledger: Ledger) -> set[tuple[str, str]]:
    return {(entry.arena, entry.name) for entry in ledger.entries if entry.is_spare}


def left(ledger: Ledger) -> Ledger:
    return Ledger(tuple(entry for entry in ledger.entries if not entry.is_spare))


def named(entries: Collection[LedgerEntry], needed: Collection[SnapshotId]) -> set[tuple[str, str]]:
    return {(entry.arena, entry.name) for entry in entries if entry.snapshot in needed}


@given(ledgers, _needed)
def test_nothing_that_is_needed_is_freed(ledger: Ledger, needed: set[SnapshotId]) -> None:
    kept = left(ledger.spare(needed))
    assert named(kept.entries, needed) == named(ledger.entries, needed)


@given(ledgers, _needed)
def test_what_stays_can_be_read_by_what_tells_what_it_holds(ledger: Ledger, needed: set[SnapshotId]) -> None:
    kept = left(ledger.spare(needed)).entries
    for arena in {entry.arena for entry in kept}:
        before = [entry for entry in ledger.entries if entry.arena == arena]
        readable = [entry for entry in kept if entry.arena == arena and entry.kind == FileKind.SLOT]
        assert bool(readable) == any(entry.kind == FileKind.SLOT for entry in before)
        others = {entry.name for entry in before if entry.kind == FileKind.OTHER}
        assert others <= {entry.name for entry in kept if entry.arena == arena}, "an arena is whole or gone"


@given(ledgers, _needed)
def test_all_that_is_of_no_use_is_freed(ledger: Ledger, needed: set[SnapshotId]) -> None:
    kept = left(ledger.spare(needed)).entries
    assert {entry.arena for entry in kept} == {entry.arena for entry in ledger.entries if entry.snapshot in needed}
    for arena in {entry.arena for entry in kept}:
        mine = [entry for entry in kept if entry.arena == arena and entry.snapshot not in needed]
        assert sum(entry.kind in {FileKind.SLOT, FileKind.DAMAGED} for entry in mine) <= 1
        assert all(entry.snapshot is None for entry in mine if entry.kind == FileKind.PARITY), (
            "it names another snapshot"
        )


def test_a_start_needs_what_is_whole_and_what_is_protected() -> None:
    whole, protected, other = SNAPSHOTS[2], SNAPSHOTS[1], SNAPSHOTS[0]
    ledger = replace(
        in_use([[(FileKind.SLOT, one) for one in (whole, protected, other)]]), protected=frozenset({protected})
    )
    assert free(ledger.spare(ledger.needed(whole))) == {("arena0", "file2")}


def test_parity_that_an_smp_guards_gives_no_memory_back_unless_its_arena_goes() -> None:
    lent = LedgerEntry("parity", 100, arena="a", kind=FileKind.PARITY, snapshot=SNAPSHOTS[0], lent=True)
    slot = LedgerEntry("slot", 1000, arena="a", kind=FileKind.SLOT, snapshot=SNAPSHOTS[1])
    ledger = Ledger((lent, slot))
    assert ledger.spare({SNAPSHOTS[1]}).free_bytes == 0 and free(ledger.spare({SNAPSHOTS[1]})) == {("a", "parity")}
    assert ledger.spare(set()).free_bytes == 1100


@given(st.integers(0, 6), st.integers(1, 6), st.integers(0, 3), st.integers(-3, 6))
def test_how_many_slots_to_allocate(there: int, slots: int, needed: int, most: int) -> None:
    there = min(there, slots)
    new = slots_to_allocate(there, slots, needed, most)
    assert 0 <= new <= slots - there
    assert there + new >= min(slots, needed + 1), "one can be written"
    assert there + new <= max(there, most, needed + 1), "no more than configured, old ones among them"


# --- whether it fits ---


def test_no_room_is_asked_for_again_while_an_smp_may_give_some_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def check(path: Path, need_bytes: int) -> None:
        calls.append(need_bytes)
        if len(calls) < 3:
            raise MemoryBudgetError("no room")

    monkeypatch.setattr(ledger_module, "check_budget", check)
    monkeypatch.setattr(ledger_module, "_RETRY_SECS", 0.001)
    assert refusal(tmp_path, 7, 5.0).startswith("no room") and calls == [7], "no SMP: nobody gives anything back"
    with FileLock(tmp_path / SMP_LOCK_NAME, 0, "the SMP", "end it"):
        require(tmp_path, 7, 5.0)
        assert calls == [7] * 3
        calls.clear()
        assert refusal(tmp_path, 7).startswith("no room") and calls == [7]
    calls.clear()
    require(tmp_path, 0)
    require(tmp_path, -5)
    assert calls == [], "nothing is needed"


# --- a start that lacks memory names those who have it ---


MIB = 1 << 20


def hold(root: Path, job: str, nbytes: int) -> Path:
    """A node's directory of ``job`` with a file of ``nbytes``."""
    node_dir = node_directory(root, job, "node")
    (node_dir / "dp0.00110011").mkdir()
    (node_dir / "dp0.00110011" / "slot0.safetensors").write_bytes(bytes(nbytes))
    return node_dir


def test_a_start_without_room_leaves_nothing(arena_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hold(arena_root, "yesterday", MIB)
    members = ranks(arena_root, 2)

    def full(path: Path, need_bytes: int) -> None:
        raise MemoryBudgetError(f"{need_bytes} bytes needed")

    def begin(member: Rank) -> None:
        member.arenas.entry.enter()
        member.arena = member.arenas.open(member.manifest(), None)

    monkeypatch.setattr(ledger, "check_budget", full)
    with raises(MemoryBudgetError, "ftckpt jobs --arena", str(arena_root)):
        on_all(members, begin)
    on_all(members, lambda member: member.arenas.withdraw())
    assert [path.name for path in arena_root.iterdir()] == ["ftckpt-yesterday"]
