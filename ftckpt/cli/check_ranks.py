"""Collective checks of all ranks: synchronized clocks, one shared directory per node, and reachable SMPs."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from ftckpt.capture.affinity import format_cores, parse_cores
from ftckpt.cli.check_pairs import NodeFacts, pair_checks
from ftckpt.cli.findings import FAILED, SKIPPED, CheckResult, Result, failed, passed, warned
from ftckpt.errors import FtckptError
from ftckpt.frameworks.launcher import node_name
from ftckpt.group import Group
from ftckpt.memory.atomic_files import read_link
from ftckpt.memory.directory import TOKEN_NAME, node_directory, remove_tree, write_token
from ftckpt.model.codec import decode, encode, gather
from ftckpt.model.text import listed
from ftckpt.notice import Notice
from ftckpt.session.addresses import machine

_AREA = "network"
_GROUP_SECS = 30.0
"""Deadline of a collective."""
_LOST_SECS = 1.5 * _GROUP_SECS
"""Time within which all ranks notice that their group is lost."""
_MEETING_SECS = 600.0
"""Deadline for the device checks of all ranks: each copy may take a minute to fail."""
_POLL_SECS = 0.2
_MOST_SKEW_SECS = 1.0


class RankFacts(NamedTuple):
    """A rank's node, machine, clock, cores and rack."""

    node: str
    machine: str
    time: float
    cores: str
    rack: str


class LaunchedRanks:
    """The ranks started by a launcher, including this one. Every method is collective.

    Args:
        listen: as the setting ``smp_listen``.
        rack: as the setting ``rack``.
    """

    def __init__(self, listen: str, rack: str) -> None:
        dist.init_process_group("gloo")
        self.group = Group(_GROUP_SECS)
        self.group.gather(b"")  # a barrier, so that ranks read their clocks at the same time
        cores = format_cores(os.sched_getaffinity(0))
        me = RankFacts(node_name("", os.environ), machine(), time.time(), cores, rack)
        self.ranks = gather(self.group, me, RankFacts)
        self.rank, self.me, self._listen = self.group.rank, me, listen
        self.leads = self.nodes[me.node].first == self.rank

    def meet(self) -> None:
        """Waits for the local checks of all ranks.

        Without it, a rank that fails early would time out in the next collective.
        """
        with suppress(RuntimeError):  # the next collective reports a lost rank
            dist.monitored_barrier(timeout=timedelta(seconds=_MEETING_SECS))

    @property
    def cores(self) -> list[set[int]]:
        """The cores of each rank of this node."""
        return [parse_cores(one.cores) for one in self.ranks if one.node == self.me.node]

    @property
    def nodes(self) -> dict[str, NodeFacts]:
        """All nodes by name, in the order of their first ranks."""
        found: dict[str, NodeFacts] = {}
        for rank, one in enumerate(self.ranks):
            found.setdefault(one.node, NodeFacts(rank, one.machine, one.rack))
        return found

    def checks(self, arena: Path | None) -> Iterator[CheckResult]:
        """Runs the collective checks and yields each result. ``arena``: None if any rank has none."""
        yield CheckResult("host", "clock", *self._clocks())
        if arena is not None:
            yield CheckResult("host", "one directory", *self._directory(arena))
        if len(self.nodes) == 1:
            yield CheckResult(_AREA, "SMP pairs", SKIPPED, "one node: nothing is sent")
        else:
            yield from pair_checks(self.group, self.nodes, self._listen)

    def _clocks(self) -> Result:
        skew = max(one.time for one in self.ranks) - min(one.time for one in self.ranks)
        text = f"clocks of {len(self.ranks)} ranks are {skew:.3f} s apart"
        if skew > _MOST_SKEW_SECS:
            return warned(text, "synchronize them with NTP: object stores refuse wrong times", secs=skew)
        return passed(text, secs=skew)

    def _directory(self, arena: Path) -> Result:
        """Whether all ranks of this node see the same directory, and not each one of its own container."""
        word = secrets.token_hex(4) if self.rank == 0 else ""
        job = f"check-{gather(self.group, word, str)[0]}"
        node_dir, left, problem = arena / f"ftckpt-{job}" / self.me.node, "", ""
        try:
            try:
                node_dir = node_directory(arena, job, self.me.node)
                left = write_token(node_dir) if self.leads else ""
            finally:
                words = gather(self.group, left, str)
            if read_link(node_dir / TOKEN_NAME) != words[self.nodes[self.me.node].first]:
                problem = f"{node_dir.parent.parent} of rank {self.rank} is not that of its node's first rank"
        except (FtckptError, OSError) as error:  # reported after the next collective, in which the others are
            problem = str(error)
        self.group.gather(b"")  # a barrier: all ranks have read the token
        if self.leads:
            remove_tree(node_dir.parent)
        if problem:
            how = "let a node's containers share it (one --ipc, a hostPath), or name each a node with FTCKPT_NODE"
            return failed(problem, how)
        return passed(f"{len(self.cores)} rank(s) of node {self.me.node} share one directory")

    def collect(self, found: list[CheckResult]) -> dict[int, list[CheckResult]]:
        """The results of all ranks, by rank. If the group is lost, rank 0 reads them from the job's store, and each
        other rank has its own only."""
        try:
            return dict(enumerate(gather(self.group, found, list[CheckResult])))
        except RuntimeError:
            pass
        if self.rank == 0:
            return self._posted(found)
        self._notice(f"found/{self.rank}").post(encode(found).decode())
        return {self.rank: found}

    def _posted(self, found: list[CheckResult]) -> dict[int, list[CheckResult]]:
        """``found`` and the results that other ranks have posted in the job's store, and the ranks without any."""
        everything, end = {0: found}, time.monotonic() + _LOST_SECS
        # One notice per rank: each queries an unreachable store at most once.
        silent = {rank: self._notice(f"found/{rank}") for rank in range(1, self.group.size)}
        while silent and time.monotonic() < end:
            for rank, notice in list(silent.items()):
                with suppress(ValueError):  # not posted yet, or the store is unreachable
                    everything[rank] = decode(notice.read().encode(), list[CheckResult])
                    del silent[rank]
                if time.monotonic() >= end:
                    break
            time.sleep(_POLL_SECS)
        if silent:
            text = f"{len(silent)} of {self.group.size} ranks sent nothing: {listed(list(map(str, silent)), 4)}"
            nodes = listed(sorted({self.ranks[rank].node for rank in silent}), 4)
            found.append(CheckResult(_AREA, "told nothing", FAILED, f"{text}, of {nodes}", "see their logs"))
        return everything

    def leave(self) -> None:
        """Waits until rank 0 has printed the results: a launcher ends all ranks once one has failed."""
        shown, end = self._notice("shown"), time.monotonic() + 2 * _LOST_SECS
        if self.rank == 0:
            shown.post("all of it")
        while self.rank and not shown.read() and time.monotonic() < end:
            time.sleep(_POLL_SECS)

    def _notice(self, what: str) -> Notice:
        return Notice(f"{self.group.name}/check/{what}")
