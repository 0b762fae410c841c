"""What around a job would take its snapshots away: recognised at start, each with the fix."""

from __future__ import annotations

import os
import pwd
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ftckpt.model.text import human
from ftckpt.store.memory import MEMORY_FILE_SYSTEMS, cgroup_limits, existing, mount_of, read_lines

_SMALL_BYTES = 1 << 30
"""A tmpfs below this is a default of a container runtime, not one that was made for arenas."""
_FIRST_PID_NAMESPACE = "pid:[4026531836]"
"""PROC_PID_INIT_INO: the namespace of the host itself."""
_CONTAINER_GROUP = re.compile(r"docker|kubepods|libpod|containerd|crio-|/lxc")
_CONTAINER_UNIT = re.compile(r"(docker|libpod|cri-containerd|crio|machine)-.*\.scope|slurmstepd\.scope|init\.scope")
_SLURM_STEP = re.compile(r"/job_(\d+)/step_([^/]+)")
_OWN_STEP = "srun --overlap --ntasks-per-node=1 ftckpt smp"
_CONSEQUENCE = "the snapshots stay, and the next attempt starts another one"
_YES = frozenset({"1", "yes", "y", "true", "t", "on"})


@dataclass(frozen=True)
class Hazard:
    """What can destroy snapshots, or slow them down: a short name, what is so and what it leads to, what to do."""

    name: str
    text: str
    remedy: str


def hazards(
    arena_root: Path, smp_pid: int | None = None, *, root: Path = Path("/"), uid: int | None = None
) -> list[Hazard]:
    """What on this host would destroy arenas under ``arena_root``, or end the SMP with the trainers.

    What cannot be read is taken for harmless.

    Args:
        smp_pid: process of the SMP; None: it runs where this process runs, as one that a trainer starts does; 0: in
            another pid namespace.
        root: where ``proc``, ``sys``, ``etc``, ``run``, ``usr`` and ``var`` are.
        uid: user of the job; None: the effective one of this process.
    """
    checks = [
        _remove_ipc(arena_root, root, os.geteuid() if uid is None else uid),
        None if _outlasts(root, smp_pid) else _container(arena_root, root) or _private_mount(arena_root, root),
        _disk(arena_root, root),
        _small_tmpfs(arena_root, root),
        _charged(arena_root, root),
        _out_of_memory_group(root, smp_pid),
        _slurm_step(root, smp_pid) or _systemd_unit(root, smp_pid),
    ]
    return [hazard for hazard in checks if hazard is not None]


def _remove_ipc(arena_root: Path, root: Path, uid: int) -> Hazard | None:
    """systemd-logind deletes what a user has in /dev/shm, directories too, when the last session of the user ends."""
    run = root / "run" / "systemd"
    # ``system`` is there where systemd booted the host (sd_booted(3)), ``seats`` where logind runs.
    running = (run / "system").is_dir() and (run / "seats").is_dir()
    if not running or not arena_root.resolve().is_relative_to("/dev/shm") or uid <= _last_system_uid(root):
        return None
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = str(uid)
    # A user who lingers never counts as gone.
    if not _logind(root, "RemoveIPC") or (root / "var/lib/systemd/linger" / user).exists():
        return None
    return Hazard(
        "remove_ipc",
        f"systemd-logind has RemoveIPC=yes: it deletes what {user} has in /dev/shm, {arena_root} included, "
        "when the last session of that user on this machine ends (an ssh login that ends suffices)",
        f"loginctl enable-linger {user}, or RemoveIPC=no in /etc/systemd/logind.conf and restart systemd-logind, "
        "or name a tmpfs outside of /dev/shm with --ftckpt-arena",
    )


def _outlasts(root: Path, smp_pid: int | None) -> bool:
    """Whether the SMP runs in another container: that has the tmpfs mounted, too, and keeps it when this one ends."""
    if smp_pid is None:
        return False
    spaces = {_link(root / "proc" / process / "ns" / "mnt") for process in ("self", str(smp_pid))}
    return smp_pid == 0 or (len(spaces) == 2 and "" not in spaces)


def _container(arena_root: Path, root: Path) -> Hazard | None:
    """Whether this is a container: its /dev/shm and its processes end with it."""
    marks = [mark for mark in (".dockerenv", "run/.containerenv", "run/systemd/container") if (root / mark).exists()]
    # Docker, podman and systemd-nspawn leave a mark; other runtimes give at least a namespace or a group away.
    namespace = _link(root / "proc" / "self" / "ns" / "pid")
    if namespace not in ("", _FIRST_PID_NAMESPACE):
        marks.append("a pid namespace of its own")
    marks += [f"cgroup {group}" for group in _groups(root, None) if _CONTAINER_GROUP.search(group)][:1]
    if not marks:
        return None
    mount = mount_of(existing(arena_root), root / "proc")
    # Container runtimes call the source of the /dev/shm that they mount "shm".
    own = "is the container's own" if mount.source == "shm" else "may be the container's own"
    return Hazard(
        "container",
        f"the job runs in a container ({marks[0]}) and {mount.point}, which holds the arenas, {own}: "
        "snapshots and the SMP end when the container ends, not when the trainers do",
        "run trainers and SMP in one container and keep it: let the launcher restart the trainers inside it; "
        "or give it memory that outlives it (docker: --ipc=host; Kubernetes: an emptyDir of medium Memory, and the "
        "SMP in a sidecar that mounts it, too: ftckpt init k8s)",
    )


def _private_mount(arena_root: Path, root: Path) -> Hazard | None:
    """Whether the host does not see the mount of the arenas: it goes with the mount namespace."""
    proc, where = root / "proc", existing(arena_root)
    own, host = mount_of(where, proc), mount_of(where, proc, "1")
    # Two views of one mount namespace may differ by what was mounted between the two reads.
    spaces = {_link(proc / process / "ns" / "mnt") for process in ("self", "1")}
    if not own.device or not host.device or (own.device, own.root) == (host.device, host.root):
        return None
    if len(spaces) == 1 and "" not in spaces:
        return None
    return Hazard(
        "private_mount",
        f"{own.point}, which holds the arenas, is mounted in a mount namespace of the job alone (systemd's "
        "PrivateTmp, Slurm's job_container/tmpfs): snapshots end with the last process in it",
        "name a tmpfs that the host shares with --ftckpt-arena, start the SMP in the same namespace and keep it, "
        "or switch the private mount off",
    )


def _disk(arena_root: Path, root: Path) -> Hazard | None:
    kind = mount_of(existing(arena_root), root / "proc").kind
    # Where mounts cannot be read nobody knows the kind.
    if kind in MEMORY_FILE_SYSTEMS or not (root / "proc/self/mountinfo").exists():
        return None
    return Hazard(
        "disk",
        f"{arena_root}, which holds the arenas, is on {kind}, no tmpfs: snapshots go at the speed of that device",
        "name a tmpfs with --ftckpt-arena",
    )


def _small_tmpfs(arena_root: Path, root: Path) -> Hazard | None:
    where = existing(arena_root)
    mount, status = mount_of(where, root / "proc"), os.statvfs(where)
    # 0 where the tmpfs was mounted without a limit.
    size = status.f_blocks * status.f_frsize
    if mount.kind not in MEMORY_FILE_SYSTEMS or not 0 < size < _SMALL_BYTES:
        return None
    return Hazard(
        "small_tmpfs",
        f"{mount.point} has {human(size)} in all: too small for snapshots of a large model (64 MiB is what docker "
        "gives a container)",
        f"enlarge it (docker: --shm-size; Kubernetes: an emptyDir of medium Memory at {mount.point}; else mount -o "
        f"remount,size=… {mount.point}), or name another tmpfs with --ftckpt-arena",
    )


def _charged(arena_root: Path, root: Path) -> Hazard | None:
    """Which memory limit arenas count against, while they are written and when their writers have gone."""
    mount = mount_of(existing(arena_root), root / "proc")
    limits = cgroup_limits(root / "proc", root / "sys/fs/cgroup")
    if not limits or mount.kind not in MEMORY_FILE_SYSTEMS:
        return None
    tight = min(limits, key=lambda limit: limit.free_bytes)
    return Hazard(
        "memory_charged",
        f"slots are charged to the cgroup of the trainer that allocates them, parity to that of the SMP: "
        f"{tight.name} has {human(tight.free_bytes)} left. What it was charged with stays charged when the trainers "
        "end, to the group above once theirs is gone, until the arenas are removed",
        "count the arenas in the memory that the job asks for (Slurm: --mem; Kubernetes: limits.memory)",
    )


def _out_of_memory_group(root: Path, smp_pid: int | None) -> Hazard | None:
    """Whether the kernel kills trainers and SMP together when memory runs out (cgroup v2)."""
    mine, other = _unified(root, None), _unified(root, smp_pid)
    if mine is None or other is None:
        return None
    # Only groups above both matter: one above the trainers alone takes the trainers alone.
    shared = os.path.commonpath([mine, other])
    # Where both versions are mounted version 2 lies under ``unified``.
    for base in (root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"):
        for group in (PurePosixPath(shared), *PurePosixPath(shared).parents):
            if read_lines(base / str(group).lstrip("/") / "memory.oom.group")[:1] == ["1"]:
                return Hazard(
                    "oom_group",
                    f"cgroup {group} has memory.oom.group=1 and holds the trainers and the SMP: when memory runs out "
                    "in it, the kernel kills all of them together",
                    "start 'ftckpt smp' in a cgroup of its own, or write 0 to memory.oom.group "
                    "(Kubernetes: singleProcessOOMKill: true of the kubelet)",
                )
    return None


def _slurm_step(root: Path, smp_pid: int | None) -> Hazard | None:
    """Whether the SMP is in the trainers' step. The batch step ends with the job: restarts happen inside of it."""
    step, other = _step(root, None), _step(root, smp_pid)
    if step is None or step != other or step[1] == "batch":
        return None
    job, name = step
    return Hazard(
        "smp_in_step",
        f"the SMP is in step {name} of Slurm job {job} with the trainers: it is killed when the step ends; "
        f"{_CONSEQUENCE}",
        f"start it in a step of its own before the trainers: {_OWN_STEP} &",
    )


def _systemd_unit(root: Path, smp_pid: int | None) -> Hazard | None:
    unit, other = _unit(root, None), _unit(root, smp_pid)
    if unit is None or unit != other or _CONTAINER_UNIT.fullmatch(unit):
        return None
    if unit.startswith("session-"):
        if not _logind(root, "KillUserProcesses"):
            return None
        reason, remedy = (
            "the session ends (KillUserProcesses=yes)",
            "KillUserProcesses=no in /etc/systemd/logind.conf",
        )
    elif _kill_mode(root, unit) in ("process", "none"):
        return None
    else:
        reason, remedy = "the unit stops", "KillMode=process in the unit"
    return Hazard(
        "smp_in_unit",
        f"the SMP is in systemd unit {unit} with the trainers: it is killed when {reason}; {_CONSEQUENCE}",
        f"start 'ftckpt smp' in a unit of its own (systemd-run ftckpt smp), or set {remedy}",
    )


def _groups(root: Path, pid: int | None) -> list[str]:
    """Paths of a process's cgroups; of this process's if ``pid`` is None."""
    lines = read_lines(root / "proc" / ("self" if pid is None else str(pid)) / "cgroup")
    # hierarchy:controllers:path
    return [line.split(":", 2)[2] for line in lines if line.count(":") >= 2]


def _unified(root: Path, pid: int | None) -> str | None:
    lines = read_lines(root / "proc" / ("self" if pid is None else str(pid)) / "cgroup")
    return next((line[3:] for line in lines if line.startswith("0::/")), None)


def _step(root: Path, pid: int | None) -> tuple[str, str] | None:
    matches = [match for group in _groups(root, pid) if (match := _SLURM_STEP.search(group))]
    return (matches[0][1], matches[0][2]) if matches else None


def _unit(root: Path, pid: int | None) -> str | None:
    """The innermost systemd unit of a process."""
    lines = read_lines(root / "proc" / ("self" if pid is None else str(pid)) / "cgroup")
    for line in lines:
        if line.startswith("0::/") or ":name=systemd:/" in line:
            units = [part for part in line.split("/") if part.endswith((".service", ".scope"))]
            if units:
                return units[-1]
    return None


def _kill_mode(root: Path, unit: str) -> str:
    # A drop-in overrides its unit, what is in /etc overrides /run and /usr, an instance its template: the last wins.
    template = re.sub(r"@.*\.", "@.", unit)
    places = [root / place / "systemd" for place in ("usr/lib", "lib", "run", "etc")]
    directories = [place / kind for place in places for kind in ("transient", "system")]
    mode = "control-group"
    for name in dict.fromkeys((template, unit)):
        files = [file for directory in directories if (file := directory / name).exists()][-1:]
        for directory in directories:
            files += sorted((directory / f"{name}.d").glob("*.conf"))
        for file in files:
            mode = _values(file).get("killmode", mode)
    return mode


def _logind(root: Path, key: str) -> bool:
    """A yes-or-no setting of systemd-logind; what nobody set is as a comment of the shipped file has it, else yes."""
    places = [root / place / "systemd" for place in ("usr/lib", "usr/local/lib", "run", "etc")]
    # As systemd reads them: a drop-in in /etc hides one of that name below /run and /usr, then names are in order.
    drop_ins = {path.name: path for place in places for path in (place / "logind.conf.d").glob("*.conf")}
    main = [place / "logind.conf" for place in reversed(places) if (place / "logind.conf").exists()][:1]
    value = next((_values(path, "#")[key.lower()] for path in main if key.lower() in _values(path, "#")), "yes")
    for path in (*main, *(drop_ins[name] for name in sorted(drop_ins))):
        value = _values(path).get(key.lower(), value)
    return value.lower() in _YES


def _values(path: Path, begin: str = "") -> dict[str, str]:
    """``key=value`` lines that begin with ``begin``; keys in lower case, the last one counts."""
    lines = [line.strip() for line in read_lines(path)]
    pairs = [line.removeprefix(begin).partition("=") for line in lines if line.startswith(begin)]
    return {key.strip().lower(): value.strip() for key, equals, value in pairs if equals and value.strip()}


def _last_system_uid(root: Path) -> int:
    for line in read_lines(root / "etc" / "login.defs"):
        words = line.split()
        if words[:1] == ["SYS_UID_MAX"] and len(words) > 1 and words[1].isdigit():
            return int(words[1])
    # systemd's own default; it spares system users from RemoveIPC.
    return 999


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
