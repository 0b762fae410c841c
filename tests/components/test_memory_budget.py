"""The memory check: which limit binds, for each kind of limit, and its message."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from ftckpt.errors import MemoryBudgetError
from ftckpt.memory import memory_limits
from ftckpt.memory.mapping import create_mapping
from ftckpt.memory.memory_limits import check_budget, may_hang, room_in
from tests.support.errors import lacks, raises

pytestmark = pytest.mark.usefixtures("as_flags")

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


def test_available_memory_binds(host: Host) -> None:
    host.check(12 * GIB)
    host.check(0)
    text = host.refusal(12 * GIB + 1)
    assert f"need 12.0 GiB ({12 * GIB + 1} bytes)" in text
    assert not lacks(text, "12.0 GiB", "MemAvailable")
    assert "--ftckpt-slots" in text and not lacks(text, str(host.path), "16.0 GiB")


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


def test_missing_and_broken_files_bind_nothing(host: Host) -> None:
    host.cgroup("0::/g", "g", "many", 5)
    (host.proc / "meminfo").unlink()
    host.check(16 * GIB)
    (host.proc / "self" / "cgroup").write_bytes(b"\xff\n::\nx")
    host.check(16 * GIB)


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
