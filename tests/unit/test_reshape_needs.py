"""What is read of a snapshot of another layout: keys that mean the same there, padding, copies that must agree."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ftckpt.arena.image import SlotImage
from ftckpt.errors import CorruptError, MismatchError
from ftckpt.layout.replicas import private_key
from ftckpt.restore.reshape import Held, check_copies, hear, index_for, needs_across, needs_of, tell
from ftckpt.restore.source import Source
from ftckpt.state.fragment import DTYPE_BYTES, Box, Fragment
from ftckpt.state.manifest import Manifest
from ftckpt.state.piece import Piece

NONE: frozenset[str] = frozenset()


def fragment(key: str, *shape: int, dtype: str = "F32") -> Fragment:
    return Fragment.whole(key, dtype, shape, Box((0,) * len(shape), shape))


def piece(key: str, *shape: int, derived: bool = False, dtype: str = "F32") -> Piece:
    made = fragment(key, *shape, dtype=dtype)
    tensor = torch.zeros(made.nbytes // DTYPE_BYTES["F32"])
    return Piece(made, tensor, torch.zeros_like(tensor) if derived else None)


def image(dp: int, stepped: list[Fragment], volatile: list[Fragment]) -> SlotImage:
    own = [f.with_key(private_key(f.key, f"dp{dp}")) for f in volatile]
    return SlotImage.of(Manifest({"dp": dp}, {"dp": 2}, tuple(stepped), tuple(own), 100, 4096, padded=("p",)))


def held(dp: int, stepped: list[Fragment], volatile: list[Fragment], reshaped: bool = True) -> Held:
    return Held.of(Source("n", f"dp{dp}.0", 0), dp, image(dp, stepped, volatile), 7, reshaped=reshaped)


def test_private_keys_are_the_models_and_local_ones_nobodys() -> None:
    def sources(reshaped: bool) -> list[Held]:
        volatile = [fragment("buffer/b", 3), fragment("local/s", 3)]
        return [held(dp, [fragment(f"master/{dp}", 4)], volatile, reshaped) for dp in (0, 1)]

    pieces = [piece("buffer/b", 3), piece("local/s", 3), piece("master/1", 4)]
    index = index_for(pieces, sources(reshaped=True), "dp1")
    assert index.shapes("buffer/b", "F32") == {(3,)} and not index.shapes("local/s", "F32")
    assert not index.shapes("buffer/b@dp1", "F32") and not index.shapes("master/0", "F32")
    wanted = needs_across(pieces, index, NONE)
    assert [need.key for _, need in wanted] == ["buffer/b", "master/1"]
    same = index_for(pieces, sources(reshaped=False), "dp1")
    assert not same.shapes("buffer/b@dp0", "F32")
    own = needs_of(pieces, same, sources(reshaped=False)[1])
    assert [need.key for _, need in own] == ["buffer/b@dp1", "local/s@dp1", "master/1"]


def test_what_is_told_of_slots_is_heard() -> None:
    mine = [held(dp, [fragment(f"master/{dp}", 4)], [fragment("buffer/b", 3)]) for dp in (0, 1)]
    assert hear(tell(mine), {h.shard: h.source for h in mine}, {h.shard: h.reader for h in mine}) == mine
    assert hear(tell([]), {}, {}) == []
    assert mine[0].padded == ("p",) and mine[0].objects[1] == 7


def test_a_key_that_ends_like_another_shards_name_is_not_cut() -> None:
    source = held(1, [fragment("master/x@dp11", 4), fragment("master/y@dp1", 4)], [])
    index = index_for([piece("master/x@dp11", 4), piece("master/y", 4)], [source], "dp1")
    assert index.shapes("master/x@dp11", "F32") and index.shapes("master/y", "F32")


def test_only_padded_keys_may_have_other_rows() -> None:
    need = [piece("master/w", 12, 4)]
    index = index_for(need, [held(0, [fragment("master/w", 16, 4)], [])], "dp0")
    assert needs_across(need, index, frozenset({"master/w"}))
    with pytest.raises(MismatchError, match=r"no master/w of type F32 and shape \[12, 4\] \(\[16, 4\] is there\)"):
        needs_across(need, index, NONE)
    for other in (piece("master/w", 12, 5), piece("master/w", 12), piece("master/w", 16, 4, dtype="BF16")):
        with pytest.raises(MismatchError, match="another model"):
            needs_across([other], index, frozenset({"master/w"}))


def test_what_is_derived_is_read_only_where_it_is_there() -> None:
    pieces = [piece("weight/raw", 4, derived=True), piece("weight/cast", 4, derived=True)]
    wanted = needs_across(pieces, index_for(pieces, [held(0, [fragment("weight/raw", 4)], [])], "dp0"), NONE)
    assert [need.key for _, need in wanted] == ["weight/raw"]


def test_copies_must_agree_where_they_are_needed() -> None:
    sources = [
        held(dp, [], [fragment("buffer/b", 3), fragment("buffer/c", 3), fragment("local/s", 3)]) for dp in (0, 1)
    ]
    assert [copy.key for copy, _ in sources[0].copies] == ["buffer/b", "buffer/c"]
    alike = {"dp0": np.array([7, 8], np.uint64), "dp1": np.array([7, 9], np.uint64)}
    check_copies(sources, alike, [fragment("buffer/b", 3)])
    with pytest.raises(MismatchError, match=r"buffer/c\S+ does not have the same bits in dp0 and dp1"):
        check_copies(sources, alike, [fragment("buffer/c", 3)])


def test_hashes_are_of_the_copies_alone() -> None:
    parts = [fragment("master/w", 4)], [fragment("buffer/b", 3), fragment("local/s", 3)]
    one, whole = held(0, *parts), image(0, *parts)
    slot = np.zeros(whole.file_bytes, np.uint8)
    before = one.hashes(slot.data)
    ((_, offset),) = one.copies
    assert len(before) == 1
    outside = [at for f, at in zip(whole.manifest.fragments, whole.offsets, strict=True) if at != offset]
    slot[outside] = 1
    assert one.hashes(slot.data) == before
    slot[offset + 11] = 1
    assert one.hashes(slot.data) != before


def test_a_manifest_tells_padded_keys_only_where_there_are_some() -> None:
    plain, padded = (Manifest({"dp": 0}, {}, (), (), 4096, 4096, padded=keys) for keys in ((), ("master/w",)))
    assert b"padded" not in plain.encode() and Manifest.decode(plain.encode()).padded == ()
    assert Manifest.decode(padded.encode()) == padded and padded.digest != plain.digest
    for wrong in (b'"master/w"', b"[1]", b"null", b"{}"):
        with pytest.raises(CorruptError):
            Manifest.decode(padded.encode().replace(b'["master/w"]', wrong))
