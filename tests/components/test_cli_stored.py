"""``ftckpt list`` and ``ftckpt verify``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ftckpt.cli.main import main
from ftckpt.model.snapshot import SnapshotId
from ftckpt.persist.commit import CheckpointName
from ftckpt.persist.files import FileStorage
from ftckpt.persist.retention import pinned, void
from tests.support.errors import lacks
from tests.support.flips import flip
from tests.support.flush_jobs import Job
from tests.support.repository import is_golden
from tests.support.snapshots import LINEAGE


@pytest.fixture
def filled(arena_root: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Storage with iterations 7 and 8 of two nodes."""
    where = tmp_path / "storage"
    where.mkdir()
    job = Job(arena_root, str(where), persist_compress=getattr(request, "param", "none"))
    job.start()
    for slot, iteration in enumerate((7, 8)):
        job.persist(slot, iteration)
    job.close()
    return where


compressed_or_not = pytest.mark.parametrize("filled", ["none", "zstd"], indirect=True)


@compressed_or_not
def test_what_is_there_is_listed_and_good(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    note = ", compressed" if list(filled.glob("iter_0000008/*.zst")) else ""
    names = ("iter_0000008", "iter_0000007")
    assert main(["list", str(filled)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown == [f"{name}: dp4, 4 shards, 1.5 MiB, of job job{note}" for name in names]
    assert main(["verify", str(filled)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown == [*(f"{name}: good, 4 shards, 1.5 MiB" for name in names), "a restart would take iter_0000008"]


def test_programs_read_both_as_json(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", str(filled), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["snapshots"]
    assert [(one["iteration"], one["layout"], one["shards"], one["void"]) for one in listed] == [
        (8, "dp4", 4, False), (7, "dp4", 4, False),
    ]  # fmt: skip
    flip(next(filled.glob("iter_0000008/*.safetensors")), 5000)
    assert main(["verify", str(filled), "--json"]) == 1
    verified = json.loads(capsys.readouterr().out)
    assert [bool(one["problems"]) for one in verified["snapshots"]] == [True, False] and verified[
        "restart"
    ] == "iter_0000007"


@compressed_or_not
@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda file: flip(file, 100_000), ""),
        (lambda file: flip(file, 20), ""),
        (lambda file: file.unlink(), ""),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), ""),
        (lambda file: flip(file.with_name("manifest.json"), 300), "iter_0000008"),
    ],
    ids=["tensor", "header", "missing", "truncated", "manifest"],
)
def test_every_byte_is_verified(damage: object, text: str, filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(next(filled.glob("iter_0000008/*-dp1.*")))  # type: ignore[operator]
    assert main(["verify", str(filled)]) == 1
    out = capsys.readouterr().out
    assert (
        not lacks(out, *text.split())
        and "iter_0000008: bad" in out
        and not lacks(out.splitlines()[-1], "iter_0000007")
    )
    assert main(["verify", str(filled), "--iteration", "7"]) == 0


KINDS: dict[str, dict[str, str]] = {
    "megatron-dist": {
        "iter_0000080/metadata.json": '{"sharded_backend": "torch_dist"}',
        "latest_checkpointed_iteration.txt": "80",
    },
    "megatron-legacy": {"iter_0000080/mp_rank_00/model_optim_rng.pt": "", "latest_checkpointed_iteration.txt": "80"},
    "deepspeed": {"global_step80/mp_rank_00_model_states.pt": "", "latest": "global_step80"},
    "deepspeed-universal": {"global_step80/zero/optimizer_state.pt": "", "latest_universal": "global_step80"},
    "weights": {"model.safetensors": ""},
    "notes": {"notes.txt": ""},
}
"""Files of what others write, as far as it is known by them."""


def make(kind: str, path: Path) -> None:
    for name, text in KINDS[kind].items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)


@pytest.mark.parametrize("command", ["list", "verify", "convert"])
def test_snapshots_are_found_by_one_rule(
    command: str, filled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the place itself, next to exports, and by the folder of one checkpoint."""
    beside = tmp_path / "beside"
    make("megatron-dist", beside)
    shutil.copytree(filled, beside / "ftckpt")
    told = []
    for number, where in enumerate((filled, beside, beside / "ftckpt", filled / "iter_0000007")):
        words = [str(where)] if command != "convert" else [str(where), str(tmp_path / f"out{number}"), "--dry-run"]
        assert main([command, *words]) == 0
        told.append(capsys.readouterr().out)
    newest, other = ("iteration 8", "iteration 7") if command == "convert" else ("iter_0000008", "iter_0000007")
    assert all(newest in text for text in told[:3])
    assert other in told[3] and newest not in told[3]


def test_pins_are_shown(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pin", str(filled), "7"]) == 0
    shown = capsys.readouterr().out
    storage = FileStorage(str(filled))
    void(storage, [SnapshotId(LINEAGE, 8)])
    assert main(["list", str(filled)]) == 0
    is_golden("list", capsys.readouterr().out)
    assert main(["verify", str(filled)]) == 0
    assert not lacks(capsys.readouterr().out.splitlines()[-1], "iter_0000007")
    assert main(["pin", str(filled), "8"]) == 0 and capsys.readouterr().out
    for where in (["7"], []):  # the second time by its folder
        words = [str(filled), *where] if where else [str(filled / "iter_0000007")]
        assert main(["pin", *words, "--remove"]) == 0
        shown += capsys.readouterr().out
    is_golden("pin", shown)
    assert main(["pin", str(filled)]) == 2 and "NAME" in capsys.readouterr().err
    assert main(["pin", str(filled), "9"]) == 2
    assert not lacks(capsys.readouterr().err, "iter_0000009") and pinned(storage) == {CheckpointName(8)}
    storage.put("pins/iter_0000009", b"")
    assert main(["list", str(filled)]) == 0
    assert not lacks(capsys.readouterr().out.splitlines()[-1], "iter_0000009")
