"""What all tests share: where scripts lie, and a job that must leave nothing behind."""

from __future__ import annotations

import shutil
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "launch")]


@pytest.fixture
def arena_root() -> Iterator[Path]:
    """A directory of its own on a tmpfs."""
    root = Path("/dev/shm") / f"ftckpt-test-{uuid.uuid4().hex[:8]}"
    root.mkdir()
    yield root
    shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def settings(arena_root: Path, tmp_path: Path) -> dict[str, object]:
    """Configuration fields for one job; events go to ``tmp_path/events``."""
    return {
        "job": "test",
        "arena": str(arena_root),
        "events": str(tmp_path / "events"),
        "start_timeout_secs": 60.0,
        "fence_timeout_secs": 20.0,
        "agree_timeout_secs": 20.0,
    }
