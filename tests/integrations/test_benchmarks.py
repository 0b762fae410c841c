"""A smoke run of each benchmark: it succeeds, writes its result, and leaves nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import cost
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
    block = cost.run_block(cost.Plan("plain", "idle", 0, "ftckpt, storage"), sizes, arena_root, folder)
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
