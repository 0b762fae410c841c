"""Snapshots on storage made into what others load, by processes of SMPs: real tasks, real conversions, kills."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from ftckpt.cli.main import main
from ftckpt.memory.directory import clean_job
from ftckpt.parity.modes import Modes
from ftckpt.persist.exports import prepare
from ftckpt.persist.files import FileStorage
from ftckpt.persist.paths import Place
from ftckpt.smp.footprint import NICE
from ftckpt.universal.formats import ReadOptions, open_reader
from ftckpt.universal.universal_format import UniversalReader
from tests.promises.complete.test_persist import NODES, restored, train_then_die, train_to_the_end, what_was
from tests.support import jobs
from tests.support.event_logs import read_events
from tests.support.flush_jobs import Job
from tests.support.pool import RankFailure, run_ranks
from tests.support.processes import command_line, running
from tests.support.smp_nodes import Node, SmpProcess, describe
from tests.support.storages import committed
from tests.support.waiting import until

pytestmark = [pytest.mark.multiproc, pytest.mark.faults]

SECS = 120.0
"""For a process that loads torch at a lower priority than training."""


@pytest.fixture
def where(tmp_path: Path) -> Path:
    prepare(Place.of(str(tmp_path), "universal"))
    return tmp_path


@pytest.fixture
def job(arena_root: Path, where: Path) -> Iterator[Job]:
    made = Job(arena_root, str(where), persist_keep=1, persist_format="universal")
    yield made
    made.close()


def settled(job: Job, iteration: int) -> list[dict[str, Any]]:
    """Until both nodes are done; how the export ended."""
    until(lambda: [state.name for state in job.states(iteration)] == ["DONE"] * 2, lambda: str(job.told()), secs=SECS)
    return job.smps[0].events.of("exported") + job.smps[0].events.of("not_exported")


def converters(where: Path) -> list[int]:
    """Processes that convert there."""
    lines = {pid: command_line(pid).split() for pid in running()}
    there = [pid for pid, words in lines.items() if any(word.startswith(str(where)) for word in words)]
    return [pid for pid in there if "convert" in lines[pid]]


def converter(job: Job, where: Path) -> int:
    """The process that converts there, once there is one."""
    until(lambda: converters(where), lambda: f"a converter: {job.told()}", secs=SECS)
    return converters(where)[0]


def names(where: Path) -> set[str]:
    return {path.name for path in where.iterdir()}


def test_snapshots_come_to_storage_as_others_load_them(job: Job, where: Path) -> None:
    job.start()
    for slot, iteration in enumerate((7, 8)):
        job.snapshot(slot, iteration)
        job.flush(iteration)
        assert [one.get("reason") for one in settled(job, iteration)] == [None] * (slot + 1)
        with closing(UniversalReader(where / f"iter_{iteration:07d}")) as reader:
            assert reader.catalog.iteration == iteration
            keys = {fragment.key: index for index, fragment in enumerate(reader.catalog.fragments)}
            own = job.nodes[0].arenas[0]
            begin = own.image.offsets[0]
            data = reader.read(keys["own0"])
            with own.slot(slot) as view:
                assert data.tobytes() == bytes(view[begin : begin + len(data)])
    assert committed(FileStorage(str(where / "ftckpt"))) == [8]
    assert names(where) == {"iter_0000008", "latest", "ftckpt"}, "it goes with its snapshot"
    assert (where / "latest").read_text() == "iter_0000008\n"
    assert names(where / "ftckpt") == {"iter_0000008", "latest", "made", "owner.json"}
    assert not job.smps[1].events.of("exported"), "one node makes it"


def test_it_is_as_open_as_the_directory_that_it_comes_to(job: Job, where: Path) -> None:
    """Whatever an SMP writes otherwise."""
    where.chmod(0o750)
    before = os.umask(0o077)
    try:
        job.start()
        job.snapshot(0, 7)
        job.flush(7)
        settled(job, 7)
    finally:
        os.umask(before)
    folder = where / "iter_0000007"
    assert folder.stat().st_mode & 0o777 == 0o750
    assert {path.stat().st_mode & 0o777 for path in (where / "latest", *folder.iterdir())} == {0o640}


def test_what_cannot_be_made_is_told_and_the_snapshot_counts(job: Job, where: Path) -> None:
    (where / "iter_0000007").mkdir()
    job.start()
    job.snapshot(0, 7)
    job.flush(7)
    (told,) = settled(job, 7)
    assert str(where / "iter_0000007") in told["reason"]
    assert committed(FileStorage(str(where / "ftckpt"))) == [7]
    assert names(where) == {"iter_0000007", "ftckpt"}
    assert names(where / "ftckpt") == {"iter_0000007", "latest", "owner.json"}


def test_a_converter_that_is_killed_or_late_leaves_nothing(arena_root: Path, where: Path) -> None:
    job = Job(arena_root, str(where), persist_format="universal", flush_secs=1.0)
    with closing(job):
        job.start()
        job.snapshot(0, 7)
        job.flush(7)
        assert "not done in time" in settled(job, 7)[0]["reason"]
        assert not converters(where)
        job.settings["flush_secs"] = SECS
        for smp in job.smps:
            smp.pause()
            job.configure(smp)
        job.snapshot(1, 8)
        job.flush(8)  # before they go on: what they are told anew is begun anew where it is still wanted
        job.start()
        os.kill(converter(job, where), signal.SIGKILL)
        assert "ended with status -9" in settled(job, 8)[1]["reason"]
        assert names(where) == {"ftckpt"}
        assert names(where / "ftckpt") == {"iter_0000007", "iter_0000008", "latest", "owner.json"}


def test_what_is_not_wanted_any_more_ends(job: Job, where: Path) -> None:
    job.start()
    job.snapshot(0, 7)
    job.flush(7)
    # The class "idle" of ioprio_get(2), which the C library has no name for.
    libc, number = ctypes.CDLL(None), {"x86_64": 252, "aarch64": 31}[os.uname().machine]
    pid = converter(job, where)
    until(lambda: libc.syscall(number, 1, pid) >> 13 == 3, secs=SECS)
    # The disks' class it has from the thread that starts it, this one only once it runs.
    until(lambda: os.getpriority(os.PRIO_PROCESS, pid) == min(19, os.nice(0) + NICE), secs=SECS)
    job.flush(-1)
    until(lambda: not converters(where) and names(where / "ftckpt") == {"iter_0000007", "latest", "owner.json"})
    until(lambda: [one["iteration"] for one in job.smps[0].events.of("not_exported")] == [7])


def test_an_smp_that_is_killed_leaves_no_converter_and_the_next_one_begins_anew(
    arena_root: Path, where: Path
) -> None:
    node = Node(arena_root, "a", (0,), 1)
    with closing(node):
        node.snapshot(0, 7)
        description = describe(node, [node], Modes(), {}, persist=str(where), persist_format="universal")
        smp = SmpProcess(node)
        smp.configure(description)
        node.flush(7)
        until(lambda: converters(where), secs=SECS)
        smp.kill()
        until(lambda: not converters(where))
        (left,) = (where / "ftckpt" / "converting").iterdir()
        assert not (left / "made").exists(), "it did not come to its end"
        (left / "of the dead").touch()
        smp = SmpProcess(node)
        try:
            smp.configure(description)
            until((where / "latest").exists, secs=SECS)
            until(lambda: names(where / "ftckpt") == {"iter_0000007", "latest", "made"})
        finally:
            smp.kill()
        UniversalReader(where / "iter_0000007").close()


@pytest.fixture
def exporting(settings: dict[str, Any], arena_root: Path, tmp_path: Path) -> Iterator[dict[str, Any]]:
    (tmp_path / "storage").mkdir()
    settings |= {
        "protect": "none", "chunk_size": "64KiB", "objects_size": "1MiB", "on_error": "raise",
        "persist": str(tmp_path / "storage"), "persist_interval": 1000, "persist_format": "universal",
    }  # fmt: skip
    yield settings
    clean_job(arena_root, "test")


def weights(path: Path) -> list[float]:
    with closing(open_reader([path], ReadOptions())) as reader:
        keys = {fragment.key: index for index, fragment in enumerate(reader.catalog.fragments)}
        return torch.from_numpy(reader.read(keys["row"]).copy()).view(torch.float32).unique().tolist()


def test_a_job_that_ends_waits_for_it_and_goes_on_from_its_snapshot(exporting: dict[str, Any]) -> None:
    run_ranks(train_to_the_end, 4, exporting, 6, timeout_secs=SECS)
    assert not list(Path(exporting["arena"]).iterdir()), "memory is empty"
    where = Path(exporting["persist"])
    assert names(where) == {"iter_0000006", "latest", "ftckpt"} and weights(where / "iter_0000006") == [6.0]
    assert [result.value for result in run_ranks(restored, 4, exporting)] == [what_was(6)] * 4


@pytest.mark.slow
def test_what_is_left_when_an_allocation_ends_is_saved_as_others_load_it(
    exporting: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    # As many slots as iterations: none is left out while others go to storage and are protected.
    exporting |= {"persist_format": "snapshot", "slots": 8}
    run_ranks(train_then_die, 4, exporting, 6, expect_failures=True)
    command = ["save", "test", str(elsewhere), "--to", "universal", "--arena", exporting["arena"]]
    assert main([*command[:2], *command[3:]]) == 2 and "--to: name STORAGE" in capsys.readouterr().err
    assert main([*command[:2], "s3://bucket/a", *command[3:]]) == 2
    assert "universal is written into directories only" in capsys.readouterr().err
    assert main([*command, "--timeout", str(SECS)]) == 0
    assert capsys.readouterr().out.count(f"iteration 6 is at {elsewhere},") == len(set(NODES))
    assert names(elsewhere) == {"iter_0000006", "latest", "ftckpt"} and weights(elsewhere / "iter_0000006") == [6.0]
    assert main(["verify", str(elsewhere)]) == 0 and "iter_0000006: good" in capsys.readouterr().out
    another = elsewhere / "ftckpt" / "iter_0000009"
    shutil.copytree(another.with_name("iter_0000006"), another)
    assert main([*command, "--timeout", str(SECS)]) == 0
    assert "--ftckpt-rollback-before 9" in capsys.readouterr().out
    (tmp_path / "taken" / "iter_0000006").mkdir(parents=True)
    command[2] = str(tmp_path / "taken")
    assert main([*command, "--timeout", str(SECS)]) == 2
    assert "taken/ftckpt, but it was not exported as universal" in capsys.readouterr().err


def test_a_place_that_holds_snapshots_themselves_is_refused(exporting: dict[str, Any]) -> None:
    run_ranks(train_to_the_end, 4, {**exporting, "persist_format": "snapshot"}, 3)
    with pytest.raises(RankFailure, match=r"persist.format: .*snapshots"):
        run_ranks(restored, 4, exporting)
    assert not read_events(Path(exporting["events"]), "exported", of="smp-*")
    assert jobs.events(exporting, "persisted")
