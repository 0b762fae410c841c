"""``ftckpt check``: what it finds, and that it finds what is wrong."""

from __future__ import annotations

import errno
import json
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from ftckpt.capture.chunks import ChunkCopy
from ftckpt.capture.copier import Flight, HostCopier
from ftckpt.cli import check as whole_check
from ftckpt.cli import check_device
from ftckpt.cli.findings import FAILED, PASSED, SKIPPED, WARNED, CheckResult
from ftckpt.cli.main import main
from tests.support.repository import is_golden

pytestmark = pytest.mark.multiproc


def found_by(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """What the command has printed as JSON."""
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["ranks"]["0"]
    return found


def test_a_machine_by_itself(arena_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["check", "--arena", str(arena_root), "--size", "4MiB"]
    assert main([*words, "--json"]) == 0
    found = {one["name"]: one for one in found_by(capsys)}
    assert {found[name]["state"] for name in ("arena", "room", "exact copies")} == {PASSED}
    assert found["ranks"]["state"] == SKIPPED and "torchrun" in found["ranks"]["text"]
    assert all(one["remedy"] for one in found.values() if one["state"] in (WARNED, FAILED))
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "passed  host: arena: " in text and " 0 failed" in text
    assert not list(arena_root.iterdir()), "nothing is left"


def test_what_a_node_needs_and_has_not(arena_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--arena", str(arena_root), "--host", "--node-memory", "1000TiB"]) == 1
    out = capsys.readouterr().out
    assert "failed  host: room: " in out and "FAILED host, room: " in out
    assert "1000.0 TiB are needed" in out


FOUND = [
    CheckResult("host", "room", PASSED, "512.0 GiB are free"),
    CheckResult("host", "cores", WARNED, "8 cores for 8 rank(s) and the SMP", "give ranks more cores"),
    CheckResult("device", "rate", FAILED, "0.1 GB/s", "check that the rank's cores are near the device"),
    CheckResult("network", "ranks", SKIPPED, "one process"),
]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--node-memory", "-1"], "--node-memory: '-1' is not a size with its unit, such as 400GiB"),
        (["--node-memory", "4furlongs"], "is not a size with its unit, such as 400GiB"),
        (["--size", "0"], "--size: 0 is out of range; the least is 1MiB"),
        (["--size", "4"], "--size: '4' is not a size with its unit"),
    ],
)
def test_what_is_refused(words: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *words]) == 2
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize("area", ["--host", "--device"])
def test_a_place_that_is_none_fails_once(tmp_path: Path, capsys: pytest.CaptureFixture[str], area: str) -> None:
    assert main(["check", "--arena", str(tmp_path / "none"), area]) == 1
    out = capsys.readouterr().out
    assert out.count("does not exist") == 1 and "FAILED host, arena: make it" in out and ", 1 failed," in out


def found_of(arena: Path, name: str) -> CheckResult:
    """The checks of the device, without those that follow."""
    with closing(check_device.device_checks(arena, 40)) as found:  # type: ignore[type-var]
        return next(one for one in found if one.name == name)


class Hasty(HostCopier):
    """Releases training before its bytes are copied."""

    def fence(self, flight: Flight, timeout_secs: float) -> bool:
        threading.Timer(0.3, flight.hurry.set).start()
        return True


class Careless(HostCopier):
    """Leaves out the last chunk."""

    def start(self, tensors: Any, flight: Flight, windows: Any) -> None:
        # Nothing of it, but a turn for it: what it is in is waited for.
        flight.copies = [*flight.copies[:-1], ChunkCopy(flight.copies[-1].chunk, ())]
        super().start(tensors, flight, windows)


def test_a_copier_that_tears_or_loses_bytes_is_found(arena_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for copier in (Hasty, Careless):
        monkeypatch.setattr(check_device, "make_copier", lambda clock, copier=copier: copier())
        found = found_of(arena_root, "exact copies")
        assert found.state == FAILED and "bytes of 5 snapshots" in found.text, copier


def fill_up(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_no_room_for_copies_is_one_failure_and_others_are_looked_at(
    arena_root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_device.os, "posix_fallocate", fill_up)
    words = ["check", "--arena", str(arena_root), "--size", "4MiB", "--json"]
    assert main([*words, "--device", "--network"]) == 1
    found = {one["name"]: one for one in found_by(capsys)}
    assert found.keys() == {"device", "copies", "ranks"}
    assert found["copies"]["state"] == FAILED and "No space left" in found["copies"]["text"]
    assert "--size" in found["copies"]["remedy"] and "/dev/shm" in found["copies"]["remedy"]


def test_a_device_that_cannot_be_used_is_one_failure(arena_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_device: Any) -> None:
        raise RuntimeError("CUDA-capable device(s) is/are busy or unavailable")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", refuse)
    (found,) = check_device.device_checks(arena_root, 4)
    assert found.state == FAILED and "busy or unavailable" in found.text


def test_results_then_remedies_then_their_numbers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_check, "_checks", lambda *_: iter(FOUND))
    assert main(["check"]) == 1
    is_golden("check", capsys.readouterr().out)
