"""Bytes of others' checkpoints are compared with the CRC-32 that ``torch.save`` wrote, once, before they count."""

from __future__ import annotations

import argparse
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ftckpt.errors import ConvertError
from ftckpt.universal.foreign import archives, pickles
from ftckpt.universal.foreign.archives import SMALL_BYTES
from ftckpt.universal.foreign.distributed import CheckpointDirectory
from ftckpt.universal.language.spec import Spec
from ftckpt.universal.megatron.legacy_reader import MegatronLegacyReader
from tests.support.errors import lacks, raises
from tests.support.flips import Record, flipped, noticed, of_distributed, records

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
