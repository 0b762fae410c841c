"""Flipped bits in what DeepSpeed and Megatron themselves have saved: none is converted."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import test_convert_deepspeed as deepspeed_jobs
import test_convert_megatron as megatron_jobs

from ftckpt.cli.main import main
from ftckpt.universal.deepspeed.reader import DeepSpeedReader
from ftckpt.universal.deepspeed.universal_reader import DeepSpeedUniversalReader
from ftckpt.universal.foreign import archives
from ftckpt.universal.language.spec import Spec
from ftckpt.universal.megatron.dist_reader import MegatronDistReader
from ftckpt.universal.megatron.legacy_reader import MegatronLegacyReader
from tests.support.flips import Record, flipped, noticed, of_distributed, records
from tests.support.pool import run_ranks
from tests.support.tiers import by_default

pytestmark = pytest.mark.multiproc

NAMED = re.compile(r"\.(pt|distcp): ((\w+/)?\w[\w.]*|its tensor) is damaged")
"""File and tensor: under its own name where it is large, and compared when it is read."""
_MOST = 6
"""Records of one file that are tried, the largest among them."""


def some(found: Sequence[Record]) -> list[Record]:
    by_size = sorted(found, key=lambda record: -record.nbytes)
    return [*by_size[: _MOST // 2], *by_size[_MOST // 2 :: max(1, 2 * len(by_size) // _MOST)]]


def of_files(path: Path, pattern: str = "**/*.pt") -> list[Record]:
    files = sorted(path.glob(pattern))
    assert files
    return [record for file in files for record in some(records(file))]


@pytest.fixture(autouse=True)
def _models_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but steps and the like is compared when it is read, as in a model of a usual size."""
    monkeypatch.setattr(archives, "SMALL_BYTES", 64)


@pytest.mark.parametrize("name", by_default(["zero1-three", "zero3-three", "pp2-dp2-tied", "fp32"], ["zero1-three"]))
def test_checkpoints_of_deepspeed(name: str) -> None:
    pytest.importorskip("deepspeed")
    path = deepspeed_jobs.saved(name).path
    every = of_files(path)
    said = noticed(lambda: DeepSpeedReader(path), every)
    assert {record.file for record in said} == {record.file for record in every}, "each file is read"
    assert all(record in said for record in every if not record.key.startswith("data/"))
    of_tensors = [text for record, text in said.items() if record.key.startswith("data/")]
    assert of_tensors and all(NAMED.search(text) for text in of_tensors)


def test_a_universal_checkpoint_of_deepspeed() -> None:
    pytest.importorskip("deepspeed")
    _, path = deepspeed_jobs.by_deepspeed("zero1-three")
    files = [file for role in ("fp32", "exp_avg", "step") for file in sorted(path.glob(f"zero/*/{role}.pt"))[::9]]
    every = [record for file in files for record in some(records(file))]
    said = noticed(lambda: DeepSpeedUniversalReader(path), every)
    assert len(files) > 4 and {record.file for record in said} == set(files)
    of_tensors = [text for record, text in said.items() if record.key.startswith("data/")]
    assert of_tensors and all(NAMED.search(text) for text in of_tensors)


@pytest.mark.slow
def test_a_torch_dist_checkpoint_of_megatron(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save = tmp_path / "save"
    save.mkdir()
    argv = ["--ep", "2", "--num-experts", "4", "--swiglu", "--router-bias"]
    run_ranks(megatron_jobs.saved, 2, argv, str(save), "fully_reshardable")
    every = [record for record in of_distributed(save) if record.key == "data/0"]
    structures = [record for record in of_distributed(save) if record.key == "data.pkl"]
    chosen = [found[:: max(1, len(found) // 8)] for found in (every, structures)]
    tried = [*chosen[0], *chosen[1], *some(records(save / "common.pt"))]
    said = noticed(lambda: MegatronDistReader(save), tried)
    assert {record.file.suffix for record in said} == {".distcp", ".pt"}
    tensors = [text for record, text in said.items() if record.key == "data/0" and record.file.suffix == ".distcp"]
    assert len(tensors) > 4 and all(re.search(r"\.distcp: [\w./]+ is damaged", text) for text in tensors)
    largest = max(every, key=lambda record: record.nbytes)
    with flipped(largest):
        assert main(["convert", str(save), str(tmp_path / "out")]) == 2
        assert f"{largest.file}: " in capsys.readouterr().err and not (tmp_path / "out").exists()


def verified(capsys: pytest.CaptureFixture[str], *words: object) -> None:
    status = main(["convert", *map(str, words), "--verify"])
    told = capsys.readouterr()
    assert status == 0 and "and all objects that both have" in told.out, told.err


@pytest.mark.parametrize("name", by_default(["zero1-fp16", "zero3-three"], []))
def test_whole_checkpoints_of_deepspeed_are_verified(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("deepspeed")
    path = deepspeed_jobs.saved(name).path
    verified(capsys, path, tmp_path / "universal")
    verified(capsys, path, tmp_path / "direct", "--to", "deepspeed-universal")
    verified(capsys, tmp_path / "universal", tmp_path / "back", "--to", "deepspeed-universal")
    verified(capsys, tmp_path / "back", tmp_path / "again", "--to", "deepspeed-universal")


@pytest.mark.parametrize(
    "name", by_default(["gpt", "gpt-pp2-distributed-optimizer"], ["gpt-pp2-distributed-optimizer"])
)
def test_torch_checkpoints_of_megatron(name: str, tmp_path: Path) -> None:
    world_size, argv, spec = megatron_jobs.LEGACY[name]
    run_ranks(megatron_jobs.saved_legacy, world_size, argv, str(tmp_path))
    every = of_files(tmp_path)
    said = noticed(lambda: MegatronLegacyReader(tmp_path, Spec.load(spec)), every)
    assert {record.file for record in said} == {record.file for record in every}
    of_tensors = [text for record, text in said.items() if record.key.startswith("data/")]
    assert of_tensors and all(NAMED.search(text) for text in of_tensors)
