"""Bytes of others' checkpoints are compared with the CRC-32 that ``torch.save`` wrote, once, before they count."""

from __future__ import annotations

import argparse
import io
import sys
import zipfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml

from ftckpt.cli.main import main
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
    assert not lacks(said[of_size(file, 7)], "model.norm.weight")
    assert any(not lacks(text, str(file), "opt_param_scheduler.table") for text in said.values())


def test_a_conversion_of_a_damaged_file_is_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "save")
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump({"rules": RULES}))
    words = ["convert", str(tmp_path / "save"), str(tmp_path / "out"), "--spec", str(tmp_path / "spec.yaml")]
    with flipped(of_size(file, LARGE)):
        assert main(words) == 2
        assert not lacks(capsys.readouterr().err, str(file), "weight/large.weight")
        assert not (tmp_path / "out").exists()
        assert main([*words, "--dry-run"]) == 0, "nothing of it is read"
    words[2] = str(tmp_path / "other")
    assert main([*words, "--verify"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("at", [0, 4 * LARGE - 1])
def test_a_record_is_compared_whole_when_a_part_of_it_is_read(tmp_path: Path, at: int) -> None:
    torch.save({"flat": torch.arange(float(LARGE))}, tmp_path / "x.pt")
    with flipped(of_size(tmp_path / "x.pt", LARGE), at):
        middle = pickles.load(tmp_path / "x.pt")["flat"][100:120]
        with raises(ConvertError, "x.pt", "exp_avg/w"):
            archives.check(middle, "exp_avg/w")


def test_each_byte_is_compared_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    source = MegatronLegacyReader(tmp_path, SPEC)
    compared: list[int] = []
    crc32 = zlib.crc32

    def counted(data: Any) -> int:
        compared.append(len(data))
        return crc32(data)

    monkeypatch.setattr(archives.zlib, "crc32", counted)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(source.read, list(range(3)) * 5))
    assert sorted(compared) == [4 * LARGE, 8 * LARGE]  # all else was small, and compared when it was opened


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


def test_storages_that_were_left_out_and_filled_later_are_read(tmp_path: Path) -> None:
    """``skip_data`` writes a checksum of zero for them, and right ones for all else."""
    with torch.serialization.skip_data():
        torch.save({"a": torch.empty(LARGE), "b": 3}, tmp_path / "x.pt")
    record = of_size(tmp_path / "x.pt", LARGE)
    with (tmp_path / "x.pt").open("r+b") as file:
        file.seek(record.begin)
        file.write(torch.arange(float(LARGE)).numpy().tobytes())
    value = pickles.load(tmp_path / "x.pt")
    archives.check(value["a"], "a")
    assert torch.equal(value["a"], torch.arange(float(LARGE)))


def test_the_format_before_torch_1_6_has_none(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    value = pickles.load(tmp_path / "x.pt")
    archives.check(value["a"], "a")
    assert value["a"].tolist() == [1, 1, 1]


def test_a_file_of_a_machine_with_another_byte_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch turns round what it reads: the checksum is that of the file."""
    other = "big" if sys.byteorder == "little" else "little"
    with monkeypatch.context() as patched:
        patched.setattr(sys, "byteorder", other)
        torch.save({"a": torch.arange(LARGE)}, tmp_path / "x.pt")
    value = pickles.load(tmp_path / "x.pt")
    archives.check(value["a"], "a")
    assert value["a"][1] == 1 << 56
    with flipped(of_size(tmp_path / "x.pt", 2 * LARGE)), raises(ConvertError, "x.pt"):
        pickles.load(tmp_path / "x.pt")


def with_more(path: Path, more: dict[str, bytes]) -> None:
    """The archive with records that nothing in it refers to."""
    made = io.BytesIO()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(made, "w") as new:
        for name, content in more.items():
            new.writestr(f"{path.stem}/{name}", content)
        for entry in old.infolist():
            if not entry.filename.endswith("/.storage_alignment"):
                new.writestr(entry.filename, old.read(entry))
    path.write_bytes(made.getvalue())


@pytest.mark.parametrize("copies", [1, 2])
def test_records_that_nothing_refers_to_hide_no_others(tmp_path: Path, copies: int) -> None:
    """Which record a storage is of is told by where it lies; where it cannot be told, all are compared."""
    page = torch.arange(float(1 << 20))
    torch.save({"a": page}, tmp_path / "x.pt")
    with_more(tmp_path / "x.pt", {f"data/{99 - number}": bytes(page.nbytes) for number in range(copies)})
    last = [record for record in records(tmp_path / "x.pt") if record.nbytes == page.nbytes][-1]
    archives.check(pickles.load(tmp_path / "x.pt")["a"], "a")
    with flipped(last), raises(ConvertError, "x.pt", "data/0"):
        archives.check(pickles.load(tmp_path / "x.pt")["a"], "a")


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
