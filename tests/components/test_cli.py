"""The command line: what it shows, what it deletes, its exit status."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ftckpt.cli.main import main
from ftckpt.memory.arena import Arena
from ftckpt.memory.checks import Checks
from ftckpt.memory.directory import node_directory
from ftckpt.memory.locks import JobLock
from ftckpt.model.fragment import Box, Fragment
from ftckpt.model.manifest import Manifest
from ftckpt.model.snapshot import SnapshotId
from tests.support.errors import lacks
from tests.support.flips import flip
from tests.support.repository import is_golden
from tests.support.snapshots import fill

REPOSITORY = Path(__file__).parents[2]
WEIGHTS = Fragment.whole("w", "F32", (3000,), Box((0,), (3000,)))
LINEAGE = bytes.fromhex("1f2e3d4c") * 4


def arena_with_snapshot(root: Path, tp: int = 0, node: str = "n0") -> Path:
    manifest = Manifest({"tp": tp}, {"tp": 2}, (WEIGHTS,), (), 4000, 8192)
    arena = Arena.create(node_directory(root, "job", node), manifest, 2)
    fill(arena, 1, 120, hashed=True, lineage=LINEAGE)
    arena.control.mark_whole(SnapshotId(LINEAGE, 119))
    arena.close()
    return arena.path


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if len(line.split()) == 8]


@pytest.mark.parametrize("up", [0, 1, 2])
def test_inspect_an_arena_a_node_or_a_job(arena_root: Path, capsys: pytest.CaptureFixture[str], up: int) -> None:
    path = arena_with_snapshot(arena_root)
    target = [path, path.parent, path.parent.parent][up]
    assert main(["list", str(target)]) == 0
    found = rows(capsys.readouterr().out)
    assert [row[:4] for row in found[1:]] == [
        [f"n0/{path.name}", "0", "EMPTY", "-"], [f"n0/{path.name}", "1", "SEALED", "120"],
    ]  # fmt: skip


def test_inspect_verifies(arena_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = arena_with_snapshot(arena_root)
    assert main(["verify", str(path)]) == 0
    assert [row[-1] for row in rows(capsys.readouterr().out)] == ["VERIFIED", "-", "yes"]
    flip(path / "slot1.safetensors", 4096 + 9000)
    assert main(["list", str(path)]) == 0
    capsys.readouterr()
    assert main(["verify", str(path)]) == 1
    out = capsys.readouterr().out
    assert rows(out)[2][-1] == "BAD" and not lacks(out, "1")


def test_clean(arena_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = arena_with_snapshot(arena_root)
    with JobLock(path.parent, 0):
        assert main(["clean", "job", "--arena", str(arena_root)]) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.count("\n") == 1
        assert not lacks(captured.err, "ftckpt", "job")
    assert main(["clean", str(path.parent.parent)]) == 0, "by its directory"
    is_golden("clean", capsys.readouterr().out, arena=path)
    assert list(arena_root.iterdir()) == []
    assert main(["clean", "job", "--arena", str(arena_root)]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and not lacks(captured.err, "ftckpt", "job", str(arena_root))
    node_directory(arena_root, "job", "n0")
    assert main(["clean", "job", "--arena", str(arena_root)]) == 0 and not list(arena_root.iterdir())


@pytest.mark.parametrize("odd", ["ftckpt-a b/n/x", "ftckpt-\x1b[31mred/n/x", "ftckpt-job/n \x1b[2J/x", "ftckpt-/n/x"])
def test_an_odd_directory_hides_no_job_and_its_name_is_not_printed(
    arena_root: Path, capsys: pytest.CaptureFixture[str], odd: str
) -> None:
    arena_with_snapshot(arena_root)
    (arena_root / odd).mkdir(parents=True)
    (arena_root / odd).with_name("smp.lock").touch()
    assert main(["jobs", "--arena", str(arena_root)]) == 0
    captured = capsys.readouterr()
    assert [line.split()[:2] for line in captured.out.splitlines()[1:]] == [["job", "n0"]] and not captured.err
    assert main(["status", "none", "--arena", str(arena_root)]) == 2
    assert not lacks(capsys.readouterr().err, "ftckpt", "none", str(arena_root))
    assert main(["status", "--arena", str(arena_root)]) == 1
    assert not lacks(capsys.readouterr().out, "0", "1")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_what_other_users_have_is_named_and_left_out(arena_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arena_with_snapshot(arena_root)
    arena_root.chmod(0o755)
    try:
        os.seteuid(65534)
        assert main(["jobs", "--arena", str(arena_root)]) == 0
        captured = capsys.readouterr()
        assert not lacks(captured.out, str(arena_root))
        assert not lacks(captured.err, "ftckpt", "0")
        assert main(["status", "job", "--arena", str(arena_root)]) == 2
        assert not lacks(capsys.readouterr().err, "job", "0")
    finally:
        os.seteuid(0)


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["dance"],
        ["list"],
        ["list", "/nowhere/at/all"],
        ["list", "x", "--quick"],
        ["clean", "../x"],
        ["report"],
        ["report", "/nowhere/at/all"],
        ["report", str(REPOSITORY / "tests")],
        ["report", ".", "--iteration", "last"],
    ],
)
def test_errors_are_one_line(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("ftckpt: ") and captured.err.count("\n") == 1


def test_torch_is_not_loaded() -> None:
    code = "import sys, ftckpt.cli.main; sys.exit('torch' in sys.modules or 'safetensors' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=False).returncode == 0


def test_inspect_tells_how_far_a_snapshot_has_come(arena_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = arena_with_snapshot(arena_root)
    arena = Arena.open(path, writable=True)
    control, chunks = arena.control, len(arena.image.chunks)
    fill(arena, 0, 121, lineage=LINEAGE)

    def shown() -> tuple[list[str], str]:
        assert main(["verify", str(path)]) == 0
        out = capsys.readouterr().out
        return rows(out)[1][2:4] + rows(out)[1][-2:], out

    assert shown()[0] == ["SEALED", "121", "open", "unchecked"]
    checks = Checks.create_or_open(path, 2, chunks, arena.manifest.digest, writable=True)
    record = control.record(0)
    named = record.seal_id
    assert named is not None
    hashes = np.array([arena.hash_chunk(0, chunk) for chunk in range(chunks)], np.uint64)
    checks.store_checked(0, named, hashes, 0.25)
    assert shown()[0] == ["CHECKED", "121", "0.250s", "yes"]
    control.mark_target(SnapshotId(LINEAGE, 121))
    assert "being protected on all nodes: iteration 121" in shown()[1]
    control.mark_target(None)
    checks.store_encoded(0, named)
    control.mark_protected(SnapshotId(LINEAGE, 121))
    state, out = shown()
    assert state == ["PROTECTED", "121", "0.250s", "yes"]
    is_golden("verify", out, arena=path.name)
    flip(path / "slot0.safetensors", 4096 + 9000)
    assert main(["verify", str(path)]) == 1
    assert rows(capsys.readouterr().out)[1][-1] == "BAD"
    checks.close()
    arena.close()
