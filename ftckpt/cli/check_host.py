"""Checks of the host: shared memory and hazards to it, limits of processes, cores, and the kernel."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator, Sequence, Set
from pathlib import Path

from ftckpt.capture.affinity import format_cores, num_nodes
from ftckpt.cli.findings import FAILED, PASSED, WARNED, CheckResult, Result, attempt, failed, passed, warned
from ftckpt.memory.environment import hazards
from ftckpt.memory.memory_limits import mount_of, tightest_limit
from ftckpt.model.text import human

_AREA = "host"
_SMALL_BYTES = 1 << 30
_LEAST_FILES = 4096
"""File descriptors of an SMP with the connections of a large job."""


def host_checks(arena: Path, need_bytes: int, ranks: Sequence[Set[int]]) -> Iterator[CheckResult]:
    """Runs the host checks and yields each result when it is available.

    Args:
        arena: the directory for arenas.
        need_bytes: memory that the node needs, from ``ftckpt plan``; 0: unknown.
        ranks: the cores of each of the node's ranks; the first rank starts the SMP.
    """
    no_arena = arena_problem(arena)
    in_arena: tuple[tuple[str, Callable[[], Result]], ...] = (
        ("arena", lambda: _file_system(arena)),
        ("room", lambda: _room(arena, need_bytes)),
    )
    if no_arena is not None:
        yield no_arena
        in_arena = ()
    for name, check in (
        *in_arena,
        ("descriptors", _descriptors),
        ("locked memory", _locked_memory),
        ("cores", lambda: _cores(ranks)),
        ("kernel", _kernel),
    ):
        yield attempt(_AREA, name, check)
    if no_arena is not None:
        return
    found = hazards(arena)
    for hazard in found:
        yield CheckResult(_AREA, hazard.name.replace("_", " "), WARNED, hazard.text, hazard.remedy)
    if not found:
        yield CheckResult(_AREA, "surroundings", PASSED, "found nothing that removes shared memory")


def arena_problem(arena: Path) -> CheckResult | None:
    """The failed check if ``arena`` is not a writable directory, else None."""
    if not arena.is_dir():
        what = "is not a directory" if arena.exists() else "does not exist"
        remedy = "make it, on a tmpfs, or name another with --arena, and for the job with --ftckpt-arena"
        return CheckResult(_AREA, "arena", FAILED, f"{arena} {what}", remedy)
    if not os.access(arena, os.W_OK | os.X_OK):
        remedy = "name a tmpfs of your own with --ftckpt-arena"
        return CheckResult(_AREA, "arena", FAILED, f"{arena} cannot be written", remedy)
    return None


def _file_system(arena: Path) -> Result:
    return passed(f"{arena} can be written, on {mount_of(arena, Path('/proc')).kind}")


def _room(arena: Path, need_bytes: int) -> Result:
    limit = tightest_limit(arena)
    text, free = f"{human(limit.room_bytes)} are free under {limit.name}", float(limit.room_bytes)
    needed = f"{text}, {human(need_bytes)} are needed" if need_bytes else text
    if free < need_bytes:
        return failed(needed, limit.remedy, free_bytes=free)
    if free < _SMALL_BYTES:
        return warned(text, limit.remedy, free_bytes=free)
    return passed(needed, free_bytes=free)


def _descriptors() -> Result:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= _LEAST_FILES:
        return passed(f"a process may open {hard} files")
    return warned(f"a process may open {hard} files", f"ulimit -Hn {_LEAST_FILES}, for large jobs")


def _locked_memory() -> Result:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return passed("a process may lock unlimited memory")
    # A driver that counts pinned memory refuses beyond the limit; then copies go through a small buffer.
    remedy = "ulimit -l unlimited, if the device's driver counts pinned memory (ROCm, RDMA)"
    return warned(f"a process may lock {human(soft)}", remedy)


def _cores(ranks: Sequence[Set[int]]) -> Result:
    """Whether the node's ranks leave cores to the SMP. It inherits the cores of the first rank, which starts it."""
    cores, first = set[int]().union(*ranks), ranks[0]
    text = f"{len(cores)} cores for {len(ranks)} rank(s) and the SMP, {_per_rank(ranks)}"
    text += f"{max(1, num_nodes())} NUMA node(s)"
    figures = {"cores": float(len(cores)), "ranks": float(len(ranks)), "smp_cores": float(len(first))}
    if len(cores) > len(ranks) and len(first) > 1:
        return passed(text, **figures)
    if len(cores) > len(ranks):
        text += f"; the SMP has only core {format_cores(first)}, shared with the node's first rank"
    remedy = "give ranks more cores (--cpus-per-task), or lower --ftckpt-smp-cores"
    return warned(f"{text}: ftckpt takes CPU time from training", remedy, **figures)


def _per_rank(ranks: Sequence[Set[int]]) -> str:
    """The number of cores per rank as text, or "" if ranks share cores."""
    sizes = sorted(map(len, ranks))
    if len(ranks) == 1 or sum(sizes) > len(set[int]().union(*ranks)):
        return ""
    return (
        f"{sizes[0]} of its own each, " if sizes[0] == sizes[-1] else f"{sizes[0]} to {sizes[-1]} of its own each, "
    )


def _kernel() -> Result:
    release = os.uname().release
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        remedy = "use Linux 5.3 or newer, and a container that allows pidfd_open"
        return warned(f"Linux {release} has no process handles ({error})", remedy)
    return passed(f"Linux {release}")
