"""Pages of slots: mapped without a wait, had from the kernel on the thread that copies, and on which NUMA node."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import torch

from ftckpt.capture.copier import HostCopier
from ftckpt.memory.mapping import Mapping, create_mapping, join_pages, open_mapping
from tests.support.waiting import until

NBYTES = 8 << 20


def resident(path: Path) -> int:
    """Bytes of the file that this process has page tables for."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def slot_of(mapping: Mapping) -> torch.Tensor:
    return torch.frombuffer(mapping.data[:], dtype=torch.uint8)


def test_a_large_file_is_mapped_without_touching_its_pages(arena_root: Path) -> None:
    """A restart opens all arenas of a node; their pages would take seconds for each 100 GB."""
    path = arena_root / "file"
    with closing(create_mapping(path, NBYTES)):
        assert path.stat().st_blocks * 512 >= NBYTES, "room is reserved"
        assert resident(path) == 0
        with closing(open_mapping(path, NBYTES, writable=True)):
            assert resident(path) == 0


def test_the_copier_has_the_pages_of_slots_before_the_first_copy(arena_root: Path) -> None:
    path = arena_root / "file"
    with closing(create_mapping(path, NBYTES)) as mapping, closing(HostCopier()) as copier:
        mapping.data[5] = 7
        copier.prepare([slot_of(mapping)])
        until(lambda: resident(path) == NBYTES, "pages are mapped")
        assert bytes(mapping.data[:8]) == b"\0\0\0\0\0\7\0\0", "bytes stay as they are"


def test_joined_pages_keep_what_is_in_them(arena_root: Path) -> None:
    path, nbytes = arena_root / "file", (6 << 20) + 5
    mapped = create_mapping(path, nbytes)
    data = bytearray(os.urandom(nbytes))
    mapped.data[:] = data
    with path.open("r+b") as file:
        joined = join_pages(file.fileno(), 0, nbytes)
        mapped.data[5 << 20] = data[5 << 20] = 255 - data[5 << 20]  # by pages that were mapped before
        assert not join_pages(file.fileno(), 4096, nbytes - 4096), "no huge page begins there"
        assert join_pages(file.fileno(), 0, nbytes) == joined
    assert path.read_bytes() == bytes(mapped.data) == data
    mapped.close()
