"""``ftckpt check``: whether the machines of a job to come do what it will need of them, before it depends on it.

Alone, or on every rank under torchrun, or whatever else sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; the first
rank prints what all of them have found.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ftckpt.commands.arena_option import add_arena
from ftckpt.commands.check_host import arena_problem, look_at_host
from ftckpt.commands.findings import FAILED, PASSED, SKIPPED, WARNED, Finding
from ftckpt.commands.page import aligned
from ftckpt.errors import ConfigError
from ftckpt.model import codec
from ftckpt.model.text import listed

_AREAS = ("host", "device", "network")
_THOROUGH_SECS = 120.0


def add_check(commands: Any) -> None:
    """Add the sub-command to the parser of ``ftckpt``."""
    parser = commands.add_parser(
        "check", help="whether machines do what a job will need of them; run it as the job will run; status 1: no"
    )
    add_arena(parser)
    parser.add_argument(
        "--node-gib", type=float, default=0.0, metavar="GIB", help="that a node needs, by ftckpt plan"
    )
    parser.add_argument("--mib", type=int, default=256, help="state to copy from a device (default: %(default)s)")
    parser.add_argument(
        "--only", choices=_AREAS, action="append", metavar="AREA", help=f"{', '.join(_AREAS)}; repeat"
    )
    parser.add_argument(
        "--thorough", nargs="?", type=float, const=_THOROUGH_SECS, default=0.0, metavar="SECS",
        help="copy from the device in random orders for so long, too (default: %(const)s)",
    )  # fmt: skip
    parser.add_argument(
        "--one-setting", action="store_true",
        help="with CUDA_DEVICE_MAX_CONNECTIONS (ROCm: GPU_MAX_HW_QUEUES) as it is set (default: 1 and without)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, metavar="N", help="of these orders, as a thorough check has told it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found there")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the table and return the exit status: 1 where anything failed."""
    if not 0 <= arguments.node_gib < math.inf:
        raise ConfigError(f"--node-gib {arguments.node_gib:g}: name GiB, or 0 where nothing is known")
    if not 1 <= arguments.mib <= 1 << 20:
        raise ConfigError(f"--mib {arguments.mib}: name 1 to {1 << 20}")
    if not 0 <= arguments.thorough < math.inf:
        raise ConfigError(f"--thorough {arguments.thorough:g}: name seconds")
    if arguments.json is not None and int(os.environ.get("RANK", "0")) == 0:
        _require_writable(arguments.json)
    areas, begin = arguments.only or _AREAS, time.time()
    site: Any = None
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from ftckpt.commands.check_ranks import LaunchedRanks

        site = LaunchedRanks()
    found = []
    for finding in _look(arguments, areas, site):
        found.append(finding)
        if site is None:
            print(f"{finding.state:8}{finding.area}: {finding.name}: {finding.text}", flush=True)
    everything = {0: found} if site is None else dict(enumerate(codec.gather(site.group, found, list[Finding])))
    if site is None or site.rank == 0:
        _show(everything, alone=site is None)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(_as_json(everything, begin), indent=1) + "\n")
    return int(any(one.state == FAILED for of_rank in everything.values() for one in of_rank))


def _require_writable(path: Path) -> None:
    """A check takes minutes: its result is not to be lost for a place that cannot take it."""
    is_new = not path.exists()
    try:
        with path.open("a"):
            pass
    except OSError as error:
        raise ConfigError(f"--json: {path} cannot be written: {error.strerror}; name another file") from None
    if is_new:  # until there is something to write
        path.unlink()


def _look(arguments: argparse.Namespace, areas: Sequence[str], site: Any) -> Iterator[Finding]:
    no_arena = arena_problem(arguments.arena)
    # Of a look that all ranks take together, none is left out on some of them alone.
    without = [no_arena is not None] if site is None else codec.gather(site.group, no_arena is not None, bool)
    if "host" in areas and (site is None or site.leads):
        yield from look_at_host(arguments.arena, int(arguments.node_gib * 2**30), 1 if site is None else site.local)
    elif no_arena is not None:
        yield no_arena
    if "device" in areas and any(without):
        yield Finding("device", "copies", SKIPPED, "there is no arena to copy to")
    elif "device" in areas:
        yield from _look_at_device(arguments, site)
    if "network" in areas:
        if site is None:
            yield Finding("network", "ranks", SKIPPED, "alone: start it on all ranks, as torchrun does")
        else:
            yield from site.look(None if any(without) else arguments.arena)


def _look_at_device(arguments: argparse.Namespace, site: Any) -> Iterator[Finding]:
    from ftckpt.commands.check_device import is_here, look_at_device
    from ftckpt.commands.check_queues import look_with_other_queues
    from ftckpt.commands.check_thorough import Thorough

    thorough = Thorough(arguments.thorough, arguments.seed)
    ranks = None if site is None else site.as_training()
    yield from look_at_device(arguments.arena, arguments.mib, thorough, ranks)
    if is_here() and not arguments.one_setting:
        yield from look_with_other_queues(arguments.arena, arguments.mib, thorough)


def _show(everything: dict[int, list[Finding]], alone: bool) -> None:
    """A row for each thing that was looked at: the worst of all ranks, and which ranks say so."""
    worst = {state: place for place, state in enumerate((FAILED, WARNED, SKIPPED, PASSED))}
    by_name: dict[tuple[str, str], list[tuple[int, Finding]]] = {}
    for rank, found in everything.items():
        for one in found:
            by_name.setdefault((one.area, one.name), []).append((rank, one))
    rows = [("", "AREA", "WHAT", "RANKS", "FOUND")]
    remedies = []
    for (area, name), told in by_name.items():
        state = min((one.state for _, one in told), key=worst.__getitem__)
        those = [(rank, one) for rank, one in told if one.state == state]
        rows.append((state.upper(), area, name, listed([str(rank) for rank, _ in those], 4), those[0][1].text))
        if state in (FAILED, WARNED) and (remedy := those[0][1].remedy):
            remedies.append(f"{state.upper()} {area}, {name}: {remedy}")
    if not alone:
        print(aligned(rows, len(rows[0])))
    for remedy in remedies:
        print(remedy)
    counts = {state: sum(row[0] == state.upper() for row in rows) for state in (PASSED, WARNED, FAILED, SKIPPED)}
    print(", ".join(f"{number} {state}" for state, number in counts.items()))


def _as_json(everything: dict[int, list[Finding]], begin: float) -> dict[str, Any]:
    return {
        "environment": {
            "time": begin, "secs": round(time.time() - begin, 3), "python": platform.python_version(),
            "kernel": platform.release(), "command": " ".join(["ftckpt", *sys.argv[1:]]),
        },
        "ranks": {str(rank): [asdict(one) for one in found] for rank, found in everything.items()},
    }  # fmt: skip
