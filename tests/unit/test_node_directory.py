"""What is removed of a node's directory, and what is not."""

from __future__ import annotations

from pathlib import Path

from ftckpt.memory import end_notes
from ftckpt.memory.directory import PULSE_NAME, clean_job, node_directory, remove_job_if_empty
from ftckpt.memory.heartbeat import Heartbeat
from ftckpt.memory.locks import JobLock
from ftckpt.smp.footprint import store_description


def test_pages_and_notes_go_with_the_job(arena_root: Path) -> None:
    node_dir = node_directory(arena_root, "job", "node")
    with JobLock(node_dir, 0):
        Heartbeat.open(node_dir, 0).leave()
        end_notes.tell(node_dir, end_notes.ExitNote(1.0, "rank 0: ConfigError: a start that was refused"))
        assert remove_job_if_empty(arena_root, "job", "node")
    assert list(arena_root.iterdir()) == []
    Heartbeat.open(node_directory(arena_root, "job", "node"), 0)  # what a killed job leaves
    assert clean_job(arena_root, "job") == []
    assert list(arena_root.iterdir()) == []


def test_what_a_killed_smp_was_writing_keeps_no_directory(arena_root: Path) -> None:
    left = node_directory(arena_root, "job", "node") / ".smp.json.0123abcd.new"
    left.write_bytes(b"half")
    store_description(left.parent, {})
    assert not left.exists(), "the next SMP removes it"
    left.write_bytes(b"half")
    assert remove_job_if_empty(arena_root, "job", "node")
    assert list(arena_root.iterdir()) == []


def test_what_is_no_page_is_not_removed_by_mistake(arena_root: Path) -> None:
    node_dir = node_directory(arena_root, "job", "node")
    (node_dir / PULSE_NAME).mkdir()
    assert not remove_job_if_empty(arena_root, "job", "node")
    assert (node_dir / PULSE_NAME).is_dir()
