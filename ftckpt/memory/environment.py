"""Hazards of the host to a job's snapshots, detected at start, each with its remedy."""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ftckpt.memory.memory_limits import MEMORY_FILE_SYSTEMS, UNKNOWN, cgroup_limits, existing, mount_of, read_lines
from ftckpt.model.text import human

_SMALL_BYTES = 1 << 30
"""A smaller tmpfs is a container runtime's default, not one that was sized for arenas."""
_KEEPS = re.compile(r"\s*#?\s*RemoveIPC\s*=\s*(no|n|0|false|f|off)\b", re.IGNORECASE)


@dataclass(frozen=True)
class Hazard:
    """A hazard: a short name, a text with the condition and its consequence, and a remedy."""

    name: str
    text: str
    remedy: str


def hazards(arena_root: Path, *, root: Path = Path("/"), uid: int | None = None) -> list[Hazard]:
    """Conditions of this host that would delete arenas under ``arena_root``, slow them down, or make them not fit.

    A condition that cannot be read counts as absent.

    Args:
        root: parent of ``proc``, ``sys``, ``etc``, ``run``, ``usr`` and ``var``.
        uid: user of the job; None: the effective user of this process.
    """
    checks: Sequence[Callable[[], Hazard | None]] = (
        lambda: _remove_ipc(arena_root, root, os.geteuid() if uid is None else uid),
        lambda: _on_disk(arena_root, root),
        lambda: _small_tmpfs(arena_root, root),
        lambda: _charged(arena_root, root),
    )
    found = []
    for check in checks:
        with suppress(OSError):
            found.append(check())
    return [hazard for hazard in found if hazard is not None]


def _remove_ipc(arena_root: Path, root: Path, uid: int) -> Hazard | None:
    """Detect RemoveIPC: systemd-logind deletes a user's files in /dev/shm when the user's last session ends."""
    run = root / "run" / "systemd"
    # ``system`` exists if systemd booted the host (sd_booted(3)), ``seats`` if logind runs.
    running = (run / "system").is_dir() and (run / "seats").is_dir()
    if not running or not arena_root.resolve().is_relative_to("/dev/shm") or uid <= _last_system_uid(root):
        return None
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = str(uid)
    # A lingering user never counts as logged out.
    if _keeps_ipc(root) or (root / "var/lib/systemd/linger" / user).exists():
        return None
    return Hazard(
        "remove_ipc",
        f"systemd-logind has RemoveIPC=yes: it deletes the files of {user} in /dev/shm, {arena_root} included, "
        "when the last session of that user on this machine ends (the end of an ssh login suffices)",
        f"loginctl enable-linger {user}, or RemoveIPC=no in /etc/systemd/logind.conf and restart systemd-logind, "
        "or name a tmpfs outside /dev/shm with --ftckpt-arena",
    )


def _on_disk(arena_root: Path, root: Path) -> Hazard | None:
    mount = mount_of(existing(arena_root), root / "proc")
    if mount.kind in (*MEMORY_FILE_SYSTEMS, UNKNOWN):
        return None
    return Hazard(
        "arena_on_disk",
        f"{arena_root} is on {mount.point} ({mount.kind}), not on a tmpfs: snapshots are written to its disk, which "
        "is slower than a copy in memory",
        "name a tmpfs with --ftckpt-arena (default: /dev/shm)",
    )


def _small_tmpfs(arena_root: Path, root: Path) -> Hazard | None:
    where = existing(arena_root)
    mount, status = mount_of(where, root / "proc"), os.statvfs(where)
    # 0: the tmpfs is mounted without a size limit.
    size = status.f_blocks * status.f_frsize
    if mount.kind not in MEMORY_FILE_SYSTEMS or not 0 < size < _SMALL_BYTES:
        return None
    return Hazard(
        "small_tmpfs",
        f"{mount.point} has {human(size)} in total, too little for snapshots of a large model (docker's default is "
        "64 MiB)",
        f"enlarge it (docker: --shm-size; Kubernetes: an emptyDir of medium Memory at {mount.point}; otherwise mount "
        f"-o remount,size=… {mount.point}), or name another tmpfs with --ftckpt-arena",
    )


def _charged(arena_root: Path, root: Path) -> Hazard | None:
    """The memory limit that arenas are charged to, while their writers live and after they exit."""
    mount = mount_of(existing(arena_root), root / "proc")
    limits = cgroup_limits(root / "proc", root / "sys/fs/cgroup")
    if not limits or mount.kind not in MEMORY_FILE_SYSTEMS:
        return None
    tight = min(limits, key=lambda limit: limit.free_bytes)
    return Hazard(
        "memory_charged",
        f"slots are charged to the cgroup of the trainer that allocates them, parity to that of the SMP: "
        f"{tight.name} has {human(tight.free_bytes)} left. The charge remains after the trainers exit, on the parent "
        "group once theirs is deleted, until the arenas are removed",
        "include the arenas in the memory request of the job (Slurm: --mem; Kubernetes: limits.memory)",
    )


def _keeps_ipc(root: Path) -> bool:
    """Whether a file of systemd-logind has RemoveIPC=no, or says so in the comment that names the default."""
    places = [root / place / "systemd" for place in ("usr/lib", "usr/local/lib", "run", "etc")]
    files = (path for place in places for path in (place / "logind.conf", *(place / "logind.conf.d").glob("*.conf")))
    return any(_KEEPS.match(line) for path in files for line in read_lines(path))


def _last_system_uid(root: Path) -> int:
    for line in read_lines(root / "etc" / "login.defs"):
        words = line.split()
        if words[:1] == ["SYS_UID_MAX"] and len(words) > 1 and words[1].isdigit():
            return int(words[1])
    # systemd's default. RemoveIPC does not apply to system users.
    return 999
