"""What benchmarks call storage: files that are out of memory, and a disk that gives only so many bytes a second."""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path

import pytest

from benchmarks import slow_storage
from tests.support.errors import raises

NBYTES = 4 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "some").write_bytes(os.urandom(NBYTES))
    (tmp_path / "empty").touch()
    return tmp_path


def test_files_are_out_of_memory_until_they_are_read(folder: Path) -> None:
    assert slow_storage.drop(folder) == NBYTES
    assert slow_storage.cached_bytes(folder) == 0
    assert slow_storage.read_all(folder) == NBYTES
    assert slow_storage.cached_bytes(folder) == NBYTES


def test_what_stays_in_memory_is_told(arena_root: Path) -> None:
    (arena_root / "some").write_bytes(os.urandom(NBYTES))
    with raises(RuntimeError, str(NBYTES), str(NBYTES)):
        slow_storage.drop(arena_root)


def test_a_limit_holds_while_a_process_is_in_it(folder: Path) -> None:
    try:
        limit = slow_storage.DiskLimit(f"ftckpt-test-{uuid.uuid4().hex[:8]}", folder, NBYTES * 2)
    except OSError as error:
        pytest.skip(f"no limit can be set here: {error}")
    try:
        slow_storage.drop(folder)
        begin = time.monotonic()
        with slow_storage.limited(str(limit.folder)):
            slow_storage.read_all(folder)
        assert time.monotonic() - begin > 0.4, "half a second of bytes"
        assert not (limit.folder / "cgroup.procs").read_text()
    finally:
        limit.close()
    assert not limit.folder.exists()
    with slow_storage.limited(""):
        pass
