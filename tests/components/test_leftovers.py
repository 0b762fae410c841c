"""A start that lacks memory names those who have it: other jobs of this user, and how they are removed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ftckpt.errors import MemoryBudgetError
from ftckpt.memory import ledger
from ftckpt.memory.directory import clean_job, node_directory
from ftckpt.memory.ledger import name_other_jobs, require
from ftckpt.memory.locks import JobLock
from tests.support.arenas import Rank, on_all, ranks
from tests.support.errors import lacks, raises

MIB = 1 << 20


def hold(root: Path, job: str, nbytes: int) -> Path:
    """A node's directory of ``job`` with a file of ``nbytes``."""
    node_dir = node_directory(root, job, "node")
    (node_dir / "dp0.00110011").mkdir()
    (node_dir / "dp0.00110011" / "slot0.safetensors").write_bytes(bytes(nbytes))
    return node_dir


def test_the_largest_first_and_who_runs_is_not_to_be_removed(arena_root: Path) -> None:
    hold(arena_root, "small", MIB)
    hold(arena_root, "mine", 5 * MIB)
    node_directory(arena_root, "empty", "node")
    (arena_root / "ftckpt-file").write_bytes(bytes(MIB))
    (arena_root / "ftckpt-link").symlink_to(arena_root / "ftckpt-small")
    lock = JobLock(hold(arena_root, "large", 3 * MIB), 0)
    try:
        text = name_other_jobs(arena_root, "mine")
    finally:
        lock.release()
    assert not lacks(text, "large 3.0 MiB (running)") and not lacks(text, "small 1.0 MiB", "--arena", str(arena_root))
    assert text.index("large") < text.index("small")
    assert not any(f"{name} " in text for name in ("mine", "empty", "file", "link"))
    for number in range(6):
        hold(arena_root, f"more{number}", 2 * MIB)
    assert "3 more 5.0 MiB" in name_other_jobs(arena_root, "mine")
    assert name_other_jobs(arena_root / "missing", "mine") == ""


def test_another_users_is_not_named(arena_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hold(arena_root, "small", MIB)
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    assert name_other_jobs(arena_root, "mine") == ""


def test_a_start_without_room_names_them_and_leaves_nothing(
    arena_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold(arena_root, "yesterday", MIB)
    members = ranks(arena_root, 2)

    def full(path: Path, need_bytes: int) -> None:
        raise MemoryBudgetError(f"{need_bytes} bytes needed")

    def begin(member: Rank) -> None:
        member.arenas.entry.enter()
        member.arena = member.arenas.open(member.manifest(), None)

    monkeypatch.setattr(ledger, "check_budget", full)
    with raises(MemoryBudgetError, "yesterday 1.0 MiB"):
        on_all(members, begin)
    on_all(members, lambda member: member.arenas.withdraw())
    assert [path.name for path in arena_root.iterdir()] == ["ftckpt-yesterday"]
    clean_job(arena_root, "yesterday")
    with raises(MemoryBudgetError) as refused:
        require(arena_root / "ftckpt-job" / "node", MIB)
    assert "other jobs" not in str(refused.value)
