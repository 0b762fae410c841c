"""The survey at the start of a restart: loaded checkpoints, memory and storage of all ranks, in one gather."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from ftckpt.errors import ConfigError, FtckptError
from ftckpt.group import Group, gather_each
from ftckpt.memory.control_block import ControlBlock, open_control
from ftckpt.memory.directory import list_arenas
from ftckpt.memory.inventory import Inventory
from ftckpt.memory.lineage_file import read_lineage
from ftckpt.memory.locations import OpenArenas
from ftckpt.model.lineage import FIRST, UNKNOWN, Lineage, LoadedCheckpoint, last_shared, newest
from ftckpt.model.snapshot import SnapshotId
from ftckpt.model.topology import Topology
from ftckpt.restore.search import part_of_inventory
from ftckpt.restore.storage_catalog import CatalogSurvey, StorageCatalog, StorageView


class NodeMemory(NamedTuple):
    """The checkpoint that a rank has loaded and, if it leads its node, the node's lineage, its newest committed
    iteration (``whole``) and its newest iteration in any slot; -1 for none."""

    loaded: LoadedCheckpoint
    lineage: Lineage = UNKNOWN
    whole: int = -1
    newest: int = -1

    def with_arena(self, control: ControlBlock) -> NodeMemory:
        """The result with an arena's control block included."""
        records = [control.record(slot).snapshot for slot in range(control.slots)]
        whole = -1 if (snapshot := control.whole()) is None else snapshot.iteration
        found = max((record.iteration for record in records if record is not None), default=-1)
        return self._replace(whole=max(self.whole, whole), newest=max(self.newest, whole, found))


class SurveyResult(NamedTuple):
    """The ``loaded`` checkpoint, the report of each rank (``memory``), the ``head`` of the job, the storage catalog,
    and the inventory of all ranks: None if one cannot be taken."""

    loaded: LoadedCheckpoint
    memory: Sequence[NodeMemory]
    head: Lineage
    catalog: StorageCatalog
    reports: Sequence[Inventory] | None

    def whole(self, head: Lineage) -> int:
        """The newest committed iteration in memory that can be in the past of ``head``; -1 for none."""
        return max(min(one.whole, last_shared(self._lineage_of(one), head)) for one in self.memory)

    def newest(self, head: Lineage) -> int:
        """The newest iteration in any slot that can be in the past of ``head``; -1 for none."""
        return max(min(one.newest, last_shared(self._lineage_of(one), head)) for one in self.memory)

    def nodes_know(self, num_nodes: int) -> bool:
        """Whether all ``num_nodes`` nodes have recorded the head."""
        known = [one.lineage for one in self.memory if one.lineage.branches]
        return len(known) == num_nodes and all(one == self.head for one in known)

    @property
    def in_memory(self) -> dict[SnapshotId, Lineage]:
        """The snapshots of all slots, with the lineages of their nodes."""
        return {
            slot.snapshot: report.lineage if report.lineage.branches else self.head
            for report in self.reports or () for arena in report.arenas for slot in arena.slots
        }  # fmt: skip

    @property
    def newest_there(self) -> int:
        """The newest iteration in memory and on storage; -1 for none."""
        return max(self.newest(self.head), self.catalog.newest)

    def _lineage_of(self, memory: NodeMemory) -> Lineage:
        return memory.lineage if memory.lineage.branches else self.head


def take_survey(
    group: Group, topology: Topology, arenas: OpenArenas, catalog_survey: CatalogSurvey, loaded: LoadedCheckpoint
) -> SurveyResult:
    """The survey, the same on all ranks. Collective.

    Raises:
        ConfigError: ranks have loaded different iterations; on all ranks.
        StorageError: storage cannot be used, and retrying is useless.
    """

    def read() -> NodeMemory:
        if not topology.is_node_leader:
            return NodeMemory(loaded)
        memory = NodeMemory(loaded, read_lineage(arenas.node_dir))
        for path in list_arenas(arenas.node_dir):
            with suppress(FtckptError), open_control(path) as control:  # the inventory reports the error
                memory = memory.with_arena(control)
        return memory

    def report() -> Inventory | None:
        with suppress(FtckptError):  # may be irrelevant: a search that needs the inventory retakes it, and raises
            return part_of_inventory(topology, arenas)
        return None

    seen, ranks, reports = gather_each(
        group, (catalog_survey.see, StorageView), (read, NodeMemory), (report, Inventory | None)
    )
    catalog = catalog_survey.join(seen)
    _require_alike(ranks)
    head = newest([catalog.lineage, *(one.lineage for one in ranks)])
    return SurveyResult(
        # One rank suffices: others may not see the newest checkpoint on storage, from which a named one differs.
        replace(loaded, named=any(one.loaded.named for one in ranks)),
        ranks, head if head.branches else FIRST,
        catalog, reports if None not in reports else None,
    )  # fmt: skip


def _require_alike(ranks: Sequence[NodeMemory]) -> None:
    differing = {one.loaded.iteration: rank for rank, one in enumerate(ranks)}
    if len(differing) > 1:
        found = ", ".join(f"rank {rank} {iteration}" for iteration, rank in sorted(differing.items())[:3])
        raise ConfigError(
            f"restore: ranks have loaded different iterations from storage ({found}): let all ranks load the same one"
        )
