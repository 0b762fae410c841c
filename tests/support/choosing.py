"""A job by its shards and their nodes, and what a restart of it would choose without parity."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from pathlib import Path

from ftckpt.model.topology import RankPlace, Topology
from ftckpt.restore.choice import Decision, Findings, Query, decide
from ftckpt.restore.inventory import ArenaReport, Inventory, Shield, take_inventory
from ftckpt.restore.locations import OpenArenas, SlotAt
from ftckpt.store.damage import Damage


def job(homes: Mapping[str, str], layout: Mapping[str, int | str | bool]) -> Topology:
    """A job of one rank for each shard, on the node that ``homes`` gives."""
    coords = [{axis: int(index) for axis, index in re.findall(r"([a-z]+)([0-9]+)", shard)} for shard in homes]
    return Topology(0, tuple(RankPlace(*both) for both in zip(coords, homes.values(), strict=True)), layout)


def decided(
    reports: Sequence[ArenaReport], topology: Topology, damaged: Collection[SlotAt] = (), *, reshapes: bool = False
) -> Decision | None:
    """The decision where no node has anything that protects a snapshot."""
    findings = Findings(dict.fromkeys(damaged, Damage(reason="corrupt")))
    while True:
        answer = decide(Inventory(tuple(reports)), topology, findings, reshapes=reshapes)
        if not isinstance(answer, Query):
            return answer
        findings.shields[answer.snapshot] = Shield()


def inventory_of(*folders: Path) -> Inventory:
    """What lies in the directories of some nodes, which have the names of the nodes."""
    found = []
    for folder in folders:
        with closing(OpenArenas(folder)) as arenas:
            found.append(take_inventory(arenas, folder.name))
    return Inventory.join(found)
