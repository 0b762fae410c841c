"""Whether the arenas fit, asked before a page is touched: running out later is a SIGBUS or an OOM kill."""

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
"""The tmpfs through which all programs of a machine share memory: workers of data loaders, NCCL."""


@dataclass(frozen=True)
class Limit:
    """Something that bounds the arenas: what it is called, bytes free under it, how to raise it.

    ``reserve_bytes`` of the free ones stay free for others.
    """

    name: str
    free_bytes: int
    remedy: str
    reserve_bytes: int = 0

    @property
    def room_bytes(self) -> int:
        """What arenas may take yet."""
        return max(0, self.free_bytes - self.reserve_bytes)


@dataclass(frozen=True)
class Mount:
    """A line of mountinfo: file system type and mount point."""

    kind: str
    point: str


def check_budget(
    path: Path, need_bytes: int, *, proc: Path = Path("/proc"), cgroup_root: Path = Path("/sys/fs/cgroup")
) -> None:
    """Refuse ``need_bytes`` of new arenas under ``path`` if they cannot fit, or would leave others too little.

    Counted are the room of the file system and, where it keeps files in memory, the memory the kernel calls
    available and every cgroup limit up to the root, each without its reserve.

    Raises:
        MemoryBudgetError: the text prints need, each limit, which one binds and how to change it.
    """
    limits = _limits(path, proc, cgroup_root)
    tight = [limit for limit in limits if limit.room_bytes < need_bytes]
    if not tight:
        return
    binding = min(tight, key=lambda limit: limit.room_bytes)
    listing = ", ".join(f"{limit.name} {human(limit.room_bytes)}" for limit in limits)
    beside = f", beside {human(binding.reserve_bytes)} for other programs" if binding.reserve_bytes else ""
    raise MemoryBudgetError(
        f"arenas under {path} need {human(need_bytes)} ({need_bytes} bytes) but only "
        f"{human(binding.room_bytes)} are free in {binding.name}{beside}: {binding.remedy}; "
        f"or hold less (fewer --ftckpt-slots, more ranks to share the state); all limits: {listing}"
    )


def reserve_of(size_bytes: int) -> int:
    """What stays free of a memory of ``size_bytes`` that others use, too: 64 MiB and 1/64 of it, or a quarter of a
    small one. A program that finds none is ended by SIGBUS or the OOM killer, long after the start."""
    return min(size_bytes // 4, (64 << 20) + size_bytes // 64)


def room_in(directory: Path) -> int | None:
    """Bytes that arenas may take yet of the file system that holds ``directory``; None where it has no limit."""
    limits = _room(directory, str(directory))
    return limits[0].room_bytes if limits else None


def tightest_limit(path: Path, *, proc: Path = Path("/proc"), cgroup_root: Path = Path("/sys/fs/cgroup")) -> Limit:
    """What bounds new arenas under ``path`` first."""
    return min(_limits(path, proc, cgroup_root), key=lambda limit: limit.room_bytes)


def _limits(path: Path, proc: Path, cgroup_root: Path) -> list[Limit]:
    """All that bounds new files under ``path``."""
    where = existing(path)
    mount = mount_of(where, proc)
    room = _room(where, mount.point)
    # Memory does not bound files on a disk: their pages are written back and dropped.
    in_memory = mount.kind in MEMORY_FILE_SYSTEMS
    return room + _available(proc) + cgroup_limits(proc, cgroup_root) if in_memory else room


def cgroup_limits(proc: Path, cgroup_root: Path) -> list[Limit]:
    """Memory limits of this process's cgroups, own first, versions 1 and 2."""
    return [limit for root, parts, names in _groups(proc, cgroup_root) for limit in _group_limits(root, parts, names)]


def cgroup_directories(proc: Path, cgroup_root: Path, process: str = "self") -> list[Path]:
    """Those that bound the memory of ``process``, own first; some may not be there."""
    found = _groups(proc, cgroup_root, process)
    return [root.joinpath(*parts[:depth]) for root, parts, _ in found for depth in range(len(parts), -1, -1)]


_OOM_FILES = ("memory.events.local", "memory.oom_control", "memory.events")
"""Of version 2, of version 1, and of kernels before 5.2, which count groups below as well."""


def oom_group(proc: Path, cgroup_root: Path, process: str) -> Path | None:
    """The group that counts what the kernel's OOM killer does to ``process``: its own, as those above it count what
    becomes of other jobs. None where nothing says."""
    found = cgroup_directories(proc, cgroup_root, process)
    return next((group for group in found if any((group / name).exists() for name in _OOM_FILES)), None)


def oom_kills(group: Path) -> int:
    """How many of its processes the kernel's OOM killer has ended."""
    name = next((name for name in _OOM_FILES if (group / name).exists()), _OOM_FILES[-1])
    return _statistic(group / name, "oom_kill")


def _groups(
    proc: Path, cgroup_root: Path, process: str = "self"
) -> Iterator[tuple[Path, tuple[str, ...], tuple[str, ...]]]:
    """Each of a process's groups for memory: the root below which it lies, its parts, names of its files."""
    for line in read_lines(proc / process / "cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        # Version 2 has one line, and no controllers in it.
        if not controllers:
            names = ("memory.max", "memory.current", "inactive_file")
            roots = [cgroup_root, cgroup_root / "unified"]
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            roots = [cgroup_root / "memory", cgroup_root / controllers]
        else:
            continue
        # Parts that are not there belong to a parent's namespace.
        parts = tuple(part for part in PurePosixPath(group).parts if part not in ("/", ".."))
        yield from ((root, parts, names) for root in dict.fromkeys(roots))


def _group_limits(root: Path, parts: tuple[str, ...], names: tuple[str, ...]) -> list[Limit]:
    """Limits from the group up to ``root``."""
    limits = []
    # Every level counts: a pod's or a job's limit stands above the group of the container, and kills as well.
    for depth in range(len(parts), -1, -1):
        directory = root.joinpath(*parts[:depth])
        limit, usage = _number(directory / names[0]), _number(directory / names[1])
        if limit is None or usage is None or limit >= _UNLIMITED_BYTES:
            continue
        # File cache that nobody uses is given back on demand; pages of a tmpfs are not part of it.
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
    # Not f_bfree: on a disk some of that is root's alone.
    return [Limit(f"file system {mount}", status.f_bavail * status.f_frsize, remedy, reserve_bytes)]


def _is_shared(where: Path) -> bool:
    """Whether other programs use the file system; one that was mounted for arenas is theirs alone."""
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
    """The mount that holds ``where`` as this process sees it; of an unknown kind where that cannot be read."""
    best, depth = Mount(UNKNOWN, str(where)), -1
    resolved = str(where.resolve())
    for line in read_lines(proc / "self" / "mountinfo"):
        # proc(5): id, parent, major:minor, root, mount point, more fields, then behind " - " the type.
        left, _, right = line.partition(" - ")
        fields, ending = left.split(), right.split()
        if len(fields) < 5 or not ending:
            continue
        # The kernel writes a space in a path as octal 040.
        point = fields[4].replace("\\040", " ")
        # Of those that hold it the longest is the nearest. A later mount covers an earlier one on the same point.
        if f"{resolved}/".startswith(f"{point.rstrip('/')}/") and len(point) >= depth:
            best, depth = Mount(ending[0], point), len(point)
    return best


_LOCAL = {"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"}
"""Kinds of file systems that answer as long as the machine does."""


def may_hang(path: Path | None, proc: Path = Path("/proc")) -> bool:
    """Whether calls to the file system of ``path`` may wait for another machine; False for None."""
    return path is not None and mount_of(existing(path), proc).kind not in _LOCAL


def existing(path: Path) -> Path:
    """``path``, or the directory above it that is there."""
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
    """The number in a one-line file; None for "max" and for a missing file."""
    lines = read_lines(path)
    return int(lines[0]) if lines and lines[0].strip().isdigit() else None


def _statistic(path: Path, name: str) -> int:
    for line in read_lines(path):
        key, _, value = line.partition(" ")
        if key == name and value.isdigit():
            return int(value)
    return 0


def used_bytes(directory: Path) -> int:
    """Of the memory that files at or below ``directory``, on a tmpfs, take."""
    nbytes = 0
    for place, _, names in os.walk(directory):
        for name in names:
            with suppress(OSError):  # files come and go
                nbytes += 512 * os.lstat(os.path.join(place, name)).st_blocks
    return nbytes
