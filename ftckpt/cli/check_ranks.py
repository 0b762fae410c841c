"""What the ranks of a job to come find of each other: one directory a node, one time, SMPs that reach each other."""

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
from ftckpt.cli.check_pairs import NodeFacts, look_at_pairs
from ftckpt.cli.findings import FAILED, SKIPPED, CheckResult, Result, failed, passed, warned
from ftckpt.errors import FtckptError
from ftckpt.frameworks.launcher import node_name
from ftckpt.group import Group
from ftckpt.memory.directory import leave_word, node_directory, read_word, remove_tree
from ftckpt.model.codec import decode, encode, gather
from ftckpt.model.text import listed
from ftckpt.notice import Notice
from ftckpt.session.addresses import machine

_AREA = "network"
_GROUP_SECS = 30.0
"""For which a rank waits for all others."""
_LOST_SECS = 1.5 * _GROUP_SECS
"""Within which all ranks notice that their group is lost."""
_MEETING_SECS = 600.0
"""For ranks that look at their devices, where each copy may take a minute to fail."""
_POLL_SECS = 0.2
_MOST_SKEW_SECS = 1.0


class RankFacts(NamedTuple):
    """Where a rank is, the time there, and the cores that it may run on."""

    node: str
    machine: str
    time: float
    cores: str
    rack: str


class LaunchedRanks:
    """The ranks that a launcher has started, this one among them. Every method is collective.

    Args:
        listen: where SMPs listen, as the setting ``smp_listen``.
        rack: as the setting.
    """

    def __init__(self, listen: str, rack: str) -> None:
        dist.init_process_group("gloo")
        self.group = Group(_GROUP_SECS)
        self.group.gather(b"")  # the times below are taken together
        cores = format_cores(os.sched_getaffinity(0))
        me = RankFacts(node_name("", os.environ), machine(), time.time(), cores, rack)
        self.ranks = gather(self.group, me, RankFacts)
        self.rank, self.me, self._listen = self.group.rank, me, listen
        self.leads = self.nodes[me.node].first == self.rank

    def meet(self) -> None:
        """Wait for ranks that have more to look at by themselves.

        One whose look has failed at once would else be at the next collective so early that it gives that up.
        """
        with suppress(RuntimeError):  # the next collective tells of a rank that is gone
            dist.monitored_barrier(timeout=timedelta(seconds=_MEETING_SECS))

    @property
    def cores(self) -> list[set[int]]:
        """Of each rank of this node."""
        return [parse_cores(one.cores) for one in self.ranks if one.node == self.me.node]

    @property
    def nodes(self) -> dict[str, NodeFacts]:
        """By name, in the order of their first ranks."""
        found: dict[str, NodeFacts] = {}
        for rank, one in enumerate(self.ranks):
            found.setdefault(one.node, NodeFacts(rank, one.machine, one.rack))
        return found

    def look(self, arena: Path | None) -> Iterator[CheckResult]:
        """Each finding as it comes. ``arena``: None where a rank has none."""
        yield CheckResult("host", "clock", *self._clocks())
        if arena is not None:
            yield CheckResult("host", "one directory", *self._directory(arena))
        if len(self.nodes) == 1:
            yield CheckResult(_AREA, "SMP pairs", SKIPPED, "one node: nothing is sent")
        else:
            yield from look_at_pairs(self.group, self.nodes, self._listen)

    def _clocks(self) -> Result:
        skew = max(one.time for one in self.ranks) - min(one.time for one in self.ranks)
        text = f"clocks of {len(self.ranks)} ranks are {skew:.3f} s apart"
        if skew > _MOST_SKEW_SECS:
            return warned(text, "set them by NTP: object stores refuse requests", secs=skew)
        return passed(text, secs=skew)

    def _directory(self, arena: Path) -> Result:
        """Ranks of one node see one directory, and not one of their container's each."""
        word = secrets.token_hex(4) if self.rank == 0 else ""
        job = f"check-{gather(self.group, word, str)[0]}"
        node_dir, left, problem = arena / f"ftckpt-{job}" / self.me.node, "", ""
        try:
            try:
                node_dir = node_directory(arena, job, self.me.node)
                left = leave_word(node_dir) if self.leads else ""
            finally:
                words = gather(self.group, left, str)
            if read_word(node_dir) != words[self.nodes[self.me.node].first]:
                problem = f"{node_dir.parent.parent} of rank {self.rank} is not that of its node's first rank"
        except (FtckptError, OSError) as error:  # told below, by all ranks together
            problem = str(error)
        self.group.gather(b"")  # all have read it
        if self.leads:
            remove_tree(node_dir.parent)
        if problem:
            how = "let containers of a node share it (one --ipc, a hostPath), or give each a name with FTCKPT_NODE"
            return failed(problem, how)
        return passed(f"the {len(self.cores)} rank(s) of node {self.me.node} see one")

    def collect(self, found: list[CheckResult]) -> dict[int, list[CheckResult]]:
        """What all ranks have found, by rank; of a lost group what the first rank has from the store in time."""
        try:
            return dict(enumerate(gather(self.group, found, list[CheckResult])))
        except RuntimeError:
            pass
        if self.rank == 0:
            return self._told(found)
        self._notice(f"found/{self.rank}").post(encode(found).decode())
        return {self.rank: found}

    def _told(self, found: list[CheckResult]) -> dict[int, list[CheckResult]]:
        """``found`` and what the others have told the store of the job, and which of them have not."""
        everything, end = {0: found}, time.monotonic() + _LOST_SECS
        # One notice for each: it asks a store that does not answer no more than once.
        silent = {rank: self._notice(f"found/{rank}") for rank in range(1, self.group.size)}
        while silent and time.monotonic() < end:
            for rank, notice in list(silent.items()):
                with suppress(ValueError):  # nothing yet, or that the store cannot be reached
                    everything[rank] = decode(notice.read().encode(), list[CheckResult])
                    del silent[rank]
                if time.monotonic() >= end:
                    break
            time.sleep(_POLL_SECS)
        if silent:
            text = f"{len(silent)} of {self.group.size} ranks told nothing: {listed(list(map(str, silent)), 4)}"
            nodes = listed(sorted({self.ranks[rank].node for rank in silent}), 4)
            found.append(CheckResult(_AREA, "told nothing", FAILED, f"{text}, of {nodes}", "see what their logs say"))
        return everything

    def leave(self) -> None:
        """Behind the first rank, which shows what was found: a launcher ends all ranks when one has failed."""
        shown, end = self._notice("shown"), time.monotonic() + 2 * _LOST_SECS
        if self.rank == 0:
            shown.post("all of it")
        while self.rank and not shown.read() and time.monotonic() < end:
            time.sleep(_POLL_SECS)

    def _notice(self, what: str) -> Notice:
        return Notice(f"{self.group.name}/check/{what}")
