"""A node's lineage in its file: there as it was written, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftckpt.errors import ArenaError
from ftckpt.memory.directory import LINEAGE_NAME
from ftckpt.memory.lineage_file import read_lineage, write_lineage
from ftckpt.model.lineage import FIRST, UNKNOWN


def test_a_lineage_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_lineage(tmp_path) == UNKNOWN
    for lineage in (FIRST, FIRST.branch(40)):
        write_lineage(tmp_path, lineage)
        assert read_lineage(tmp_path) == lineage
    assert [path.name for path in tmp_path.iterdir()] == [LINEAGE_NAME]


@pytest.mark.parametrize("at", [0, 5, 40, 60])
def test_a_damaged_file_is_no_lineage(at: int, tmp_path: Path) -> None:
    write_lineage(tmp_path, FIRST.branch(40))
    data = bytearray((tmp_path / LINEAGE_NAME).read_bytes())
    data[at] ^= 1
    (tmp_path / LINEAGE_NAME).write_bytes(data)
    assert read_lineage(tmp_path) == UNKNOWN
    (tmp_path / LINEAGE_NAME).write_bytes(data[: at + 1])
    assert read_lineage(tmp_path) == UNKNOWN


def test_a_lineage_that_is_there_is_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full tmpfs takes no page, and a job that resumes needs none."""

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    write_lineage(tmp_path, FIRST)
    monkeypatch.setattr(Path, "write_bytes", full)
    write_lineage(tmp_path, FIRST)
    with pytest.raises(ArenaError):
        write_lineage(tmp_path, FIRST.branch(3))
    assert read_lineage(tmp_path) == FIRST
