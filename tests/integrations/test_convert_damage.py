"""Flipped bits in what DeepSpeed and Megatron themselves have saved: none is converted."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import test_convert_deepspeed as deepspeed_jobs
import test_convert_megatron as megatron_jobs

from ftckpt.universal.deepspeed.reader import DeepSpeedReader
from ftckpt.universal.deepspeed.universal_reader import DeepSpeedUniversalReader
from ftckpt.universal.foreign import archives
from ftckpt.universal.language.spec import Spec
from ftckpt.universal.megatron.legacy_reader import MegatronLegacyReader
from tests.support.flips import Record, noticed, records
from tests.support.pool import run_ranks
from tests.support.tiers import by_default

pytestmark = pytest.mark.multiproc

NAMED = re.compile(r"\.(pt|distcp): (\w+/)?\w[\w.]* is damaged")
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


def named(said: Mapping[Record, str]) -> list[str]:
    """The errors about large tensors, which name them."""
    return [
        text
        for record, text in said.items()
        if record.key.startswith("data/") and record.nbytes > archives.SMALL_BYTES
    ]


@pytest.fixture(autouse=True)
def _models_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but steps and the like is compared when it is read, as in a model of a usual size."""
    monkeypatch.setattr(archives, "SMALL_BYTES", 64)


@pytest.mark.parametrize(
    "name", by_default(["zero1-freeze", "zero3-three", "pp2-dp2-tied", "fp32"], ["zero1-freeze"])
)
def test_checkpoints_of_deepspeed(name: str) -> None:
    pytest.importorskip("deepspeed")
    path = deepspeed_jobs.saved(name).path
    every = of_files(path)
    said = noticed(lambda: DeepSpeedReader(path), every)
    assert {record.file for record in said} == {record.file for record in every}, "each file is read"
    assert all(record in said for record in every if not record.key.startswith("data/"))
    of_tensors = named(said)
    assert of_tensors and all(NAMED.search(text) for text in of_tensors)


def test_a_universal_checkpoint_of_deepspeed() -> None:
    pytest.importorskip("deepspeed")
    _, path = deepspeed_jobs.by_deepspeed("zero1-freeze")
    files = [file for role in ("fp32", "exp_avg", "step") for file in sorted(path.glob(f"zero/*/{role}.pt"))[::9]]
    every = [record for file in files for record in some(records(file))]
    said = noticed(lambda: DeepSpeedUniversalReader(path), every)
    assert len(files) > 4 and {record.file for record in said} == set(files)
    of_tensors = named(said)
    assert of_tensors and all(NAMED.search(text) for text in of_tensors)


@pytest.mark.parametrize(
    "name", by_default(["gpt", "gpt-pp2-distributed-optimizer"], ["gpt-pp2-distributed-optimizer"])
)
def test_torch_checkpoints_of_megatron(name: str, tmp_path: Path) -> None:
    world_size, argv, spec = megatron_jobs.LEGACY[name]
    run_ranks(megatron_jobs.saved_legacy, world_size, argv, str(tmp_path))
    every = of_files(tmp_path)
    said = noticed(lambda: MegatronLegacyReader(tmp_path, Spec.load(spec)), every)
    assert {record.file for record in said} == {record.file for record in every}
    of_tensors = named(said)
    assert of_tensors and all(NAMED.search(text) for text in of_tensors)
