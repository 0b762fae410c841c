"""Files of torch.save and torch.distributed.checkpoint, read without pickle."""

from __future__ import annotations

import argparse
import contextlib
import io
import struct
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash

from ftckpt.errors import ConvertError
from ftckpt.model import objects
from ftckpt.universal.conversion import Options, convert
from ftckpt.universal.foreign import archives, pickles
from ftckpt.universal.foreign.archives import SMALL_BYTES
from ftckpt.universal.foreign.distributed import CheckpointDirectory
from ftckpt.universal.language.spec import Spec
from ftckpt.universal.megatron.legacy_reader import MegatronLegacyReader
from ftckpt.universal.universal_format import UniversalReader, UniversalWriter
from tests.support.errors import lacks, raises
from tests.support.flips import flip


@dataclass(frozen=True)
class Record:
    """Bytes of a file that a CRC-32 belongs to."""

    file: Path
    key: str
    begin: int
    nbytes: int


def records(file: Path, begin: int = 0, length: int | None = None) -> list[Record]:
    """Records that are not empty, of an archive that is ``file`` or a part of it."""
    data = file.read_bytes()[begin : None if length is None else begin + length]
    found = []
    for entry in zipfile.ZipFile(io.BytesIO(data)).infolist():
        lengths = struct.unpack("<HH", data[entry.header_offset + 26 : entry.header_offset + 30])
        at = begin + entry.header_offset + 30 + sum(lengths)
        if entry.file_size:
            found.append(Record(file, entry.filename.partition("/")[2], at, entry.file_size))
    return found


def of_distributed(path: Path) -> list[Record]:
    """Records of the ``.distcp`` files of a directory, at the places that torch itself names."""
    from torch.distributed.checkpoint import FileSystemReader

    places: Any = FileSystemReader(path).read_metadata().storage_data
    return [
        record
        for info in sorted(places.values(), key=lambda info: (info.relative_path, info.offset))
        for record in records(path / info.relative_path, info.offset, info.length)
    ]


@contextlib.contextmanager
def flipped(record: Record) -> Iterator[None]:
    """One bit in the middle of a record is flipped."""
    place = record.begin + record.nbytes // 2
    flip(record.file, place, 2)
    try:
        yield
    finally:
        flip(record.file, place, 2)


def all_that_is_read(source: Any) -> str:
    """A digest of every fragment and object."""
    try:
        digest = xxhash.xxh3_128(objects.encode(dict(source.catalog.objects)))
        for index, fragment in enumerate(source.catalog.fragments):
            digest.update(repr(fragment).encode())
            digest.update(source.read(index).tobytes())
        return digest.hexdigest()
    finally:
        source.close()


def noticed(opened: Callable[[], Any], found: list[Record]) -> dict[Record, str]:
    """The error for a flipped bit in each record, except for records that are not read.

    A flip that is read and not refused is an AssertionError.
    """
    right = all_that_is_read(opened())
    said: dict[Record, str] = {}
    for record in found:
        with flipped(record):
            try:
                assert all_that_is_read(opened()) == right, f"{record} was read with a flipped bit"
            except ConvertError as error:
                said[record] = str(error)
    assert all_that_is_read(opened()) == right
    for record, text in said.items():
        assert str(record.file) in text, (record, text)
        assert f"record {record.key} do not match their CRC-32" in text, (record, text)
    return said


# --- bytes of others' checkpoints are compared with the CRC-32 that ``torch.save`` wrote, once, before they count ---


LARGE = SMALL_BYTES // 4 + 1000
RULES = [
    {"match": "norm.weight", "replicated": True},
    {"match": "large.weight", "fragment": {"dim": 0}},
    {"match": "turned.weight", "fragment": {"dim": 0}},
]
SPEC = Spec.parse({"rules": RULES}, "example")


@pytest.fixture(autouse=True)
def _with_checksums() -> Iterator[None]:
    yield
    torch.serialization.set_crc32_options(True)


def model() -> dict[str, torch.Tensor]:
    return {
        "norm.weight": torch.arange(7.0),
        "large.weight": torch.arange(float(LARGE)),
        "turned.weight": torch.arange(2.0 * LARGE).reshape(LARGE, 2).t(),
    }


def write(path: Path) -> Path:
    """A small checkpoint of Megatron's ``torch`` format; its only file."""
    file = path / "iter_0000003" / "mp_rank_00" / "model_optim_rng.pt"
    file.parent.mkdir(parents=True)
    args = argparse.Namespace(tensor_model_parallel_size=1, pipeline_model_parallel_size=1)
    scheduler = {"num_steps": 24, "table": torch.arange(2.0 * LARGE)}
    torch.save({"model": model(), "args": args, "iteration": 3, "opt_param_scheduler": scheduler}, file)
    (path / "latest_checkpointed_iteration.txt").write_text("3")
    return file


def of_size(file: Path, numel: int) -> Record:
    (found,) = [record for record in records(file) if record.nbytes == 4 * numel and record.key.startswith("data/")]
    return found


def test_no_record_can_be_flipped_unseen(tmp_path: Path) -> None:
    file = write(tmp_path)
    every = records(file)
    said = noticed(lambda: MegatronLegacyReader(tmp_path, SPEC), every)
    assert set(said) == set(every) and len(every) > 8
    assert not lacks(said[of_size(file, LARGE)], "weight/large.weight")
    assert not lacks(said[of_size(file, 7)], str(file), "data/0")
    assert any(not lacks(text, str(file), "opt_param_scheduler.table") for text in said.values())


def test_what_was_written_without_checksums_is_read(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    file = write(tmp_path / "pt")
    dcp.save({"a": torch.arange(float(LARGE))}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert {entry.CRC for entry in zipfile.ZipFile(file).infolist()} == {0}
    source = MegatronLegacyReader(tmp_path / "pt", SPEC)
    assert source.read(1).tobytes() == model()["large.weight"].numpy().tobytes()
    directory = CheckpointDirectory(tmp_path / "dcp")
    (chunk,) = directory.tensors["a"].chunks
    assert directory.chunk("a", chunk).tobytes() == torch.arange(float(LARGE)).numpy().tobytes()
    with flipped(of_size(file, LARGE)):  # nobody can tell
        MegatronLegacyReader(tmp_path / "pt", SPEC).read(1)


def test_no_chunk_of_torch_distributed_checkpoint_can_be_flipped_unseen(tmp_path: Path) -> None:
    state = {"a": torch.randn(50, 3), "b": torch.randn(40, 20).t(), "n": {"step": 3, "more": [1, 2]}}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)

    names: set[str] = set()

    def read() -> None:
        directory = CheckpointDirectory(tmp_path)
        names.update(directory.tensors, directory.objects)
        for name, tensor in directory.tensors.items():
            for chunk in tensor.chunks:
                directory.chunk(name, chunk)
        for name in directory.objects:
            directory.object(name)

    read()
    every = of_distributed(tmp_path)
    assert len(every) > 12
    for record in every:
        with flipped(record), raises(ConvertError, "CRC-32") as error:
            read()
        assert any(not lacks(str(error.value), str(record.file), name) for name in names), str(error.value)


def test_a_flip_in_the_archives_own_list_is_no_other_tensor(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(float(LARGE)), "b": torch.arange(float(LARGE)) + 1}, tmp_path / "x.pt")
    whole = (tmp_path / "x.pt").read_bytes()
    begin = whole.index(b"PK\x01\x02")
    right = [torch.arange(float(LARGE)), torch.arange(float(LARGE)) + 1]
    for at in range(begin, len(whole)):
        data = bytearray(whole)
        data[at] ^= 1
        (tmp_path / "x.pt").write_bytes(data)
        try:
            value = pickles.load(tmp_path / "x.pt")
            for name in ("a", "b"):
                archives.check(value[name], name)
        except ConvertError as error:
            assert "x.pt" in str(error)
        else:
            assert all(map(torch.equal, (value["a"], value["b"]), right)), at


# --- megatron's ``torch`` checkpoints made by hand: layouts and damages that a real job is not needed for ---


EXPERT = "decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc1.weight"
EXPERT_RULES = [
    {"match": EXPERT, "fragment": {"dim": 0}, "rename": "experts.{layer}", "expert": "expert", "stack": "expert"},
    {"match": "norm.*", "replicated": True, "optional": True},
    {"match": "proj.weight", "fragment": {"dim": 1}, "optional": True},
]
EXPERT_SPEC = Spec.parse({"rules": EXPERT_RULES}, "example")
EXPERTS = torch.arange(4 * 6 * 3, dtype=torch.float32).view(4, 6, 3)
PROJ = torch.arange(24.0).view(3, 8)


def write_rank(path: Path, name: str, model: dict[str, torch.Tensor], args: dict[str, int], **more: Any) -> None:
    directory = path / "iter_0000003" / name
    directory.mkdir(parents=True)
    whole = {"model": model, "args": argparse.Namespace(**args), "iteration": 3, "checkpoint_version": 3.0, **more}
    torch.save(whole, directory / "model_optim_rng.pt")
    (path / "latest_checkpointed_iteration.txt").write_text("3")


def sizes(tp: int, ep: int = 1, etp: int | None = None) -> dict[str, int]:
    named = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": 1, "expert_model_parallel_size": ep}
    return named if etp is None else {**named, "expert_tensor_parallel_size": etp}


def experts(numbers: range) -> dict[str, torch.Tensor]:
    name = "decoder.layers.0.mlp.experts.local_experts.{}.linear_fc1.weight"
    return {name.format(index): EXPERTS[number].clone() for index, number in enumerate(numbers)}


def read(path: Path, to: Path) -> dict[str, bytes]:
    convert(MegatronLegacyReader(path, EXPERT_SPEC), UniversalWriter(to), Options())
    source = UniversalReader(to)
    return {f.key: source.read(i).tobytes() for i, f in enumerate(source.catalog.fragments)}


def test_experts_that_are_not_cut_while_all_else_is(tmp_path: Path) -> None:
    """Expert tensor parallelism of 1: both ranks hold the full experts, which must not be concatenated."""
    for tp in range(2):
        model = {**experts(range(4)), "proj.weight": PROJ[:, 4 * tp : 4 * tp + 4].clone()}
        write_rank(tmp_path, f"mp_rank_{tp:02d}", model, sizes(2, etp=1))
    found = read(tmp_path, tmp_path / "out")
    assert found["weight/experts.0"] == EXPERTS.numpy().tobytes()
    assert found["weight/proj.weight"] == PROJ.numpy().tobytes()


def test_experts_that_tensor_parallel_ranks_are_dealt(tmp_path: Path) -> None:
    """Two tensor-parallel ranks are two expert ranks: there are no files of the other pairs."""
    for rank in range(2):
        model = {**experts(range(2 * rank, 2 * rank + 2)), "proj.weight": PROJ[:, 4 * rank : 4 * rank + 4].clone()}
        write_rank(tmp_path, f"mp_rank_{rank:02d}_{rank:03d}", model, sizes(2, 2, 1))
    found = read(tmp_path, tmp_path / "out")
    assert found["weight/experts.0"] == EXPERTS.numpy().tobytes()
    assert found["weight/proj.weight"] == PROJ.numpy().tobytes()
    (tmp_path / "iter_0000003" / "mp_rank_01_001" / "model_optim_rng.pt").unlink()
    with raises(ConvertError, "1", "0"):
        MegatronLegacyReader(tmp_path, EXPERT_SPEC)


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"iteration": 4}, "mp_rank_01 4 mp_rank_00 3"),
        ({"optimizer": None}, "mp_rank_01"),
        ({"optimizer": {"optimizer": {"param_groups": [{"wd_mult": 1.0}]}}}, "distrib_optim.pt"),
        ({"optimizer": [{}, {}, {}]}, "mp_rank_01 3"),
        ({"optimizer": [7]}, "distrib_optim.pt"),
    ],
)
def test_ranks_whose_files_do_not_fit_together_are_named(tmp_path: Path, more: dict[str, Any], text: str) -> None:
    optimizer = {"optimizer": {"state": {0: {"exp_avg": torch.zeros(4)}}, "param_groups": [{"params": [0]}]}}
    model = {"norm.weight": torch.ones(4)}
    spec = Spec.parse({"rules": EXPERT_RULES[1:]}, "example")
    for tp, changed in enumerate(({}, more)):
        write_rank(tmp_path, f"mp_rank_{tp:02d}", model, sizes(2), **{"optimizer": optimizer, **changed})
    with raises(ConvertError, *text.split()):
        MegatronLegacyReader(tmp_path, spec)
    if "iteration" not in more:
        weights = MegatronLegacyReader(tmp_path, spec, roles={"weight"})
        assert weights.read(0).tobytes() == np.ones(4, np.float32).tobytes()
