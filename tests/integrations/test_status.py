"""The report of ``ftckpt status``: nodes here by their memory, others by their SMPs; the snapshot of a restart."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from ftckpt.cli import status as status_of
from ftckpt.cli.main import main
from ftckpt.cli.status import in_lines, job_status
from ftckpt.config import Config
from ftckpt.memory.directory import end_smp
from ftckpt.memory.heartbeat import Heartbeat
from ftckpt.memory.locks import holder_of
from ftckpt.memory.parity_file import list_parity
from ftckpt.parity.groups import mirrors
from ftckpt.parity.modes import Modes
from ftckpt.smp.client import SmpClient, find_or_start
from tests.support.protected import JOB, Job, build, file_groups, holdings
from tests.support.repository import is_golden
from tests.support.smps import SECRET
from tests.support.waiting import until

pytestmark = pytest.mark.multiproc


@pytest.fixture
def job(arena_root: Path) -> Job:
    """Three nodes of two ranks; the snapshot of iteration 5 is protected, that of iteration 6 is not."""
    made = Job(arena_root, ("a", "a", "b", "b", "c", "c"), Modes(peer=True))
    build(made, (4, 5, 6), (4, 5))
    return made


def status(root: Path) -> dict[str, Any]:
    return job_status(root, JOB, 5.0)


def test_a_watch_outlives_the_job_and_ends_without_a_trace(
    job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Most of the time it asks nodes: whoever interrupts it does so there."""
    looks = iter([FileNotFoundError("ftckpt-peers/a: is gone"), KeyboardInterrupt()])

    def ask(*_: object) -> dict[str, Any]:
        raise next(looks)

    monkeypatch.setattr(status_of, "job_status", ask)
    assert main(["status", JOB, "--watch", "0.01", "--json", "--arena", str(job.root)]) == 0
    assert json.loads(capsys.readouterr().out) == {"error": "ftckpt-peers/a: is gone"}


def test_nothing_is_lost_where_all_is_there(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    Heartbeat.open(job.node_dir("b"), 0, 2).beat(8, "forward")
    said = status(job.root)
    assert (
        said["restart"] | {"iteration": 6, "source": "memory", "rebuilt": {}, "lost_iterations": 2} == said["restart"]
    )
    assert (said["whole"], said["iteration"], said["ranks"]) == (6, 8, 1)
    assert said["slots"] == [4, 5, 6]
    assert main(["status", JOB, "--arena", str(job.root)]) == 0
    out = capsys.readouterr().out
    is_golden("status", out)
    assert main(["status", f"{job.root}/ftckpt-{JOB}"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == out.splitlines()[-1]


def test_the_rank_that_all_wait_for_is_named(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    for node, rank, iteration in (("a", 0, 8), ("b", 2, 8), ("c", 4, 6)):
        Heartbeat.open(job.node_dir(node), 0, rank).beat(iteration, "forward")
    assert main(["status", JOB, "--json", "--arena", str(job.root)]) == 0
    late = json.loads(capsys.readouterr().out)["late"]
    assert (late["rank"], late["node"], late["behind"], late["phase"]) == (4, "c", 2, "forward")
    assert any("wait for rank 4 on c: 2 iteration(s)" in line for line in in_lines(status(job.root)))


def test_what_a_lost_node_held_is_rebuilt(job: Job) -> None:
    shutil.rmtree(job.node_dir("c"))
    restart = status(job.root)["restart"]
    assert (restart["iteration"], restart["source"], restart["lost_iterations"]) == (5, "memory", None)
    assert restart["rebuilt"] == {job.shard(4): ("peer_parity",), job.shard(5): ("peer_parity",)}
    assert "iteration 6: not sealed by dp4, dp5" in restart["passed_over"][0]
    text = list(in_lines(status(job.root)))[-1]
    assert "takes iteration 5 from memory; rebuilding dp4 from peer_parity, dp5 from peer_parity" in text


def test_what_nobody_can_be_asked_for_is_not_called_lost(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(job.node_dir("c"))
    for node in ("a", "b"):
        for parity in list_parity(job.node_dir(node)):
            parity.path.unlink()
    assert main(["status", "--arena", str(job.root)]) == 1
    out = capsys.readouterr().out
    assert "a restart now finds none: no SMP is known here" in out and "(dp4, dp5)" in out


def test_jobs_are_listed(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["jobs", "--arena", str(job.root)]) == 0
    is_golden("jobs", capsys.readouterr().out)
    assert main(["status", "nothing", "--arena", str(job.root)]) == 2
    assert f"no memory of job 'nothing' under {job.root}; jobs there: {JOB}" in capsys.readouterr().err
    assert main(["jobs", "--json", "--arena", str(job.root / "none")]) == 2
    told = capsys.readouterr()
    assert not told.out and "none is not a directory" in told.err
    assert main(["status", "--watch", "0", "--arena", str(job.root)]) == 2
    assert "--watch 0: " in capsys.readouterr().err


@pytest.fixture
def apart(job: Job) -> Iterator[dict[str, SmpClient]]:
    """Node ``a`` alone is on this machine, as far as ``status`` can see; all three have their SMP."""
    roots = {"a": job.root} | {node: job.root / f"machine-{node}" for node in ("b", "c")}
    for node in ("b", "c"):
        (roots[node] / f"ftckpt-{JOB}").mkdir(parents=True, mode=0o700)
        shutil.move(job.node_dir(node), roots[node] / f"ftckpt-{JOB}" / node)
    dirs = {node: root / f"ftckpt-{JOB}" / node for node, root in roots.items()}
    clients = {node: find_or_start(dirs[node], roots[node], JOB, node) for node in roots}
    try:
        for node, client in clients.items():
            client.configure(description(job, node, {}))
        peers = {node: ["127.0.0.1", client.status()["port"]] for node, client in clients.items()}
        for node, client in clients.items():
            client.configure(description(job, node, peers))
        yield clients
    finally:
        for node_dir in dirs.values():
            with suppress(OSError):
                end_smp(node_dir, 10.0)


def description(job: Job, node: str, peers: dict[str, list[Any]]) -> dict[str, Any]:
    """The description that the leader of a node sends to its SMP."""
    held = holdings(job)
    keeps: dict[str, dict[str, int]] = {}
    for shard, nodes in mirrors(held, job.modes).items():
        home = next(one.node for one in held if one.shard == shard)
        if node in nodes and home != node:
            keeps.setdefault(home, {})[shard] = 1 << 20
    mine = {str(rank): held[rank] for rank, of in enumerate(job.nodes) if of == node}
    return {
        "job": JOB, "node": node, "run": "", "secret": SECRET.hex(), "address": "127.0.0.1",
        "peers": {other: at for other, at in peers.items() if other != node}, "nodes": sorted(peers),
        "places": {rank: {"shard": one.shard, "arena": one.arena, "pid": os.getpid()} for rank, one in mine.items()},
        "groups": [g.to_json() for g in file_groups(job) if any(m.node == node for m in g.members)],
        "mirror_from": keeps, "settings": asdict(Config(interval=3)),
    }  # fmt: skip


def test_other_machines_tell_by_their_smps(job: Job, apart: dict[str, SmpClient]) -> None:
    until(lambda: (status(job.root)["nodes"][0]["whole"]).get("age_secs") is not None)  # its SMP has looked
    said = status(job.root)
    assert [node["node"] for node in said["nodes"]] == ["a", "b", "c"]
    assert all(node["answers"] and node["smp"] for node in said["nodes"])
    assert (said["restart"]["iteration"], said["restart"]["rebuilt"], said["interval"]) == (6, {}, 3)
    assert all(3000 < node["ends_in_secs"] <= 3600 for node in said["nodes"])
    (waits,) = [line for line in in_lines(said) if line.startswith("no rank trains on a, b, c")]
    assert f"'ftckpt clean {JOB}'" in waits and "ends in 60 min" in waits
    apart["c"].end()
    said = status(job.root)
    gone = next(node for node in said["nodes"] if node["node"] == "c")
    assert not gone["answers"] and "cannot be reached" in gone["problem"]
    assert said["restart"]["gone"] == ["c"] and said["restart"]["iteration"] == 5
    assert said["restart"]["rebuilt"] == {"dp4": ("peer_parity",), "dp5": ("peer_parity",)}
    assert "a restart now (c gone) takes iteration 5" in list(in_lines(said))[-1]
    for node_dir in (job.node_dir("a"), job.root / "machine-b" / f"ftckpt-{JOB}" / "b"):
        for parity in list_parity(node_dir):
            parity.path.unlink()
    text = list(in_lines(status(job.root)))[-1]
    assert "finds none: iteration 6 was committed and cannot be restored: no arena of dp4, dp5" in text


def test_who_does_not_know_the_secret_is_told_nothing(job: Job, apart: dict[str, SmpClient]) -> None:
    stored = job.node_dir("a") / "smp.json"
    stored.write_text(stored.read_text().replace(SECRET.hex(), "ab" * 32))
    said = {node["node"]: node for node in status(job.root)["nodes"]}
    assert not said["b"]["answers"] and not said["c"]["answers"]
    assert holder_of(job.node_dir("a") / "smp.lock") is not None
