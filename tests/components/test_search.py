"""Ranks verify what a decision would take: alike on all of them, whatever each has verified before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from test_load import run_ranks

from ftckpt.memory.control_block import SlotState
from ftckpt.memory.corruption import Corruption
from ftckpt.memory.locations import SlotAt
from ftckpt.model.snapshot import SnapshotId
from ftckpt.restore.context import RestoreContext
from ftckpt.restore.decide import Decision
from ftckpt.restore.verify import SlotVerifier

RANKS = 3
SNAPSHOT = SnapshotId(b"1" * 16, 5)
OTHER = SnapshotId(b"1" * 16, 4)


class FakeArena:
    def __init__(self, name: str) -> None:
        self._good = "bad" not in name
        snapshot = OTHER if "other" in name else SNAPSHOT
        self.control = SimpleNamespace(record=lambda slot: SimpleNamespace(snapshot=snapshot))
        self.image = SimpleNamespace(chunks=[], file_bytes=0)

    def state(self, slot: int) -> SlotState:
        return SlotState.SEALED

    def hashes(self, slot: int) -> Any:
        return np.zeros(0, np.uint64)

    def damage(self, slot: int, record: Any, bad_chunks: Any) -> Corruption:
        return Corruption() if self._good else Corruption((0,))

    def gap_secs(self, slot: int) -> float:
        return 0.0


def verify(*decisions: Decision) -> list[list[bool]]:
    """Whether something bad was found, by rank and decision; x0 and x1 are ranks of node A, x2 is of B."""
    members = [SimpleNamespace(node=node, shard=f"x{i}") for i, node in enumerate("AAB")]
    events = SimpleNamespace(emit=lambda *_, **__: None, tell=lambda *_: None)
    arenas = SimpleNamespace(get=FakeArena, file=lambda at: SimpleNamespace(take=None))

    def run(group: Any) -> list[bool]:
        topology = SimpleNamespace(me=members[group.rank], members=members, is_node_leader=group.rank in (0, 2))
        topology.ranks_on = lambda node: [at for at, member in enumerate(members) if member.node == node]
        verifier = SlotVerifier(RestoreContext(group, topology, events, arenas))  # type: ignore[arg-type]
        return [bool(verifier.verify(decision)) for decision in decisions]

    return run_ranks(RANKS, run)


def test_a_slot_that_another_rank_has_verified_is_no_surprise() -> None:
    """After a bad slot the turns of all later shards shift."""
    b, c = SlotAt("A", "b", 0), SlotAt("A", "c", 0)
    first = Decision(SNAPSHOT, {"a": SlotAt("B", "a.bad", 0), "b": b, "c": c})
    second = Decision(SNAPSHOT, {"a": SlotAt("A", "a.good", 0), "b": b, "c": c})
    assert verify(first, second) == [[True, False]] * RANKS


def test_a_slot_that_holds_another_snapshot_by_now_is_bad() -> None:
    decision = Decision(SNAPSHOT, {"a": SlotAt("A", "a.other", 0)})
    assert verify(decision) == [[True]] * RANKS
