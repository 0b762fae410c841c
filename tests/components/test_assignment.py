"""Who copies what: found again by each proof, from the bits that the ranks hold then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import pytest
import torch
from test_replicas import in_lockstep

from ftckpt.capture.assignment import Assignment, assign
from ftckpt.group import Group
from ftckpt.model.fragment import Box, Fragment
from ftckpt.model.replicas import CUT_BYTES, Gather
from ftckpt.model.topology import RankPlace, Topology
from ftckpt.model.training_state import Description, Piece

MEMBERS = tuple(RankPlace({"pp": pp, "dp": dp}, "node") for pp in range(2) for dp in range(2))
NUMEL = 50_000


class LoneGroup:
    """A group of which only one rank runs at a time; see ``in_lockstep``."""

    def __init__(self, rank: int, size: int, gather: Gather) -> None:
        self.rank, self.size, self._gather = rank, size, gather

    def gather(self, data: bytes) -> list[bytes]:
        return self._gather(lambda: data)


def tied(rank: int) -> Description:
    """A layer of the stage, replicated over two ranks, and an embedding that both stages tie."""
    keys = [f"layer{rank // 2}", "embedding"]
    wholes = [Fragment.whole(key, "F32", (NUMEL,), Box((0,), (NUMEL,))) for key in keys]
    return Description(tuple(Piece(f, torch.arange(NUMEL, dtype=torch.float32)) for f in wholes), ())


def assigned(states: Sequence[Description]) -> list[Assignment]:
    def run(rank: int, gather: Gather) -> Assignment:
        group = cast(Group, LoneGroup(rank, 4, gather))
        return assign(group, Topology(rank, MEMBERS, {"pp": 2, "dp": 2}), states[rank], 1 << 12, 1 << 16)

    return in_lockstep(run, 4)


def test_members_of_a_replica_set_copy_equal_shares() -> None:
    found = assigned([tied(rank) for rank in range(4)])
    copied = [sum(f.nbytes for f in assignment.manifest.stepped) for assignment in found]
    assert all(abs(nbytes - 3 * NUMEL) <= 2 * CUT_BYTES for nbytes in copied) and sum(copied) == 3 * 4 * NUMEL


@pytest.mark.parametrize("change", [lambda tensor: tensor[7].add_(1), lambda tensor: tensor[0].fill_(-0.0)])
def test_replicas_that_have_come_to_differ_are_copied_by_each_until_they_agree(
    change: Callable[[torch.Tensor], object],
) -> None:
    """Also by another zero: the bits count."""
    states = [tied(rank) for rank in range(4)]
    first = [assignment.manifest for assignment in assigned(states)]
    embedding = states[3].stepped[1].tensor
    before = embedding.clone()
    change(embedding)
    found = assigned(states)
    name = states[3].stepped[1].fragment.name
    assert [assignment.differing for assignment in found] == [{name: (3,)}] * 4
    assert all(one.manifest != manifest for one, manifest in zip(found, first, strict=True))
    assert {f.key for f in found[3].manifest.stepped} >= {"embedding@pp1-dp1"}
    embedding.copy_(before)
    assert [assignment.manifest for assignment in assigned(states)] == first


def private(rank: int, derives: bool) -> Description:
    """Small tensors of this rank's own; ``derives``: with weights that follow from masters."""
    pieces: list[Piece] = []
    for number in range(5):
        shape = Fragment.whole(f"master/{number}", "F32", (4, 8), Box((rank, 0), (1, 8)))
        master = torch.randn(8)
        pieces.append(Piece(shape, master))
        if derives:
            weight = Fragment.whole(f"weight/{number}", "BF16", (4, 8), Box((rank, 0), (1, 8)))
            pieces.append(Piece(weight, master.bfloat16(), derived_from=master))
    return Description(tuple(pieces), ())


@pytest.mark.parametrize("derives", [(), (2,), (0, 1, 2, 3)], ids=["none", "one rank", "all"])
def test_what_no_longer_follows_its_master_is_copied(derives: tuple[int, ...]) -> None:
    """Where no rank derives anything or has replicas, there is nothing to check."""
    states = [private(rank, rank in derives) for rank in range(4)]
    found = assigned(states)
    assert {assignment.assumption.needed for assignment in found} == {bool(derives)}
    if derives:
        found[2].derived[3].tensor[0] += 1
        again = assigned(states)
        copied = [any(f.key == "weight/3" for f in one.manifest.stepped) for one in again]
        assert copied == [rank in derives for rank in range(4)], "on all ranks alike"
