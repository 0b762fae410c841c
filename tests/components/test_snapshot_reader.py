"""Snapshots on storage as ``ftckpt convert`` reads them, compressed or not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from ftckpt.errors import ConvertError
from ftckpt.model.snapshot import SnapshotId
from ftckpt.persist import retention, shard_file
from ftckpt.persist.files import FileStorage
from ftckpt.universal import snapshots
from ftckpt.universal.snapshots import SnapshotReader
from tests.support.errors import lacks, raises
from tests.support.flush_jobs import Job
from tests.support.smp_nodes import CHUNK
from tests.support.snapshots import LINEAGE


@pytest.fixture(params=["none", "zstd"])
def filled(arena_root: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Path, Job]]:
    """Storage with iteration 7 of two nodes, which have it in memory yet."""
    where = tmp_path / "storage"
    where.mkdir()
    job = Job(arena_root, str(where), persist_compress=request.param)
    job.start()
    job.snapshot(0, 7)
    job.flush(7)
    job.settled(7)
    yield where, job
    job.close()


def in_memory(job: Job) -> dict[str, bytes]:
    found = {}
    for arena in (arena for node in job.nodes for arena in node.arenas):
        with arena.slot(0) as view:
            for fragment, offset in zip(arena.manifest.fragments, arena.image.offsets, strict=True):
                found[fragment.key] = bytes(view[offset : offset + fragment.nbytes])
    return found


def test_what_is_read_is_what_memory_has(filled: tuple[Path, Job]) -> None:
    where, job = filled
    expected = in_memory(job)
    with closing(SnapshotReader(where)) as reader:
        fragments = reader.catalog.fragments
        assert {fragment.key for fragment in fragments} == expected.keys()
        for index, fragment in enumerate(fragments):
            whole = expected[fragment.key]
            assert reader.read(index).tobytes() == whole
            for begin, end in ((0, 1), (CHUNK - 5000, CHUNK + 4000), (len(whole) - 9, len(whole)), (70, 70)):
                assert reader.read_part(index, begin, end).tobytes() == whole[begin:end]
        assert set(reader.catalog.objects["shards"]) == {"dp0"}
    with raises(ConvertError):
        reader.read(0)


@pytest.mark.parametrize("filled", ["none"], indirect=True)
def test_what_is_void_is_passed_over_or_told(filled: tuple[Path, Job], caplog: pytest.LogCaptureFixture) -> None:
    where, job = filled

    def taken(path: Path, iteration: int | None = None) -> int:
        caplog.clear()
        with closing(SnapshotReader(path, iteration)) as reader:
            return reader.catalog.iteration

    job.snapshot(1, 8)
    job.flush(8)
    job.settled(8)
    assert taken(where) == 8 and not caplog.text
    retention.void(FileStorage(str(where)), [SnapshotId(LINEAGE, 8), SnapshotId(b"x" * 16, 7)])
    assert taken(where) == 7 and caplog.text
    assert taken(where, 7) == 7 and not caplog.text
    for path, iteration in ((where, 8), (where / "iter_0000008", None)):
        assert taken(path, iteration) == 8
        assert not lacks(caplog.text, "iter_0000008")
    retention.void(FileStorage(str(where)), [SnapshotId(LINEAGE, 7)])
    with raises(ConvertError, str(where), "--iteration"):
        SnapshotReader(where)
    (where / "iter_0000008" / "manifest.json").write_bytes(b"{}")
    with raises(ConvertError, "iter_0000008/manifest.json"):
        SnapshotReader(where)


@pytest.mark.parametrize("filled", ["zstd"], indirect=True)
def test_a_shard_is_never_unpacked_as_a_whole(filled: tuple[Path, Job], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a tensor, read one strip after the other, unpack each chunk once, and few stay in memory."""
    where, _ = filled
    monkeypatch.setattr(snapshots, "_UNPACKED", 1)
    unpacked: list[int] = []
    decompress = shard_file.decompress

    def counted(*arguments: object) -> memoryview:
        unpacked.append(1)
        return decompress(*arguments)  # type: ignore[arg-type]

    with closing(SnapshotReader(where)) as reader:
        monkeypatch.setattr(shard_file, "decompress", counted)
        index = next(n for n, fragment in enumerate(reader.catalog.fragments) if fragment.key == "own0")
        nbytes = reader.catalog.fragments[index].nbytes
        for begin in range(0, nbytes, 1000):
            reader.read_part(index, begin, min(begin + 1000, nbytes))
        assert len(unpacked) == -(-nbytes // CHUNK) > 1
        reader.read_part(index, 0, 1000)
        assert len(unpacked) == -(-nbytes // CHUNK) + 1
