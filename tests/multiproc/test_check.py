"""``ftckpt check``: what it finds, and that it finds what is wrong."""

from __future__ import annotations

import errno
import json
import subprocess
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ftckpt.capture.copier import Flight, HostCopier
from ftckpt.commands import check, check_device, check_queues, device_bench
from ftckpt.commands.check_host import look_at_host
from ftckpt.commands.check_queues import QUEUES, look_with_other_queues, other_setting
from ftckpt.commands.check_thorough import NOT_THOROUGH, look_thoroughly
from ftckpt.commands.device_bench import bench_on
from ftckpt.commands.findings import FAILED, PASSED, SKIPPED, WARNED, Finding, attempt
from ftckpt.commands.main import main
from ftckpt.windows.clock import make_clock
from tests.support.pool import run_ranks

pytestmark = pytest.mark.multiproc


def by_name(found: Any) -> dict[str, Finding]:
    return {one.name: one for one in found}


def test_a_machine_by_itself(arena_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "found.json"
    assert main(["check", "--arena", str(arena_root), "--size", "4MiB", "--json", str(out)]) == 0
    found = {one["name"]: one for one in json.loads(out.read_text())["ranks"]["0"]}
    assert {found[name]["state"] for name in ("arena", "room", "locks", "exact copies", "seal", "parity")} == {PASSED}
    assert found["ranks"]["state"] == SKIPPED and "torchrun" in found["ranks"]["text"]
    assert found["memory rate"]["figures"]["bytes_per_sec"] > 0
    assert all(one["remedy"] for one in found.values() if one["state"] in (WARNED, FAILED))
    text = capsys.readouterr().out
    assert "passed  host: locks: locks hold between processes" in text and " 0 failed" in text
    assert not list(arena_root.iterdir()), "nothing is left"


def test_what_a_node_needs_and_has_not(arena_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--arena", str(arena_root), "--host", "--node-memory", "1000TiB"]) == 1
    out = capsys.readouterr().out
    assert "failed  host: room: " in out and "FAILED host, room: " in out
    assert "1000.0 TiB are needed" in out


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--node-memory", "-1"], "--node-memory: '-1' is not a size with its unit, such as 400GiB"),
        (["--node-memory", "4furlongs"], "is not a size with its unit, such as 400GiB"),
        (["--size", "0"], "--size: 0 is out of range; the least is 1MiB"),
        (["--size", "4"], "--size: '4' is not a size with its unit"),
        (["--only", "host,disk"], "--only host,disk: 'disk' is none of host, device, network"),
        (["--thorough", "-1"], "--thorough -1: name seconds"),
    ],
)
def test_what_is_refused(words: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *words]) == 2
    assert problem in capsys.readouterr().err


def test_sizes_have_units(arena_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["check", "--arena", str(arena_root), "--host"]
    for size, needed in (("3GiB", "3.0 GiB"), ("3GB", "2.8 GiB"), ("512 MiB", "512.0 MiB")):
        main([*words, "--node-memory", size])
        assert f"{needed} are needed" in capsys.readouterr().out


def test_what_is_looked_at(arena_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``--device --thorough`` is the device alone, for as long as ``--thorough`` alone says."""
    told = list[Any]()

    def look(*given: Any) -> Any:
        told.append(given)
        return iter([Finding("device", "rate", PASSED, "")])

    monkeypatch.setattr(check_device, "look_at_device", look)
    found = list[set[str]]()
    monkeypatch.setattr(check, "_show", lambda everything, alone: found.append({one.area for one in everything[0]}))
    for words in (
        ["--device", "--thorough"], ["--only", "device", "--size", "64MiB", "--thorough", "3"],
        ["--only", "host,device"], ["--host", "--network"], ["--only", "host", "--only", "network"], [],
    ):  # fmt: skip
        assert main(["check", "--arena", str(arena_root), *words]) == 0
    assert found == [
        {"device"},
        {"device"},
        {"host", "device"},
        *[{"host", "network"}] * 2,
        {"host", "device", "network"},
    ]
    assert [(size >> 20, thorough.secs) for _, size, thorough, _ in told] == [(256, 120), (64, 3), (256, 0), (256, 0)]


def test_a_place_that_is_none(tmp_path: Path) -> None:
    found = by_name(look_at_host(tmp_path / "none", 0, [{0, 1}]))
    assert found["arena"].state == FAILED and "none does not exist" in found["arena"].text
    assert found["kernel"].state == PASSED, "and what does not lie there is looked at all the same"
    assert not {"room", "memory rate", "locks", "surroundings"} & set(found), "of its parent nothing is said"


@pytest.mark.parametrize("only", ["host", "device"])
def test_a_place_that_is_none_fails_once(tmp_path: Path, capsys: pytest.CaptureFixture[str], only: str) -> None:
    assert main(["check", "--arena", str(tmp_path / "none"), "--only", only]) == 1
    out = capsys.readouterr().out
    assert out.count("does not exist") == 1 and "FAILED host, arena: make it" in out and ", 1 failed," in out


def test_a_result_that_cannot_be_written_is_refused_before_anything_is_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "none" / "found.json"
    assert main(["check", "--json", str(out)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and f"--json: {out} cannot be written: No such file or directory" in captured.err


def test_what_raises_is_a_failure_of_that_one_thing() -> None:
    def fails() -> Finding:
        raise RuntimeError("Xid 79")

    assert attempt("device", "rate", fails).text == "RuntimeError: Xid 79"


def found_of(arena: Path, name: str) -> Finding:
    """Of the device, without what would come behind it."""
    with closing(check_device.look_at_device(arena, 40)) as found:  # type: ignore[type-var]
        return next(one for one in found if one.name == name)


class Hasty(HostCopier):
    """Lets training go on before its bytes are copied."""

    def fence(self, flight: Flight, timeout_secs: float) -> bool:
        return True


class Careless(HostCopier):
    """Leaves out the last chunk."""

    def start(self, tensors: Any, flight: Flight, windows: Any) -> None:
        flight.copies = flight.copies[:-1]
        super().start(tensors, flight, windows)


def test_a_copier_that_tears_or_loses_bytes_is_found(arena_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_bench, "FLIGHT_SECS", 1.0)
    monkeypatch.setattr(device_bench, "make_copier", lambda clock, budget: Hasty(budget))
    assert found_of(arena_root, "late windows").state == FAILED
    monkeypatch.setattr(device_bench, "make_copier", lambda clock, budget: Careless(budget))
    found = found_of(arena_root, "exact copies")
    assert found.state == FAILED and "bytes differ" in found.text


class Impatient(HostCopier):
    """Hurries its copies at the fence, and does not wait for them."""

    def fence(self, flight: Flight, timeout_secs: float) -> bool:
        flight.hurry.set()
        return True


def test_random_orders_find_what_tears_and_say_how_to_do_it_again(
    arena_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, told = make_clock(torch.device("cpu")), list[str]()
    with bench_on(arena_root, clock, 4 << 20) as bench:
        found = look_thoroughly(bench, 1.0, seed=7, tell=told.append)
    assert found.state == PASSED and "seed 7" in found.text and found.figures["rounds"] >= 1, found
    monkeypatch.setattr(device_bench, "make_copier", lambda clock, budget: Impatient(budget))
    with bench_on(arena_root, clock, 4 << 20) as bench:
        found = look_thoroughly(bench, 60.0, seed=7, tell=told.append)
    assert found.state == FAILED and "seed 7" in found.text and found.remedy


def test_a_device_is_looked_at_with_both_settings(
    arena_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_device, "is_here", lambda: True)
    monkeypatch.setattr(check_device, "look_at_device", lambda *_: iter([Finding("device", "rate", PASSED, "")]))
    out = tmp_path / "found.json"
    words = ["check", "--arena", str(arena_root), "--size", "4MiB", "--only", "device", "--json", str(out)]
    assert main([*words, "--one-setting"]) == 0
    assert [one["name"] for one in json.loads(out.read_text())["ranks"]["0"]] == ["rate"]
    assert main(words) == 0
    found = {one["name"]: one["state"] for one in json.loads(out.read_text())["ranks"]["0"]}
    assert found["rate"] == found[f"exact copies ({QUEUES}=1)"] == PASSED and f"device ({QUEUES}=1)" not in found


def test_the_other_setting_is_told_and_what_fails_there(arena_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert other_setting({"RANK": "3", "LOCAL_RANK": "1"}) == (f"{QUEUES}=1", {"LOCAL_RANK": "1", QUEUES: "1"})
    assert other_setting({QUEUES: "8"})[1] == {QUEUES: "1"}, "with 1 and without are those that matter"
    assert other_setting({QUEUES: "1", "HOME": "/"}) == (f"without {QUEUES}", {"HOME": "/"})
    monkeypatch.setattr(check_queues, "_LONGEST_SECS", 0.01)
    (late,) = look_with_other_queues(arena_root, 4 << 20, NOT_THOROUGH)
    assert late.state == FAILED and f"{QUEUES}=1" in late.name and "timed out" in late.text
    monkeypatch.undo()
    (refused,) = look_with_other_queues(arena_root, 0, NOT_THOROUGH)
    assert refused.state == FAILED and "--size: 0B is out of range" in refused.text and refused.remedy


def of_another_process(monkeypatch: pytest.MonkeyPatch, stderr: str) -> list[str]:
    """Instead of another process that checks: it ends with this text. Returns what happens, in order."""
    told = list[str]()

    def run(*_: Any, **__: Any) -> subprocess.CompletedProcess[str]:
        told.append("begun")
        return subprocess.CompletedProcess([], 1, "", stderr)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: told.append("freed"))
    return told


def test_another_process_finds_the_devices_memory_free(arena_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = of_another_process(monkeypatch, "RuntimeError: Xid 79")
    (found,) = look_with_other_queues(arena_root, 4 << 20, NOT_THOROUGH)
    assert found.state == FAILED and "Xid 79" in found.text
    assert told == ["freed", "begun"]


BUSY = "CUDA error: CUDA-capable device(s) is/are busy or unavailable"


@pytest.mark.parametrize("how", ["ended", "found"])
def test_a_device_of_one_process_alone_is_no_failure(
    arena_root: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    of_another_process(monkeypatch, f"Traceback:\nRuntimeError: {BUSY}\nCompile with TORCH_USE_CUDA_DSA\n")
    if how == "found":
        rows = [Finding("device", "device", FAILED, BUSY)]
        monkeypatch.setattr(check_queues, "_found_by", lambda *_: rows)
    (found,) = look_with_other_queues(arena_root, 4 << 20, NOT_THOROUGH)
    assert found.state == SKIPPED and "--only device --one-setting" in found.text and f"{QUEUES}=1" in found.text


def test_a_device_that_another_process_cannot_use_is_a_failure(
    arena_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [Finding("device", "device", FAILED, "no context")]
    monkeypatch.setattr(check_queues, "_found_by", lambda *_: rows)
    (found,) = look_with_other_queues(arena_root, 4 << 20, NOT_THOROUGH)
    assert found.state == FAILED and found.text == "no context"


def fill_up(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_no_room_for_copies_is_one_failure_and_others_are_looked_at(
    arena_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_bench.os, "posix_fallocate", fill_up)
    out = tmp_path / "found.json"
    words = ["check", "--arena", str(arena_root), "--size", "4MiB", "--json", str(out)]
    assert main([*words, "--only", "device", "--only", "network"]) == 1
    found = {one["name"]: one for one in json.loads(out.read_text())["ranks"]["0"]}
    assert found.keys() == {"device", "copies", "ranks"}
    assert found["copies"]["state"] == FAILED and "No space left" in found["copies"]["text"]
    assert "--size" in found["copies"]["remedy"] and "/dev/shm" in found["copies"]["remedy"]


def test_a_device_that_cannot_be_used_is_one_failure(arena_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_device: Any) -> None:
        raise RuntimeError(BUSY)

    monkeypatch.setattr(check_device, "is_here", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", refuse)
    (found,) = check_device.look_at_device(arena_root, 4)
    assert found.state == FAILED and BUSY in found.text


def look_in(rank: int, _world_size: int, arena: Path) -> tuple[dict[str, str], float, float]:
    """What this rank finds, of which the second has no room; when it has found the last, and when it goes on."""
    check_device.is_here = lambda: False  # whatever stands in for one here
    if rank == 1:
        device_bench.os.posix_fallocate = fill_up
    found, last = dict[str, str](), 0.0
    for one in check_device.look_at_device(arena, 4, ranks=dist.group.WORLD):
        found[one.name], last = f"{one.state}: {one.text}", time.monotonic()
    return found, last, time.monotonic()


def test_a_rank_without_room_leaves_no_other_waiting(arena_root: Path) -> None:
    """Nor does it go on to where it would wait for them: they have more to look at."""
    (first, last, _), (second, _, ended) = (result.value for result in run_ranks(look_in, 2, arena_root))
    assert second.keys() == {"device", "copies"} and second["copies"].startswith(FAILED)
    assert first["collectives beside copies"] == f"{SKIPPED}: there is a rank without copies"
    assert first["exact copies"].startswith(PASSED) and "compute beside copies" in first
    assert ended >= last
