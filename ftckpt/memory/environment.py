"""What around a job would take its snapshots away: recognised at start, each with the fix."""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ftckpt.memory.memory_limits import MEMORY_FILE_SYSTEMS, UNKNOWN, cgroup_limits, existing, mount_of, read_lines
from ftckpt.model.text import human

_SMALL_BYTES = 1 << 30
"""A tmpfs below this is a default of a container runtime, not one that was made for arenas."""
_YES = frozenset({"1", "yes", "y", "true", "t", "on"})


@dataclass(frozen=True)
class Hazard:
    """A danger to snapshots: a short name, what is so and what it leads to, what to do."""

    name: str
    text: str
    remedy: str


def hazards(arena_root: Path, *, root: Path = Path("/"), uid: int | None = None) -> list[Hazard]:
    """What on this host would destroy or slow down arenas under ``arena_root``, or leave no room for them.

    What cannot be read is taken for harmless.

    Args:
        root: where ``proc``, ``sys``, ``etc``, ``run``, ``usr`` and ``var`` are.
        uid: user of the job; None: the effective one of this process.
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


def _on_disk(arena_root: Path, root: Path) -> Hazard | None:
    mount = mount_of(existing(arena_root), root / "proc")
    if mount.kind in (*MEMORY_FILE_SYSTEMS, UNKNOWN):
        return None
    return Hazard(
        "arena_on_disk",
        f"{arena_root} is on {mount.point} ({mount.kind}), not on a tmpfs: snapshots are written to its disk, which "
        "takes longer than a copy in memory",
        "name a tmpfs with --ftckpt-arena (default: /dev/shm)",
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
