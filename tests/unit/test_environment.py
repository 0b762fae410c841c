"""What around a job would take its snapshots away, on pretended hosts: found where it holds, silent where not."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from ftckpt.store.environment import Hazard, hazards

USER = 54321
SMP_PID = 77
GIB = 1 << 30
SHM = Path("/dev/shm/ftckpt-job/node")


class Host:
    """A pretended root directory: a plain machine without systemd until a test says otherwise."""

    def __init__(self, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = base / "root"
        self.statvfs = SimpleNamespace(f_blocks=16 * GIB // 4096, f_bavail=1, f_frsize=4096)
        monkeypatch.setattr(os, "statvfs", lambda path: self.statvfs)
        self.mounts("self", "0:25 / /dev/shm rw - tmpfs tmpfs rw")
        self.mounts("1", "0:25 / /dev/shm rw - tmpfs tmpfs rw")
        self.link("proc/self/ns/pid", "pid:[4026531836]")

    def put(self, path: str, *lines: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text("\n".join(lines) + "\n")

    def link(self, path: str, target: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).unlink(missing_ok=True)
        (self.root / path).symlink_to(target)

    def mounts(self, process: str, *mounts: str) -> None:
        self.put(f"proc/{process}/mountinfo", "1 0 8:1 / / rw - ext4 /dev/sda rw", *(f"2 1 {m}" for m in mounts))

    def cgroups(self, *lines: str, process: object = "self") -> None:
        self.put(f"proc/{process}/cgroup", *lines)

    def logind(self) -> None:
        for name in ("system", "seats"):
            (self.root / "run/systemd" / name).mkdir(parents=True)

    def find(self, where: Path = SHM, smp_pid: int | None = None, uid: int = USER) -> dict[str, Hazard]:
        found = hazards(where, smp_pid, root=self.root, uid=uid)
        for hazard in found:
            assert hazard.remedy and "\n" not in hazard.text + hazard.remedy
        assert len({hazard.name for hazard in found}) == len(found)
        return {hazard.name: hazard for hazard in found}


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(tmp_path, monkeypatch)


def test_a_plain_machine_has_no_findings(host: Host) -> None:
    assert host.find() == {}


def test_an_empty_root_has_no_findings(tmp_path: Path) -> None:
    assert hazards(SHM, SMP_PID, root=tmp_path / "nothing", uid=USER) == []


def test_this_machine_can_be_asked() -> None:
    for hazard in hazards(Path("/dev/shm"), os.getpid()):
        assert hazard.name and hazard.text and hazard.remedy


# logind


def test_logind_deletes_by_default(host: Host) -> None:
    host.logind()
    hazard = host.find()["remove_ipc"]
    assert str(SHM) in hazard.text and f"loginctl enable-linger {USER}" in hazard.remedy


def test_without_logind_nothing_is_deleted(host: Host) -> None:
    (host.root / "run/systemd/seats").mkdir(parents=True)  # the package is installed, systemd does not run
    assert host.find() == {}


def test_logind_deletes_in_dev_shm_alone(host: Host) -> None:
    host.logind()
    assert "remove_ipc" not in host.find(Path("/mnt/tmpfs/arenas"))
    assert "remove_ipc" not in host.find(Path("/dev/shmem"))
    assert "remove_ipc" in host.find(Path("/dev/shm"))


def test_users_that_logind_spares(host: Host) -> None:
    host.logind()
    assert "remove_ipc" not in host.find(uid=0) and "remove_ipc" not in host.find(uid=999)
    assert "remove_ipc" in host.find(uid=1000)
    host.put("etc/login.defs", "# SYS_UID_MAX 100", "SYS_UID_MAX  499")
    assert "remove_ipc" in host.find(uid=500) and "remove_ipc" not in host.find(uid=499)
    host.put(f"var/lib/systemd/linger/{USER}")
    assert "remove_ipc" not in host.find()


@pytest.mark.parametrize(
    ("files", "deletes"),
    [
        ({"etc/logind.conf": "[Login]\nRemoveIPC=no"}, False),
        ({"etc/logind.conf": "[Login]\nRemoveIPC = Off"}, False),
        ({"etc/logind.conf": "[Login]\n#RemoveIPC=no"}, False),  # the comment tells what was compiled in
        ({"etc/logind.conf": "[Login]\n#RemoveIPC=no\nRemoveIPC=yes"}, True),
        ({"usr/lib/logind.conf": "RemoveIPC=no", "etc/logind.conf": "[Login]"}, True),
        ({"usr/lib/logind.conf": "RemoveIPC=no"}, False),
        ({"etc/logind.conf": "RemoveIPC=no", "usr/lib/logind.conf.d/a.conf": "RemoveIPC=1"}, True),
        ({"etc/logind.conf.d/b.conf": "RemoveIPC=no", "run/logind.conf.d/a.conf": "RemoveIPC=yes"}, False),
        ({"etc/logind.conf.d/a.conf": "RemoveIPC=no", "run/logind.conf.d/a.conf": "RemoveIPC=yes"}, False),
        ({"etc/logind.conf.d/a.conf": "RemoveIPC=no", "run/logind.conf.d/b.conf": "RemoveIPC=yes"}, True),
    ],
)  # fmt: skip
def test_which_setting_of_logind_counts(host: Host, files: dict[str, str], deletes: bool) -> None:
    host.logind()
    for path, text in files.items():
        host.put(path.replace("/logind", "/systemd/logind"), *text.split("\n"))
    assert ("remove_ipc" in host.find()) == deletes


# containers and mounts


@pytest.mark.parametrize("mark", [".dockerenv", "run/.containerenv", "run/systemd/container"])
def test_a_container_is_known_by_its_mark(host: Host, mark: str) -> None:
    host.put(mark)
    hazard = host.find()["container"]
    assert "may be the container's own" in hazard.text and "in one container and keep it" in hazard.remedy


def test_an_smp_in_another_container_keeps_the_memory(host: Host) -> None:
    host.put(".dockerenv")
    host.link("proc/self/ns/mnt", "mnt:[4026532001]")
    host.link("proc/77/ns/mnt", "mnt:[4026532001]")
    assert "container" in host.find(smp_pid=77)
    host.link("proc/77/ns/mnt", "mnt:[4026532002]")
    assert not host.find(smp_pid=77) and not host.find(smp_pid=0), "of another pid namespace: pid 0"
    (host.root / "proc/77/ns/mnt").unlink()
    assert "container" in host.find(smp_pid=77), "where that cannot be read"


def test_a_container_is_known_by_its_pids(host: Host) -> None:
    host.link("proc/self/ns/pid", "pid:[4026532567]")
    assert "pid namespace" in host.find()["container"].text


def test_a_container_is_known_by_its_cgroup_and_mount(host: Host) -> None:
    host.cgroups("0::/kubepods.slice/kubepods-burstable.slice/cri-containerd-0a1b.scope")
    host.mounts("self", "0:44 / /dev/shm rw - tmpfs shm rw,size=65536k")
    found = host.find()
    assert set(found) == {"container"}
    assert "/dev/shm, which holds the arenas, is the container's own" in found["container"].text


def test_a_mount_that_the_host_does_not_see(host: Host) -> None:
    host.mounts("self", "0:60 / /dev/shm rw - tmpfs tmpfs rw")
    hazard = host.find()["private_mount"]
    assert "job_container" in hazard.text and "--ftckpt-arena" in hazard.remedy
    assert "private_mount" not in host.find(Path("/mnt/shared"))


def test_a_private_part_of_a_shared_file_system(host: Host) -> None:
    host.mounts("self", "8:1 /tmp/systemd-private-1/tmp /tmp rw - ext4 /dev/sda rw")
    assert set(host.find(Path("/tmp/arenas"))) == {"private_mount", "disk"}


def test_equal_namespaces_see_the_same(host: Host) -> None:
    host.mounts("1", "0:60 / /dev/shm rw - tmpfs tmpfs rw")  # mounted between the two looks
    host.link("proc/self/ns/mnt", "mnt:[7]")
    host.link("proc/1/ns/mnt", "mnt:[7]")
    assert host.find() == {}
    host.link("proc/1/ns/mnt", "mnt:[8]")
    assert set(host.find()) == {"private_mount"}


def test_the_hosts_mounts_may_be_unreadable(host: Host) -> None:
    (host.root / "proc/1/mountinfo").unlink()
    assert host.find() == {}


def test_a_small_tmpfs(host: Host) -> None:
    host.statvfs.f_blocks = (64 << 20) // 4096
    hazard = host.find()["small_tmpfs"]
    assert "/dev/shm has 64.0 MiB" in hazard.text
    assert "--shm-size" in hazard.remedy and "--ftckpt-arena" in hazard.remedy
    assert "small_tmpfs" not in host.find(Path("/data/arenas"))


def test_arenas_on_a_disk(host: Host) -> None:
    hazard = host.find(Path("/data/arenas"))["disk"]
    assert "/data/arenas, which holds the arenas, is on ext4" in hazard.text and "--ftckpt-arena" in hazard.remedy


@pytest.mark.parametrize("size", [0, GIB])
def test_a_tmpfs_that_is_large_enough_or_has_no_size(host: Host, size: int) -> None:
    host.statvfs.f_blocks = size // 4096
    assert host.find() == {}


# cgroups


def limit(host: Host, group: str, limit_bytes: int, used_bytes: int) -> None:
    host.put(f"sys/fs/cgroup/{group}/memory.max", str(limit_bytes))
    host.put(f"sys/fs/cgroup/{group}/memory.current", str(used_bytes))


def test_the_cgroup_that_is_charged(host: Host) -> None:
    host.cgroups("0::/job/step", process="self")
    limit(host, "job", 8 * GIB, 2 * GIB)
    limit(host, "job/step", 8 * GIB, GIB)
    hazard = host.find()["memory_charged"]
    assert "cgroup /job (limit 8.0 GiB) has 6.0 GiB left" in hazard.text and "--mem" in hazard.remedy
    assert "memory_charged" not in host.find(Path("/data/arenas"))


@pytest.mark.parametrize("mixed", ["", "unified/"])
def test_one_kill_for_all(host: Host, mixed: str) -> None:
    host.cgroups("0::/pod/container")
    host.put(f"sys/fs/cgroup/{mixed}pod/memory.oom.group", "1")
    host.put(f"sys/fs/cgroup/{mixed}pod/container/memory.oom.group", "0")
    assert "cgroup /pod has memory.oom.group=1" in host.find()["oom_group"].text
    host.cgroups("0::/pod/other", process=SMP_PID)
    assert "oom_group" in host.find(smp_pid=SMP_PID)
    host.cgroups("0::/elsewhere", process=SMP_PID)
    assert "oom_group" not in host.find(smp_pid=SMP_PID)
    host.put(f"sys/fs/cgroup/{mixed}pod/memory.oom.group", "0")
    assert "oom_group" not in host.find()


def test_a_container_sees_its_group_at_the_root(host: Host) -> None:
    host.cgroups("0::/")
    host.put("sys/fs/cgroup/memory.oom.group", "1")
    assert "cgroup / has" in host.find()["oom_group"].text


@pytest.mark.parametrize(
    "group",
    ["4:memory:/slurm/uid_1/job_12/{}/task_0", "0::/system.slice/slurmstepd.scope/job_12/{}/user/task_0"],
)
def test_an_smp_in_the_step_of_the_trainers(host: Host, group: str) -> None:
    host.cgroups("1:name=systemd:/system.slice/slurmd.service", group.format("step_0"))
    host.put("usr/lib/systemd/system/slurmd.service", "[Service]", "KillMode=process")
    hazard = host.find()["smp_in_step"]
    assert "step 0 of Slurm job 12" in hazard.text and "the snapshots stay" in hazard.text
    assert "srun --overlap" in hazard.remedy
    host.cgroups(group.format("step_0"), process=SMP_PID)
    assert set(host.find(smp_pid=SMP_PID)) == {"smp_in_step"}
    host.cgroups(group.format("step_1"), process=SMP_PID)
    assert host.find(smp_pid=SMP_PID) == {}


def test_the_batch_step_lives_as_long_as_the_job(host: Host) -> None:
    host.cgroups("0::/system.slice/slurmstepd.scope/job_12/step_batch/user/task_0")
    assert host.find() == {}


@pytest.mark.parametrize("line", ["0::/system.slice/train.service", "1:name=systemd:/system.slice/train.service"])
def test_an_smp_in_the_unit_of_the_trainers(host: Host, line: str) -> None:
    host.cgroups(line)
    hazard = host.find()["smp_in_unit"]
    assert "systemd unit train.service" in hazard.text and "when the unit stops" in hazard.text
    host.cgroups("0::/system.slice/ftckpt-smp.service", process=SMP_PID)
    assert host.find(smp_pid=SMP_PID) == {}


@pytest.mark.parametrize(
    ("files", "kills"),
    [
        ({"etc/system/train@.service": "KillMode=process"}, False),
        ({"etc/system/train@.service": "KillMode=mixed"}, True),
        ({"etc/system/train@.service": "#KillMode=process"}, True),
        ({"usr/lib/system/train@.service": "KillMode=process", "etc/system/train@.service": "x"}, True),
        ({"run/transient/train@7.service": "KillMode=none"}, False),
        ({"run/transient/train@7.service.d/k.conf": "KillMode=process"}, False),
        ({"etc/system/train@.service": "KillMode=none", "etc/system/train@7.service.d/k": "KillMode=mixed"}, True),
    ],
)  # fmt: skip
def test_which_kill_mode_counts(host: Host, files: dict[str, str], kills: bool) -> None:
    host.cgroups("0::/system.slice/system-train.slice/train@7.service")
    for name, text in files.items():
        path = f"{name}.conf" if name.endswith("/k") else name
        place, _, rest = path.replace("/system/", "/systemd/system/").partition("/transient/")
        host.put(f"{place}/systemd/transient/{rest}" if rest else place, "[Service]", text)
    assert ("smp_in_unit" in host.find()) == kills


def test_a_session_kills_only_where_logind_says_so(host: Host) -> None:
    host.cgroups("0::/user.slice/user-1000.slice/session-3.scope")
    host.put("etc/systemd/logind.conf", "[Login]", "#KillUserProcesses=no")
    assert host.find() == {}
    host.put("etc/systemd/logind.conf", "[Login]", "KillUserProcesses=yes")
    assert "the session ends" in host.find()["smp_in_unit"].text


@pytest.mark.parametrize("unit", ["docker-0a1b.scope", "init.scope"])
def test_units_of_containers_are_told_as_containers(host: Host, unit: str) -> None:
    host.cgroups(f"0::/system.slice/{unit}")
    assert "smp_in_unit" not in host.find()
