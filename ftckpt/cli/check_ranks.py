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
from ftckpt.cli.findings import SKIPPED, CheckResult, Result, failed, passed, warned
from ftckpt.errors import FtckptError
from ftckpt.frameworks.launcher import node_name
from ftckpt.group import Group
from ftckpt.memory.atomic_files import read_link
from ftckpt.memory.directory import TOKEN_NAME, node_directory, remove_tree, write_token
from ftckpt.model.codec import gather
from ftckpt.session.addresses import machine

_AREA = "network"
_GROUP_SECS = 30.0
"""Deadline of a collective."""
_LOST_SECS = 1.5 * _GROUP_SECS
"""Time within which all ranks notice that their group is lost."""
_MEETING_SECS = 600.0
"""Deadline for the device checks of all ranks: each copy may take a minute to fail."""
# Far below the 15 minutes at which S3 refuses requests: a clock that drifts is found before it hurts.
_MOST_SKEW_SECS = 1.0


class RankFacts(NamedTuple):
    """A rank's node, machine, clock and cores."""

    node: str
    machine: str
    time: float
    cores: str


class LaunchedRanks:
    """The ranks started by a launcher, including this one. Every method is collective.

    Args:
        listen: as the setting ``smp_listen``.
    """

    def __init__(self, listen: str) -> None:
        dist.init_process_group("gloo")
        self.group = Group(_GROUP_SECS)
        self.group.gather(b"")  # a barrier, so that ranks read their clocks at the same time
        cores = format_cores(os.sched_getaffinity(0))
        me = RankFacts(node_name("", os.environ), machine(), time.time(), cores)
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
            found.setdefault(one.node, NodeFacts(rank, one.machine))
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
        """The results of all ranks, by rank; if the group is lost, this rank's alone."""
        try:
            return dict(enumerate(gather(self.group, found, list[CheckResult])))
        except RuntimeError:
            return {self.rank: found}

    def leave(self) -> None:
        """Waits until all ranks have printed what they have to: a launcher ends all ranks once one has failed."""
        try:
            self.group.gather(b"")
        except RuntimeError:
            time.sleep(_LOST_SECS)
