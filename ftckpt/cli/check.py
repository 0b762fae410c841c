"""``ftckpt check``: tests whether machines meet the requirements of a job before it starts.

It runs alone, or on every rank under torchrun or another launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT; then rank 0 prints the results of all ranks.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from ftckpt.cli.answers import Answer, Lines, alarming
from ftckpt.cli.check_host import arena_problem, host_checks
from ftckpt.cli.findings import FAILED, PASSED, SKIPPED, WARNED, CheckResult
from ftckpt.cli.options import add_arena, add_node_memory, size_of
from ftckpt.errors import FtckptError, in_words
from ftckpt.model import codec
from ftckpt.model.text import aligned, listed

_AREAS = ("host", "device", "network")


def add_check(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    add_arena(parser)
    add_node_memory(parser, "memory that a node needs, from ftckpt plan, such as 400GiB; fails if it has less")
    size, text = size_of("--size", "1MiB"), "state to copy from a device (default: %(default)s)"
    parser.add_argument("--size", type=size, default="256MiB", metavar="SIZE", help=text)
    for area in _AREAS:
        what = f"check the {area} (default: all; these options combine)"
        parser.add_argument(f"--{area}", action="append_const", const=area, dest="only", help=what)
    parser.add_argument(
        "--smp-listen", default="", metavar="ADDRESS", help="the address for other nodes, as --ftckpt-smp-listen"
    )


def run_check(arguments: argparse.Namespace) -> Lines:
    """The results of all checks, on rank 0; status 1: one failed."""
    begin, rank, site = time.time(), int(os.environ.get("RANK", "0")), None
    try:
        site = _site(arguments)
    except RuntimeError as error:
        found = [_group_lost(error)]
        yield _line(found[0])
    else:
        found = yield from _run_checks(arguments, site)
    everything = {rank: found} if site is None else site.collect(found)
    try:
        if rank == 0 or len(everything) == 1:  # of a lost group, each rank shows its own
            yield from _summary(everything, alone=site is None)
        has_failed = any(one.state == FAILED for of_rank in everything.values() for one in of_rank)
        yield Answer(as_json(everything, begin) if rank == 0 else None, int(has_failed))
    finally:
        if site is not None:
            site.leave()


def _site(arguments: argparse.Namespace) -> Any:
    """The ranks of the launched job; None for a single process."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return None
    from ftckpt.cli.check_ranks import LaunchedRanks

    return LaunchedRanks(arguments.smp_listen)


def _run_checks(arguments: argparse.Namespace, site: Any) -> Generator[str, None, list[CheckResult]]:
    """The results of all checks; an error keeps the earlier ones. Of a single process, a line for each at once."""
    found: list[CheckResult] = []
    try:
        for finding in _checks(arguments, arguments.only or _AREAS, site):
            found.append(finding)
            if site is None:
                yield _line(finding)
    except (RuntimeError, OSError, FtckptError) as error:
        if site is None:
            raise
        found.append(_group_lost(error))
        site.group.give_up(in_words(error))  # else the others wait for this rank until their deadline
    return found


def _group_lost(error: Exception) -> CheckResult:
    how = "see the logs of all ranks; ranks connect over the interface that GLOO_SOCKET_IFNAME names"
    return CheckResult("network", "ranks", FAILED, in_words(error), how)


def _line(finding: CheckResult) -> str:
    text = f"{finding.state:8}{finding.area}: {finding.name}: {finding.text}"
    return alarming(text) if finding.state == FAILED else text


def _checks(arguments: argparse.Namespace, areas: Sequence[str], site: Any) -> Iterator[CheckResult]:
    no_arena = arena_problem(arguments.arena)
    # Collective checks: all ranks must agree on which of them run.
    without = [no_arena is not None] if site is None else codec.gather(site.group, no_arena is not None, bool)
    if "host" in areas and (site is None or site.leads):
        cores = [os.sched_getaffinity(0)] if site is None else site.cores
        yield from host_checks(arguments.arena, arguments.node_memory or 0, cores)
    elif no_arena is not None:
        yield no_arena
    if "device" in areas and any(without):
        yield CheckResult("device", "copies", SKIPPED, "no arena to copy to")
    elif "device" in areas:
        from ftckpt.cli.check_device import device_checks

        yield from device_checks(arguments.arena, arguments.size)
        if site is not None:
            site.meet()
    if "network" in areas:
        if site is None:
            yield CheckResult("network", "ranks", SKIPPED, "one process: start it on all ranks, with torchrun")
        else:
            yield from site.checks(None if any(without) else arguments.arena)


def _summary(everything: dict[int, list[CheckResult]], alone: bool) -> Iterator[str]:
    """A row per check: the worst result of all ranks, and the ranks that have it; then remedies and counts."""
    worst = {state: place for place, state in enumerate((FAILED, WARNED, SKIPPED, PASSED))}
    by_name: dict[tuple[str, str], list[tuple[int, CheckResult]]] = {}
    for rank, found in everything.items():
        for one in found:
            by_name.setdefault((one.area, one.name), []).append((rank, one))
    rows = [("", "AREA", "WHAT", "RANKS", "FOUND")]
    remedies = []
    for (area, name), results in by_name.items():
        state = min((one.state for _, one in results), key=worst.__getitem__)
        those = [(rank, one) for rank, one in results if one.state == state]
        rows.append((state.upper(), area, name, listed([str(rank) for rank, _ in those], 4), those[0][1].text))
        if state in (FAILED, WARNED) and (remedy := those[0][1].remedy):
            text = f"{state.upper()} {area}, {name}: {remedy}"
            remedies.append(alarming(text) if state == FAILED else text)
    if not alone:
        yield aligned(rows, len(rows[0]))
    yield from remedies
    counts = {state: sum(row[0] == state.upper() for row in rows) for state in (PASSED, WARNED, FAILED, SKIPPED)}
    yield ", ".join(f"{number} {state}" for state, number in counts.items())


def as_json(everything: dict[int, list[CheckResult]], begin: float) -> dict[str, Any]:
    """The object that ``--json`` prints."""
    environment = {
        "time": begin,
        "secs": round(time.time() - begin, 3),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "command": " ".join(["ftckpt", *sys.argv[1:]]),
    }
    ranks = {str(rank): [asdict(one) for one in found] for rank, found in everything.items()}
    return {"environment": environment, "ranks": ranks}
