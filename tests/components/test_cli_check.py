"""ftckpt check: the host, the pairs that talk, the hazards of a machine."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from ftckpt.cli.check_host import host_checks
from ftckpt.cli.check_pairs import distances
from ftckpt.cli.findings import PASSED, CheckResult
from ftckpt.memory.environment import Hazard, hazards
from tests.support.errors import lacks

# --- the report of ``ftckpt check`` about the cores of ranks, however a launcher has bound them ---


def cores(tmp_path: Path, *ranks: set[int]) -> CheckResult:
    return next(one for one in host_checks(tmp_path / "none", 0, ranks) if one.name == "cores")


def test_ranks_that_are_bound_have_the_cores_of_all(tmp_path: Path) -> None:
    found = cores(tmp_path, {0, 1}, {2, 3}, {4, 5}, {6, 7})
    assert found.state == PASSED and found.figures["cores"] == 8
    assert not lacks(found.text, "8", "4", "2")
    assert not lacks(cores(tmp_path, {0, 1}, {2}).text, "1", "2")
    shared = cores(tmp_path, {0, 1, 2}, {0, 1, 2})
    assert shared.state == PASSED and not lacks(shared.text, "3", "2")
    assert "own" not in shared.text and "own" not in cores(tmp_path, {0, 1}).text


# --- which nodes ``ftckpt check`` has talk to each other, and when ---


def test_few_nodes_are_all_paired_and_of_many_some_are_far_apart() -> None:
    for nodes in (2, 3, 8):
        assert distances(nodes) == list(range(1, nodes))
    assert distances(9) == [1, 2, 4] and distances(1000) == [1, 250, 500]


# --- host settings that would delete a job's snapshots, on pretended hosts ---


USER = 54321
GIB = 1 << 30
SHM = Path("/dev/shm/ftckpt-job/node")


class Host:
    """A pretended root directory: a plain machine without systemd until a test changes it."""

    def __init__(self, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = base / "root"
        self.statvfs = SimpleNamespace(f_blocks=16 * GIB // 4096, f_bavail=1, f_frsize=4096)
        monkeypatch.setattr(os, "statvfs", lambda path: self.statvfs)
        self.mounts("0:25 / /dev/shm rw - tmpfs tmpfs rw")

    def put(self, path: str, *lines: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text("\n".join(lines) + "\n")

    def mounts(self, *mounts: str) -> None:
        self.put("proc/self/mountinfo", "1 0 8:1 / / rw - ext4 /dev/sda rw", *(f"2 1 {m}" for m in mounts))

    def cgroups(self, *lines: str) -> None:
        self.put("proc/self/cgroup", *lines)

    def logind(self) -> None:
        for name in ("system", "seats"):
            (self.root / "run/systemd" / name).mkdir(parents=True)

    def find(self, where: Path = SHM, uid: int = USER) -> dict[str, Hazard]:
        found = hazards(where, root=self.root, uid=uid)
        for hazard in found:
            assert hazard.remedy and "\n" not in hazard.text + hazard.remedy
        assert len({hazard.name for hazard in found}) == len(found)
        return {hazard.name: hazard for hazard in found}


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(tmp_path, monkeypatch)


def test_a_plain_machine_has_no_findings(host: Host) -> None:
    assert host.find() == {}


# logind


def test_logind_deletes_by_default(host: Host) -> None:
    host.logind()
    hazard = host.find()["remove_ipc"]
    assert str(SHM) in hazard.text and not lacks(hazard.remedy, str(USER))


# limits


def test_a_disk(host: Host) -> None:
    for kind in ("ext4", "xfs", "nfs4"):
        host.mounts("0:25 / /dev/shm rw - tmpfs tmpfs rw", f"0:26 / /usr rw - {kind} /dev/sdb rw")
        hazard = host.find(Path("/usr/arenas"))["arena_on_disk"]
        assert not lacks(hazard.text, "/usr/arenas", "/usr", str(kind)) and "--ftckpt-arena" in hazard.remedy
    assert host.find() == {}


def test_a_small_tmpfs(host: Host) -> None:
    host.statvfs.f_blocks = (64 << 20) // 4096
    hazard = host.find()["small_tmpfs"]
    assert "/dev/shm has 64.0 MiB" in hazard.text
    assert "--shm-size" in hazard.remedy and "--ftckpt-arena" in hazard.remedy
    assert "small_tmpfs" not in host.find(Path("/data/arenas"))


def limit(host: Host, group: str, limit_bytes: int, used_bytes: int) -> None:
    host.put(f"sys/fs/cgroup/{group}/memory.max", str(limit_bytes))
    host.put(f"sys/fs/cgroup/{group}/memory.current", str(used_bytes))


def test_the_cgroup_that_is_charged(host: Host) -> None:
    host.cgroups("0::/job/step")
    limit(host, "job", 8 * GIB, 2 * GIB)
    limit(host, "job/step", 8 * GIB, GIB)
    hazard = host.find()["memory_charged"]
    assert not lacks(hazard.text, "/job", "8.0 GiB", "6.0 GiB") and "--mem" in hazard.remedy
    assert "memory_charged" not in host.find(Path("/data/arenas"))
