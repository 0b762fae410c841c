"""Failures that a job really has: each is counted once, by its kind, and all ranks expect the same of it."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ftckpt.model.tiers import JOB, NODE, PROCESS
from ftckpt.persist.failures import last_attempt
from ftckpt.persist.storage import open_storage
from ftckpt.store import ends
from ftckpt.store.directory import clean_job
from tests.support import jobs, plain
from tests.support.pool import run_ranks
from tests.support.waiting import meet, until

pytestmark = [pytest.mark.multiproc, pytest.mark.faults]

NODES = ["n0", "n1"]
HOW = re.compile(r"\) (was ended by SIGKILL|ended without a word), in ")
"""Who started a rank may take what is left of it before the SMP sees it."""
GIVEN = {PROCESS: 36.0, NODE: 360.0, JOB: 3600.0}


@pytest.fixture
def training(settings: dict[str, Any], arena_root: Path, tmp_path: Path) -> Iterator[dict[str, Any]]:
    (tmp_path / "storage").mkdir()
    settings |= {
        "protect": "peer", "chunk_mib": 0.0625, "objects_mib": 1, "network_gbps": "0",
        "persist": str(tmp_path / "storage"), "persist_interval": 2, "persist_keep": 1,
        "mtbf": "process=0.01h,node=0.1h,job=1h",
    }  # fmt: skip
    yield settings
    clean_job(arena_root, "test")


def train(rank: int, world_size: int, settings: dict[str, Any], what: str) -> None:
    """Until each rank knows of a new snapshot that is ``what`` (whole, protected, persisted), when all die; with
    ``kept`` or ``done`` they train nothing, and end well."""
    checkpointer, state = plain.make(rank, world_size, settings, NODES)
    start = number = checkpointer.restore() or 0
    if what in ("kept", "done"):
        checkpointer.close(remove=what == "done")
        return
    words = Path(settings["events"])
    last = words / "last"
    while not last.exists() or number < int(last.read_text()):
        number += 1
        assert number < start + 5000
        plain.iterate(checkpointer, state, number)
        time.sleep(0.01)  # for the SMP
        newest = getattr(checkpointer, what)
        if newest is not None and newest.iteration > start:
            (words / f"done-{rank}").touch()
        if rank == 0 and not last.exists() and len(list(words.glob("done-*"))) == world_size:
            (words / "next").write_text(f"{number + 5}")  # no rank is as far as that
            (words / "next").rename(last)
    meet(words / "end", world_size)
    plain.die()


def attempt(settings: dict[str, Any], what: str) -> dict[str, Any]:
    """What all ranks of one more attempt have said of failures before it."""
    shutil.rmtree(settings["events"], ignore_errors=True)
    dies = what not in ("kept", "done")
    run_ranks(train, 2, settings, what, expect_failures=dies)
    if dies:  # SMPs look now and then
        until(lambda: all(ends.read(node) for node in Path(settings["arena"], "ftckpt-test").iterdir()))
    told = jobs.events(settings, "failures")
    assert {event["rank"] for event in told} == {0, 1}
    said = [{name: event[name] for name in ("last", "attempt", "seen", "secs", "mtbf_secs")} for event in told]
    assert said[0] == said[1], "all ranks know the same"
    assert told[0]["given_secs"] == GIVEN
    return said[0]


def test_each_failure_counts_once_by_its_kind(training: dict[str, Any], arena_root: Path) -> None:
    job_dir, seen, secs = arena_root / "ftckpt-test", {PROCESS: 0, NODE: 0, JOB: 0}, 0.0

    def follows(kind: str, what: str) -> None:
        nonlocal secs
        told = attempt(training, what)
        if kind:
            seen[kind] += 1
        assert (told["last"], told["seen"]) == (kind, seen), told
        assert told["secs"][JOB] >= secs
        secs = told["secs"][JOB]
        for one, num in seen.items():
            expected = (GIVEN[one] + told["secs"][one]) / (1 + num)
            assert told["mtbf_secs"][one] == pytest.approx(expected)

    first = attempt(training, "protected")
    assert first == {"last": "", "attempt": 1, "seen": seen, "secs": dict.fromkeys(seen, 0.0), "mtbf_secs": GIVEN}
    follows(PROCESS, "protected")
    assert secs > 0, "the first has trained"
    said = jobs.events(training, "failures")[0]["ends"]
    assert sorted(text.partition(" (pid")[0] for text in said) == ["node n0: rank 0", "node n1: rank 1"]
    assert all(HOW.search(text) for text in said), said
    shutil.rmtree(job_dir / "n1")
    follows(NODE, "persisted")
    assert jobs.events(training, "restored")[0]["source"] == "peer_parity"
    said = jobs.events(training, "failures")[0]["ends"]
    assert said[0] == "nothing is left in the memory of node(s) n1" and len(said) == 2, said
    clean_job(arena_root, "test")
    follows(JOB, "kept")
    assert jobs.events(training, "restored")[0]["source"] == "storage"
    follows("", "done")
    assert not job_dir.exists(), "a job that is done leaves nothing in memory"
    last = last_attempt(open_storage(training["persist"]), "test")
    assert last is not None and last.record.seen == seen and last.record.ended, "and on storage that it is"
