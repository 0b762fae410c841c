"""A start that lacks memory names the command that lists who has it, and leaves nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftckpt.errors import MemoryBudgetError
from ftckpt.memory import ledger
from ftckpt.memory.directory import node_directory
from tests.support.arenas import Rank, on_all, ranks
from tests.support.errors import raises

MIB = 1 << 20


def hold(root: Path, job: str, nbytes: int) -> Path:
    """A node's directory of ``job`` with a file of ``nbytes``."""
    node_dir = node_directory(root, job, "node")
    (node_dir / "dp0.00110011").mkdir()
    (node_dir / "dp0.00110011" / "slot0.safetensors").write_bytes(bytes(nbytes))
    return node_dir


def test_a_start_without_room_leaves_nothing(arena_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hold(arena_root, "yesterday", MIB)
    members = ranks(arena_root, 2)

    def full(path: Path, need_bytes: int) -> None:
        raise MemoryBudgetError(f"{need_bytes} bytes needed")

    def begin(member: Rank) -> None:
        member.arenas.entry.enter()
        member.arena = member.arenas.open(member.manifest(), None)

    monkeypatch.setattr(ledger, "check_budget", full)
    with raises(MemoryBudgetError, "ftckpt jobs --arena", str(arena_root)):
        on_all(members, begin)
    on_all(members, lambda member: member.arenas.withdraw())
    assert [path.name for path in arena_root.iterdir()] == ["ftckpt-yesterday"]
