"""``ftckpt check`` on all ranks of a future job: all are checked, and a finding of any is reported."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ftckpt.cli import check_ranks
from ftckpt.cli.findings import FAILED, PASSED
from ftckpt.cli.main import main

pytestmark = pytest.mark.multiproc

ROOT = Path(__file__).parents[2]

PROGRAM = """
import json, os, socket, sys, time
from contextlib import contextmanager
from pathlib import Path
from ftckpt.cli import check as whole_check, check_device, check_pairs, check_ranks
from ftckpt.cli.findings import FAILED, PASSED, CheckResult
from ftckpt.cli.main import main

def of_rank_1(what):
    if os.environ["RANK"] == "1":
        what()

def mute():
    '''A port that answers as one behind a firewall that drops what comes: its queue is full, and nobody accepts.'''
    listening = socket.create_server(("127.0.0.1", 0), backlog=0)
    waiting = [socket.socket() for _ in range(4)]
    for one in waiting:
        one.setblocking(False)
        one.connect_ex(listening.getsockname())

    @contextmanager
    def serving(*_):
        yield check_pairs.Port(*listening.getsockname())
        del waiting[:]

    check_pairs._serving = serving

def broken():
    def clocks(self):
        raise RuntimeError("Connection reset by peer")
    check_ranks.LaunchedRanks._clocks = clocks

def silent():
    def clocks(self):
        self.group.give_up("it is silent")
        time.sleep(600)
    check_ranks.LaunchedRanks._clocks = clocks

def late():
    '''Its look at the device takes longer than a rank waits for a collective; that of the other fails at once.'''
    def look(arena, mib):
        time.sleep(6)
        yield CheckResult("device", "rate", PASSED, "")
    check_device.device_checks = look

if "late" in sys.argv:
    check_ranks._GROUP_SECS = 3.0
    check_device.device_checks = lambda arena, mib: iter([CheckResult("device", "copies", FAILED, "no room")])
if len(sys.argv) > 1 and sys.argv[1] in globals():
    of_rank_1(globals()[sys.argv.pop(1)])
check_ranks._LOST_SECS = 5.0
as_json = whole_check.as_json

def noted(*found):
    value = as_json(*found)
    Path(os.environ["FOUND"]).write_text(json.dumps(value))
    return value

whole_check.as_json = noted
sys.exit(main(sys.argv[1:]))
"""


class Checked(NamedTuple):
    """How a check ended: its table, and what its JSON has of each rank, by name."""

    code: int
    table: str
    ranks: dict[str, dict[str, dict[str, Any]]]


def checked(tmp_path: Path, ranks: int, *words: str, begin: str) -> Checked:
    """Under torchrun. ``begin``: of the script of a rank."""
    program, script, out = tmp_path / "program.py", tmp_path / "rank.sh", tmp_path / "found.json"
    program.write_text(PROGRAM)
    script.write_text(f'{begin} {sys.executable} {program} "$@"\n')
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        "--no-python",
    ]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "FOUND": str(out)}
    done = subprocess.run(
        [*launch, "bash", str(script), *words], env=environ, capture_output=True, text=True,
        timeout=180, check=False,
    )  # fmt: skip
    assert out.exists(), done.stderr[-4000:]
    found = json.loads(out.read_text())["ranks"]
    return Checked(
        done.returncode, done.stdout, {rank: {one["name"]: one for one in of} for rank, of in found.items()}
    )


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="each rank of a node has a core of its own")
def test_ranks_of_two_nodes(arena_root: Path, tmp_path: Path) -> None:
    first, second, *_ = sorted(os.sched_getaffinity(0))
    begin = (
        f"cores=({first} {second} {first})\nexport FTCKPT_NODE=node$((LOCAL_RANK / 2))\n"
        "exec taskset -c ${cores[$LOCAL_RANK]}"
    )
    words = ["check", "--arena", str(arena_root), "--size", "4MiB", "--smp-listen", "127.0.0.2"]
    code, table, ranks = checked(tmp_path, 3, *words, begin=begin)
    assert code == 0, table
    assert ranks.keys() == {"0", "1", "2"}
    names = {rank: {name: one["state"] for name, one in found.items()} for rank, found in ranks.items()}
    assert names["0"]["from node1"] == names["2"]["from node0"] == PASSED and "from node0" not in names["1"]
    assert ranks["0"]["from node1"]["text"].endswith(", at 127.0.0.2")
    assert {found["one directory"] for found in names.values()} == {PASSED}
    assert names["1"]["exact copies"] == PASSED
    assert "room" in names["2"] and "room" not in names["1"], "a node is looked at once"
    assert ranks["0"]["cores"]["text"].startswith("2 cores for 2 rank(s) and the SMP, 1 of its own each, ")
    assert re.search("PASSED +host +one directory", table)
    assert not list(arena_root.iterdir()), "nothing is left"


NODES = "export FTCKPT_NODE=node$LOCAL_RANK\nexec"


def test_a_port_that_a_firewall_drops(arena_root: Path, tmp_path: Path) -> None:
    """It is the one failure of all checks, and the others wait for its pair."""
    words = ["mute", "check", "--arena", str(arena_root), "--network", "--host"]
    code, table, ranks = checked(tmp_path, 2, *words, begin=NODES)
    assert code == 1 and {rank: {name for name, one in found.items() if one["state"] == FAILED}
                          for rank, found in ranks.items()} == {"0": {"from node1"}, "1": set()}, table  # fmt: skip
    failed = ranks["0"]["from node1"]
    assert re.match(r"node0 receives nothing from node1 at 127\.0\.0\.1:[0-9]+: ", failed["text"]), failed
    assert "open TCP ports 20000 to 28999" in failed["remedy"]
    assert "--ftckpt-smp-listen" in failed["remedy"] and failed["remedy"] in table
    assert ranks["1"]["from node0"]["state"] == PASSED and re.search("FAILED +network +from node1", table)


def test_a_rank_whose_device_fails_waits_for_the_others(arena_root: Path, tmp_path: Path) -> None:
    """Their looks take longer than a collective waits."""
    code, table, ranks = checked(tmp_path, 2, "late", "check", "--arena", str(arena_root), begin=NODES)
    assert code == 1 and ranks.keys() == {"0", "1"}, table
    assert ranks["0"]["copies"]["state"] == FAILED and ranks["1"]["rate"]["state"] == PASSED
    assert ranks["0"]["from node1"]["state"] == ranks["1"]["from node0"]["state"] == PASSED, table


def test_ranks_that_do_not_meet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("no route to host")

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(check_ranks, "LaunchedRanks", refuse)
    assert main(["check", "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)["ranks"]["0"]
    assert (
        found["state"] == FAILED and "no route to host" in found["text"] and "GLOO_SOCKET_IFNAME" in found["remedy"]
    )
    assert main(["check"]) == 1 and "failed  network: ranks: " in capsys.readouterr().out
