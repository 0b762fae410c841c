"""Memory limits, checked before arenas are allocated: exhaustion later is a SIGBUS or an OOM kill."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ftckpt.errors import MemoryBudgetError
from ftckpt.model.text import human

MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "hugetlbfs"})
UNKNOWN = "an unknown file system"
_UNLIMITED_BYTES = 1 << 62
"""cgroup v1 writes a number near 2**63 for "no limit"."""


_SHARED = Path("/dev/shm")
"""The tmpfs through which other programs share memory: workers of data loaders, NCCL."""


@dataclass(frozen=True)
class Limit:
    """A limit on arenas: its name, the bytes free below it, and how to raise it.

    ``reserve_bytes`` of the free ones are reserved for other programs.
    """

    name: str
    free_bytes: int
    remedy: str
    reserve_bytes: int = 0

    @property
    def room_bytes(self) -> int:
        """Bytes that arenas may still take."""
        return max(0, self.free_bytes - self.reserve_bytes)


@dataclass(frozen=True)
class Mount:
    """A line of mountinfo: file system type and mount point."""

    kind: str
    point: str


def check_budget(
    path: Path, need_bytes: int, *, proc: Path = Path("/proc"), cgroup_root: Path = Path("/sys/fs/cgroup")
) -> None:
    """Check that ``need_bytes`` of new arenas under ``path`` fit and leave the reserve to other programs.

    The limits are the free space of the file system and, if it keeps files in memory, MemAvailable and every cgroup
    limit up to the root, each minus its reserve.

    Raises:
        MemoryBudgetError: the text names need, each limit, the tightest one and its remedy.
    """
    limits = _limits(path, proc, cgroup_root)
    tight = [limit for limit in limits if limit.room_bytes < need_bytes]
    if not tight:
        return
    binding = min(tight, key=lambda limit: limit.room_bytes)
    listing = ", ".join(f"{limit.name} {human(limit.room_bytes)}" for limit in limits)
    beside = f", plus {human(binding.reserve_bytes)} reserved for other programs" if binding.reserve_bytes else ""
    raise MemoryBudgetError(
        f"arenas under {path} need {human(need_bytes)} ({need_bytes} bytes) but only "
        f"{human(binding.room_bytes)} are free in {binding.name}{beside}: {binding.remedy}; "
        f"or use less memory (fewer --ftckpt-slots, more ranks to share the state); all limits: {listing}"
    )


def reserve_of(size_bytes: int) -> int:
    """The reserve for other programs in shared memory of ``size_bytes``: 64 MiB plus 1/64 of it, at most a quarter.
    Without one these programs are killed by SIGBUS or the OOM killer, long after the start."""
    return min(size_bytes // 4, (64 << 20) + size_bytes // 64)


def room_in(directory: Path) -> int | None:
    """Bytes that arenas may still take in the file system of ``directory``; None if it has no limit."""
    limits = _room(directory, str(directory))
    return limits[0].room_bytes if limits else None


def tightest_limit(path: Path, *, proc: Path = Path("/proc"), cgroup_root: Path = Path("/sys/fs/cgroup")) -> Limit:
    """The tightest limit on new arenas under ``path``."""
    return min(_limits(path, proc, cgroup_root), key=lambda limit: limit.room_bytes)


def _limits(path: Path, proc: Path, cgroup_root: Path) -> list[Limit]:
    """All limits on new files under ``path``."""
    where = existing(path)
    mount = mount_of(where, proc)
    room = _room(where, mount.point)
    # Memory does not limit files on a disk: their pages are written back and dropped.
    in_memory = mount.kind in MEMORY_FILE_SYSTEMS
    return room + _available(proc) + cgroup_limits(proc, cgroup_root) if in_memory else room


def cgroup_limits(proc: Path, cgroup_root: Path) -> list[Limit]:
    """Memory limits of this process's cgroups, innermost first, versions 1 and 2."""
    return [limit for root, parts, names in _groups(proc, cgroup_root) for limit in _group_limits(root, parts, names)]


def cgroup_directories(proc: Path, cgroup_root: Path, process: str = "self") -> list[Path]:
    """Directories of the cgroups that limit the memory of ``process``, innermost first; some may not exist."""
    found = _groups(proc, cgroup_root, process)
    return [root.joinpath(*parts[:depth]) for root, parts, _ in found for depth in range(len(parts), -1, -1)]


_OOM_FILES = ("memory.events.local", "memory.oom_control", "memory.events")
"""Files of version 2, of version 1, and of version 2 before Linux 5.2, which includes descendant groups."""


def oom_group(proc: Path, cgroup_root: Path, process: str) -> Path | None:
    """The innermost cgroup that counts OOM kills of ``process``: outer ones also count other jobs. None if no group
    has a count."""
    found = cgroup_directories(proc, cgroup_root, process)
    return next((group for group in found if any((group / name).exists() for name in _OOM_FILES)), None)


def oom_kills(group: Path) -> int:
    """Number of OOM kills in a cgroup."""
    name = next((name for name in _OOM_FILES if (group / name).exists()), _OOM_FILES[-1])
    return _statistic(group / name, "oom_kill")


def _groups(
    proc: Path, cgroup_root: Path, process: str = "self"
) -> Iterator[tuple[Path, tuple[str, ...], tuple[str, ...]]]:
    """A process's memory cgroups: mount root, path parts, and names of limit, usage and inactive file cache."""
    for line in read_lines(proc / process / "cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        # Version 2 has one line without controllers.
        if not controllers:
            names = ("memory.max", "memory.current", "inactive_file")
            roots = [cgroup_root, cgroup_root / "unified"]
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            roots = [cgroup_root / "memory", cgroup_root / controllers]
        else:
            continue
        # ".." leads into a parent's cgroup namespace, which is not visible.
        parts = tuple(part for part in PurePosixPath(group).parts if part not in ("/", ".."))
        yield from ((root, parts, names) for root in dict.fromkeys(roots))


def _group_limits(root: Path, parts: tuple[str, ...], names: tuple[str, ...]) -> list[Limit]:
    """Limits from the group up to ``root``."""
    limits = []
    # Every level counts: the limit of a pod or job is above the container's group, and kills too.
    for depth in range(len(parts), -1, -1):
        directory = root.joinpath(*parts[:depth])
        limit, usage = _number(directory / names[0]), _number(directory / names[1])
        if limit is None or usage is None or limit >= _UNLIMITED_BYTES:
            continue
        # Inactive file cache is reclaimed on demand; it does not include tmpfs pages.
        free = max(0, limit - usage + _statistic(directory / "memory.stat", names[2]))
        name = f"cgroup /{'/'.join(parts[:depth])} (limit {human(limit)})"
        remedy = "raise the memory limit of the container or the job"
        limits.append(Limit(name, free, remedy, reserve_of(limit)))
    return limits


def _room(where: Path, mount: str) -> list[Limit]:
    status = os.statvfs(where)
    if status.f_blocks == 0:  # a tmpfs mounted without a size
        return []
    remedy = (
        f"enlarge it (mount -o remount,size=… {mount}; --shm-size for a container), "
        "or name another tmpfs with --ftckpt-arena"
    )
    reserve_bytes = reserve_of(status.f_blocks * status.f_frsize) if _is_shared(where) else 0
    # Not f_bfree, which includes blocks reserved for root.
    return [Limit(f"file system {mount}", status.f_bavail * status.f_frsize, remedy, reserve_bytes)]


def _is_shared(where: Path) -> bool:
    """Whether the file system is /dev/shm, which other programs use; a tmpfs mounted for arenas has no reserve."""
    try:
        return os.stat(where).st_dev == os.stat(_SHARED).st_dev
    except OSError:
        return False


def _available(proc: Path) -> list[Limit]:
    rows = (line.partition(":") for line in read_lines(proc / "meminfo"))
    known = {name: int(value.split()[0]) << 10 for name, _, value in rows if name in ("MemTotal", "MemAvailable")}
    if "MemAvailable" not in known:
        return []
    available_bytes = known["MemAvailable"]
    reserve_bytes = reserve_of(known.get("MemTotal", available_bytes))
    return [Limit("MemAvailable", available_bytes, "free host memory", reserve_bytes)]


def mount_of(where: Path, proc: Path) -> Mount:
    """The mount of ``where`` as this process sees it; its kind is ``UNKNOWN`` if mountinfo cannot be read."""
    best, depth = Mount(UNKNOWN, str(where)), -1
    resolved = str(where.resolve())
    for line in read_lines(proc / "self" / "mountinfo"):
        # proc(5): id, parent, major:minor, root, mount point, more fields, then " - " and the type.
        left, _, right = line.partition(" - ")
        fields, ending = left.split(), right.split()
        if len(fields) < 5 or not ending:
            continue
        # The kernel escapes a space in a path as octal 040.
        point = fields[4].replace("\\040", " ")
        # The longest matching mount point is the innermost. A later mount hides an earlier one at the same point.
        if f"{resolved}/".startswith(f"{point.rstrip('/')}/") and len(point) >= depth:
            best, depth = Mount(ending[0], point), len(point)
    return best


_LOCAL = {"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"}
"""File system types that do not depend on another machine."""


def may_hang(path: Path | None, proc: Path = Path("/proc")) -> bool:
    """Whether calls to the file system of ``path`` may block on another machine; False for None."""
    return path is not None and mount_of(existing(path), proc).kind not in _LOCAL


def existing(path: Path) -> Path:
    """``path``, or its nearest existing ancestor."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def read_lines(path: Path) -> list[str]:
    """The lines of a small file; none if it cannot be read."""
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    """The number in a one-line file; None for "max" or a missing file."""
    lines = read_lines(path)
    return int(lines[0]) if lines and lines[0].strip().isdigit() else None


def _statistic(path: Path, name: str) -> int:
    for line in read_lines(path):
        key, _, value = line.partition(" ")
        if key == name and value.isdigit():
            return int(value)
    return 0


def used_bytes(directory: Path) -> int:
    """Memory of all files below ``directory`` on a tmpfs, in bytes."""
    nbytes = 0
    for place, _, names in os.walk(directory):
        for name in names:
            with suppress(OSError):  # files are created and deleted concurrently
                nbytes += 512 * os.lstat(os.path.join(place, name)).st_blocks
    return nbytes
