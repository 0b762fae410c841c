"""The file of a shard: the image of its slot, without what the slot holds of others."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load

from ftckpt.errors import CorruptError, DamagedError, StorageError
from ftckpt.memory.arena import Arena
from ftckpt.memory.image import parse_image
from ftckpt.model.lineage import FIRST
from ftckpt.model.snapshot import SnapshotId
from ftckpt.parity.modes import Modes
from ftckpt.persist.shard_file import ShardFile
from ftckpt.persist.shards import PIECE_BYTES, ShardImage, StoredShard, StoredSnapshot, contents, is_sound
from tests.support.errors import raises
from tests.support.protected import Job, build
from tests.support.snapshots import LINEAGE, slot_of

SNAPSHOT = SnapshotId(LINEAGE, 7)


def stored_of(arena: Arena, slot: int) -> tuple[ShardImage, StoredShard]:
    shard, record = ShardImage.of(arena.image), arena.control.record(slot)
    hashes = record.chunk_hashes[list(shard.chunks)]
    digest = shard.image.manifest.digest.hex()
    sizes = shard.image.file_bytes, "", digest, record.objects_used, record.objects_hash
    return shard, StoredShard(f"{arena.manifest.shard}.safetensors", *sizes, hashes)


@pytest.mark.parametrize("replica", ["", "replica", "copy"])
def test_a_file_is_a_slot_without_what_protects_others(replica: str, arena_root: Path) -> None:
    sets = ((0, 1, 2),) if replica else ()
    job = Job(arena_root, ("a", "b", "c"), Modes(), replica=replica, sets=sets)
    build(job, [7], [])
    for rank in range(3):
        with closing(Arena.open(job.path(rank))) as arena, arena.slot(slot := slot_of(arena, 7)) as data:
            shard, entry = stored_of(arena, slot)
            pieces = list(contents(shard, arena.image, data, entry))
            assert max(map(len, pieces)) <= PIECE_BYTES
            file = b"".join(pieces)
            assert len(file) == entry.nbytes and parse_image(file).manifest.digest.hex() == entry.digest
            kinds = {section.kind for section in shard.image.sections}
            assert kinds <= {"private", "shared"} and (len(file) < arena.image.file_bytes) == bool(replica)
            manifest, tensors = arena.manifest, load(file)
            for fragment, offset in zip(manifest.fragments, arena.image.offsets, strict=True):
                if fragment in shard.image.manifest.fragments:
                    found = tensors.pop(fragment.name).tobytes()
                    assert found == bytes(data[offset : offset + fragment.nbytes])
            objects = tensors.pop("__objects__").tobytes()
            begin = arena.image.objects.begin
            assert objects[: entry.objects_used] == bytes(data[begin : begin + entry.objects_used])
            assert not any(objects[entry.objects_used :]) and all(name.startswith("__pad.") for name in tensors)
            del pieces, data


@pytest.mark.parametrize("where", ["chunk", "objects"])
def test_bytes_that_are_not_what_they_were_are_seen_as_they_go_by(where: str, arena_root: Path) -> None:
    job = Job(arena_root, ("a", "b"), Modes())
    build(job, [7], [])
    with closing(Arena.open(job.path(0), writable=True)) as arena, arena.slot(slot := slot_of(arena, 7)) as data:
        shard, entry = stored_of(arena, slot)
        at = arena.image.objects.begin if where == "objects" else arena.image.chunks[1].begin
        data[at] ^= 1
        with raises(CorruptError, arena.manifest.shard, where):
            list(contents(shard, arena.image, data, entry))


@pytest.mark.parametrize("bit", [3, 27, 40, 63], ids=str)
def test_a_length_that_went_bad_reads_nothing(bit: int, arena_root: Path) -> None:
    """Not all of the file, as long as it claims to be."""
    job, asked = Job(arena_root, ("a", "b"), Modes()), list[tuple[int, int]]()
    build(job, [7], [])
    with closing(Arena.open(job.path(0))) as arena, arena.slot(slot := slot_of(arena, 7)) as data:
        shard, entry = stored_of(arena, slot)
        file = bytearray(b"".join(contents(shard, arena.image, data, entry)))

    def read(begin: int, nbytes: int) -> bytes:
        asked.append((begin, nbytes))
        return bytes(file[begin : begin + nbytes])

    ShardFile("x", arena.manifest.shard, entry, read)
    asked.clear()
    file[bit // 8] ^= 1 << bit % 8
    with raises(DamagedError, "x"):
        ShardFile("x", arena.manifest.shard, entry, read)
    assert asked == [(0, 8)]


def snapshot(frames: Sequence[int] | None = None) -> StoredSnapshot:
    hashes = np.array([1, (1 << 64) - 1], np.uint64)
    lengths = None if frames is None else np.array(frames, np.uint64)
    spare_bytes = 0 if frames else 324
    shard = StoredShard("ab-dp0.safetensors", 4096, "0" * 16, "ff", 700, (1 << 64) - 1, hashes, lengths, spare_bytes)
    return StoredSnapshot(SNAPSHOT, "job", {"dp": 1, "zero": True}, {"dp0": shard}, FIRST.branch(4))


@pytest.mark.parametrize("frames", [None, [1000, 3000, 40, 56]], ids=["as it is", "compressed"])
def test_a_manifest_survives_its_json(frames: list[int] | None) -> None:
    one = snapshot(frames)
    assert (b"frames" in one.encode()) == bool(frames), "frames are of compressed files alone"
    again = StoredSnapshot.decode(one.encode(), "m")
    assert again.encode() == one.encode() and again.snapshot == SNAPSHOT and again.lineage == FIRST.branch(4)
    assert again.shards["dp0"].spare_bytes == (0 if frames else 324)
    found = again.shards["dp0"].frames
    assert (None if found is None else found.tolist()) == frames
    assert again.shards["dp0"].chunk_hashes.tolist() == [1, (1 << 64) - 1]
    assert is_sound(one.encode()) and not is_sound(b"{}")


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "another format": (lambda m: m.update(format="safetensors"), "its format is not"),
    "another version": (lambda m: m.update(version=3), "format version 3, this ftckpt reads 2"),
    "edited": (lambda m: m.update(iteration=8), "its checksum does not match"),
    "a shard that is none": (lambda m: m["shards"].update(dp1=3), "does not match"),
    "without shards": (lambda m: m.pop("shards"), "does not match"),
    "without a checksum": (lambda m: m.pop("checksum"), "is no manifest"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_anything_else_is_refused(change: str) -> None:
    value = json.loads(snapshot().encode())
    action, text = CHANGES[change]
    action(value)
    with raises(StorageError, "m:", text):
        StoredSnapshot.decode(json.dumps(value).encode(), "m")
