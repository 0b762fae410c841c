"""A smoke run of each benchmark: it succeeds, writes its result, and leaves nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import cost, goodput, peers
from benchmarks.network import NO_NAMESPACES
from benchmarks.recovery import USUAL

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.multiproc


@pytest.fixture
def folder(tmp_path: Path, arena_root: Path) -> Path:
    """A folder for results; nothing else is there, or in the tmpfs, afterwards."""
    (tmp_path / "disk").mkdir()
    return tmp_path


def run(folder: Path, arena_root: Path, name: str, *words: str, places: str = "") -> dict[str, Any]:
    """The result of ``benchmarks/NAME.py --quick``; ``places``: its options among ``arena`` and ``disk``."""
    out, where = folder / "result.json", {"arena": arena_root, "disk": folder / "disk"}
    options = [str(word) for place in places.split() for word in (f"--{place}", where[place])]
    command = [sys.executable, f"benchmarks/{name}.py", "--quick", "--json", str(out), *options, *words]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    if name == "network" and ended.returncode == NO_NAMESPACES:
        pytest.skip("making a network takes root, and iproute2")
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert not list(arena_root.iterdir()) and not list((folder / "disk").iterdir()), "something is left"
    found: dict[str, Any] = json.loads(out.read_text())
    assert {"hardware", "versions", "command", "date", "revision"} <= found["environment"].keys()
    assert not [block["error"] for block in found.get("blocks", ()) if "error" in block]
    return found


def test_a_block_of_cost(folder: Path, arena_root: Path) -> None:
    sizes = cost.QUICK._replace(iterations=cost.STORED_EVERY)
    row = "ftckpt, storage"
    block = cost.run_block(cost.Plan("plain", "idle", 0, row), cost.ROWS[row], sizes, (arena_root, folder))
    assert "error" not in block, block["error"]
    assert len(block["iterations"]) == sizes.iterations and block["snapshots"] == 1
    assert block["iteration_secs"] > sizes.device_secs and block["cpu_secs"] > 0
    assert block["memory_bytes"] > 5 * block["state_bytes"], "slots of all ranks, and an SMP"
    assert not list(arena_root.iterdir()) and not list(folder.glob("ftckpt-benchmark-*"))


@pytest.mark.slow
def test_cost(folder: Path, arena_root: Path) -> None:
    found = run(folder, arena_root, "cost", places="arena disk")
    for table in found["tables"].values():
        assert table[cost.OFF]["ratio"] == 1.0 and table[cost.DEFAULT]["blocked_ms"] > 0
    again = run(folder, arena_root, "cost", places="arena disk")
    assert again["blocks"] == found["blocks"], "the same command resumes"


def test_device(folder: Path) -> None:
    tiny = ["--device", "cpu", "--tiny", "--rounds", "1", "--each", "2", "--out", str(folder)]
    systems = ["--systems", "nothing,plain,plain-batch,bubble-smp"]
    command = [sys.executable, "benchmarks/device.py", *tiny, *systems]
    subprocess.run(command, cwd=ROOT, capture_output=True, timeout=200, check=True)
    rows = json.loads((folder / "device.json").read_text())["rows"]
    assert all(rows[f"plain/tiny/{name}"]["ratio"] > 0 for name in ("nothing", "plain", "bubble-smp"))
    assert "error" in rows["plain/tiny/plain-batch"], "no driver is here"
    restarted = rows["plain/tiny/bubble-smp"]
    assert restarted["exact"] is True and restarted["compared"] > 50 and restarted["notes"]["has_smp"] == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["megatron", "deepspeed", "plain"])
def test_boundary(framework: str, folder: Path, arena_root: Path) -> None:
    (row,) = run(folder, arena_root, "boundary", "--only", framework, places="arena")["jobs"]
    assert row["pieces"] >= 30 and 0 < row["cpu_ms_least"] <= row["cpu_ms_median"] <= row["cpu_ms_most"]
    assert 0 < row["restore"]["cpu_ms_median"] <= row["restore"]["wall_ms_median"]


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["megatron", "deepspeed", "plain"])
def test_load(framework: str, folder: Path, arena_root: Path) -> None:
    found = run(folder, arena_root, "load", "--only", framework, places="disk")
    sources = {"memory": "memory", "parity": "node_parity", "disk": "storage"}
    ours = [row for row in found["rows"] if (row["who"], row["layout"]) == ("ftckpt", "same")]
    assert ours and all(row["found"] == sources[row["source"]] for row in ours)
    assert all(row["whole_secs"] > 0 for row in found["medians"])


@pytest.mark.slow
def test_network(folder: Path, arena_root: Path) -> None:
    found = run(folder, arena_root, "network")
    assert all(row["protected_per_min"] > 0 for row in found["rows"][1:])


@pytest.mark.slow
def test_recovery(folder: Path, arena_root: Path) -> None:
    found = run(folder, arena_root, "recovery", "--rows", USUAL, "torchrun, memory", places="disk")
    for block in found["blocks"]:
        back = block["faults"]["rank"]
        assert back["source"] == ("storage" if block["row"] == USUAL else "memory")
        assert back["lost"] <= 10 and sum(back["parts"].values()) == pytest.approx(back["secs"])


@pytest.mark.slow
def test_peers(folder: Path, arena_root: Path) -> None:
    rows, faults = ["ftckpt, each iteration", "torch_dist"], [peers.ALL, peers.FLIPPED, peers.LOST]
    found = run(folder, arena_root, "peers", "--rows", *rows, "--faults", *faults, places="arena")
    ours, theirs = (found["tables"]["restores"][row] for row in rows)
    assert [ours[fault] for fault in faults] == [peers.EXACT] * 3 and ours["load_secs"] > 0
    assert [theirs[fault] for fault in faults] == [peers.EXACT, peers.WRONG, "error"]


def test_goodput_of_a_made_up_run() -> None:
    probed = goodput.Probe(iteration_secs=0.5, cost_secs=0.1, save_secs=0.2)
    restart = {"kind": "node", "secs": 10.0, "lost": 30}
    found = {"wall_secs": 100.0, "useful": 150, "restarts": [restart] * 2, "interval": 4.0, "protect_secs": 2.0}
    ours = goodput.figures_of(goodput.OURS, found, probed, 20)
    assert (ours["goodput"], ours["down"], ours["repeated"]) == (0.75, 0.2, 0.3)
    assert ours["repeated_predicted"] == pytest.approx(2 * ((4 / 2 + 2) * 0.5 + 1.5 * 2) / 100)
    usual = goodput.figures_of(goodput.USUAL, found, probed, 20)
    assert usual["predicted"] == pytest.approx((1 - 0.1 / 20 / 0.5) * (1 - (20 + 2 * (5 + 0.2)) / 100))


def test_failures_are_those_of_their_seed_and_as_frequent_as_they_should_be() -> None:
    times = goodput.Times(10.0, 100_000.0, 50.0)
    failures = goodput.failures_of(times, 3)
    assert failures == goodput.failures_of(times, 3) != goodput.failures_of(times, 4)
    assert len(failures) == pytest.approx(2000, rel=0.1)
    assert {failure.kind for failure in failures} == goodput.WEIGHTS.keys()


@pytest.mark.slow
def test_goodput(folder: Path, arena_root: Path) -> None:
    found = run(folder, arena_root, "goodput", "--minutes", "1.5", places="disk")
    assert found["every"] >= 1 and found["probe"]["iteration_secs"] > 0
    for row in found["tables"]["goodput"].values():
        assert row["failures"] > 0 and 0 < row["goodput"] < 1.1 and 0 < row["predicted"] < 1
