"""Parity files: a reader finds all blocks of one snapshot or none, whatever died or flipped."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ftckpt.errors import ArenaError, MemoryBudgetError
from ftckpt.memory.parity_file import ParityFile, parity_bytes, parity_path
from ftckpt.model.snapshot import SnapshotId
from ftckpt.parity.groups import Member, ParityGroup
from ftckpt.parity.stripes import block_length, num_blocks
from tests.support.killing import fails_with

OLD, NEW = b"o" * 16, b"n" * 16


def group_of(losses: int = 1, mode: str = "node", members: int = 3) -> ParityGroup:
    sizes = [(5000, 5000, 4100, 5000, 7), (5000, 5000, 4000), (5000, 5000, 5000, 90), (5000,)]
    chosen = [Member(f"dp{i}", "n0", f"dp{i}.0123abcd", 0, sizes[i]) for i in range(members)]
    return ParityGroup.of(mode, losses, 5000, chosen)


GROUP = group_of()


@pytest.fixture
def node_dir(arena_root: Path) -> Path:
    for member in GROUP.members:
        (arena_root / member.arena).mkdir()
    return arena_root


@pytest.fixture
def path(node_dir: Path) -> Path:
    return parity_path(node_dir / GROUP.members[1].arena, "node", 0)


@pytest.fixture
def file(path: Path) -> Iterator[ParityFile]:
    with closing(ParityFile.create(path, GROUP, 1)) as made:
        yield made


def contents(block: int, nbytes: int, iteration: int) -> Any:
    return np.random.default_rng([block, iteration]).integers(0, 256, nbytes, dtype=np.uint8)


def write(file: ParityFile, lineage: bytes, iteration: int) -> None:
    file.begin(SnapshotId(lineage, iteration))
    for block in range(file.num_blocks):
        file.put(block, contents(block, len(file.block(block)), iteration))
    file.seal()


def assert_holds(file: ParityFile, lineage: bytes, iteration: int) -> None:
    assert file.snapshot() == SnapshotId(lineage, iteration)
    for block in range(file.num_blocks):
        view = file.block(block)
        assert file.verify(block) and np.array_equal(view, contents(block, len(view), iteration))


@pytest.mark.parametrize("holder", range(4))
@pytest.mark.parametrize("losses", [1, 2, 3])
def test_every_holder_of_every_code(path: Path, losses: int, holder: int) -> None:
    group = group_of(losses, "peer", 4)
    file = ParityFile.create(path, group, holder)
    assert file.num_blocks == num_blocks(group, holder)
    assert [len(file.block(b)) for b in range(file.num_blocks)] == [
        block_length(group, holder, b) for b in range(file.num_blocks)
    ]
    assert file.snapshot() is None
    write(file, NEW, 4)
    assert path.stat().st_size == parity_bytes(group, holder)
    for writable in (False, True):
        again = ParityFile.open(path, writable)
        assert (again.group, again.holder) == (group, holder)
        assert_holds(again, NEW, 4)
        again.close()
    file.close()


@pytest.mark.parametrize(("code", "kind"), [(errno.ENOSPC, MemoryBudgetError), (errno.EIO, ArenaError)])
def test_no_room_leaves_the_old_one(
    path: Path, file: ParityFile, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[Exception]
) -> None:
    write(file, OLD, 1)
    monkeypatch.setattr(os, "posix_fallocate", fails_with(code))
    with pytest.raises(kind):
        ParityFile.create(path, GROUP, 1)
    assert_holds(file, OLD, 1)
    assert list(path.parent.iterdir()) == [path]
