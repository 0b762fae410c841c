"""The demo: its conclusions on logs made up here, the remains after Ctrl-C, and (slow) a full run."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ftckpt.cli.recovery import PARTS
from launch import demo
from launch.demo_job import FRAMEWORKS, LIMIT, SHRINK, Run, Strike
from tests.components.made_logs import RunLogs, check_page
from tests.support.errors import raises
from tests.support.processes import RunError, environment, kill_all, running
from tests.support.waiting import until

pytestmark = pytest.mark.faults

REPOSITORY = Path(__file__).parents[2]
OWNER_VAR = "FTCKPT_TEST_OWNER"
HASHES = {"model0.w": "a1", "optimizer0.0.master": "b2", "optimizer0.0.exp_avg": "c3", "rng.cpu": "d4"}


def line(iteration: int, loss: float) -> dict[str, Any]:
    return {"iteration": iteration, "loss": loss, "loss_hex": loss.hex(), "time": 0.01}


REFERENCE = [line(1, 5.0), line(2, 4.5), line(3, 4.25)]


def made_up(name: str, folder: Path, lines: list[dict[str, Any]], **more: Any) -> Run:
    """A run of two ranks that was never started."""
    run = Run(name, folder / name, FRAMEWORKS["megatron"], [], **more)
    run.lines += lines
    run.final.mkdir(parents=True)
    for rank in ("tp0-pp0-dp0", "tp0-pp0-dp1"):
        (run.final / f"{rank}.json").write_text(json.dumps(HASHES))
    return run


@pytest.fixture
def reference(tmp_path: Path) -> Run:
    return made_up("reference", tmp_path, REFERENCE)


def test_tensors_that_differ_or_are_missing_are_named(reference: Run, tmp_path: Path) -> None:
    faulted = made_up("faulted", tmp_path, REFERENCE)
    (faulted.final / "tp0-pp0-dp0.json").write_text(json.dumps({**HASHES, "optimizer0.0.exp_avg": "ff"}))
    without = {name: value for name, value in HASHES.items() if name != "rng.cpu"}
    (faulted.final / "tp0-pp0-dp1.json").write_text(json.dumps(without))
    comparison = demo.compare(reference, faulted)
    assert not comparison.equal
    assert comparison.differences == (
        "tp0-pp0-dp0/optimizer0.0.exp_avg: ff is not c3",
        "tp0-pp0-dp1/rng.cpu: missing is not d4",
    )


def with_faults(folder: Path, *names: str, lines: list[dict[str, Any]], shards: tuple[str, ...] = ()) -> Run:
    """A run with a restart for each of these faults, as it leaves them."""
    strikes = [Strike(name, 3, folder / f"fired-{name}") for name in names]
    run = made_up("faulted", folder, lines, strikes=strikes)
    logs = RunLogs(run.folder)
    logs.attempt("a0", (1, 2), 100.0, None, 3)
    for number, strike in enumerate(strikes, 1):
        marks = [fault.marker_of(rank) for fault in strike.plan()[:1] for rank in strike.ranks] or [strike.marker]
        for mark in marks:
            mark.write_text(json.dumps({"time": 100.0 * number + 4, "iteration": 3, "ranks": [1], "shards": shards}))
        fault = {"event": "fault", "time": 100.0 * number + 4, "name": strike.name, "iteration": 3, "ranks": [1]}
        logs.write("demo", fault)
        built = {"event": "rebuilt", "shards": ["b"], "bytes": 22, "secs": 0.1, "sources": {"peer_parity": {}}}
        between = [built] if strike.scene.rank is None else []
        source = "peer_parity" if between else "memory"
        pids = (10 * number, 10 * number + 1)
        logs.attempt(f"a{number}", pids, 100.0 * number + 10, 2, 3, between=between, source=source)
    return run


def test_a_lost_shard_that_was_not_rebuilt_is_an_error(tmp_path: Path) -> None:
    run = with_faults(tmp_path / "b", "node", lines=REFERENCE, shards=("b",))
    (cost,) = demo.costs_of(run)
    assert (cost.source, cost.rebuilt_shards, cost.rebuilt_bytes) == ("peer_parity", ("b",), 22)
    with raises(RunError, "node", "a"):
        demo.costs_of(with_faults(tmp_path / "a", "node", lines=REFERENCE, shards=("a", "b")))


def concluded(
    runs: list[Run], out: Path, capsys: pytest.CaptureFixture[str], **findings: Any
) -> tuple[int, list[str], str]:
    """Exit code, lines and page of a demo that has shown this."""
    summary = demo.summarize(FRAMEWORKS["megatron"], demo.Findings(runs, **findings))
    code = demo.conclude(summary, runs, out, ["--scene", "<script>"])
    assert json.loads((out / "summary.json").read_text())["bit_exact"] == summary["bit_exact"]
    text = (out / "report.html").read_text()
    check_page(text)
    return code, capsys.readouterr().out.splitlines(), text


@pytest.mark.parametrize("equal", [True, False])
def test_report_and_verdict(equal: bool, reference: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = with_faults(tmp_path, "rank", lines=REFERENCE if equal else [*REFERENCE, line(2, 4.75)])
    comparison = demo.compare(reference, run)
    code, lines, text = concluded(
        [reference, run], tmp_path, capsys, comparison=comparison, faults=demo.costs_of(run)
    )
    assert code == (0 if equal else 1)
    if equal:
        assert lines[0] == f"demo: bit-exact, 1 fault survived, report in {tmp_path / 'report.html'}"
        assert "<h1>Bit-exact after 1 fault<" in text
    else:
        assert lines[0].startswith("demo: loss of iteration 2: ")
        assert lines[-2].startswith("demo: NOT bit-exact, 1 difference")
        assert "<h1>Not bit-exact after 1 fault<" in text and "loss of iteration 2" in text
    assert json.loads(lines[-1]) == {"framework": "Megatron-core", "faults": 1, "bit_exact": equal}
    assert "hashes of final tensors compared" in text and "launch/demo.sh --scene &#39;&lt;script&gt;&#39;" in text


@contextlib.contextmanager
def start_demo(out: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The demo as a process, and the value by which everything it starts is known."""
    owner = secrets.token_hex(8)
    child = subprocess.Popen(
        [sys.executable, "-m", "launch.demo", "--out", str(out), *flags], cwd=REPOSITORY,
        env={**os.environ, OWNER_VAR: owner}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        yield child, owner
    finally:
        child.kill()
        child.communicate()
        kill_all(lambda: owned(owner), 30.0)


def owned(owner: str) -> list[int]:
    return [pid for pid in running() if f"{OWNER_VAR}={owner}" in environment(pid)]


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_nothing(tmp_path: Path, signum: int) -> None:
    with start_demo(tmp_path, "--scene", "rank") as (child, owner):
        until(lambda: len(owned(owner)) >= 11, "the demo, two agents and eight ranks are up", secs=150)
        child.send_signal(signum)
        output, _ = child.communicate(timeout=120)
        assert child.returncode == 130, output
        assert owned(owner) == []


@pytest.mark.slow
def test_a_scene_with_deepspeed(tmp_path: Path) -> None:
    words = ["--framework", "deepspeed", "--scene", "rank", "--iterations", "8"]
    words += ["--layers", "2", "--hidden", "32", "--seq", "32"]
    with start_demo(tmp_path, *words) as (child, owner):
        output, _ = child.communicate(timeout=280)
        assert child.returncode == 0, output
        assert owned(owner) == []
    told = ("demo: ", "reference  ", "faulted    ", "fault  killed at", " rank  ", '{"framework"')
    assert [line for line in output.splitlines() if not line.startswith(told)] == [], "DeepSpeed's is in the logs"
    assert output.splitlines()[-2].startswith("demo: bit-exact, 1 fault survived, report in ")
    found = json.loads((tmp_path / "summary.json").read_text())
    assert found["framework"] == "DeepSpeed" and "deepspeed" in found["conditions"][0]["versions"]
    assert all(found["num_tensors_compared"][kind] >= 8 for kind in demo.KINDS)
    (fault,) = found["faults"]
    assert fault["iteration"] == 4 and 0 <= fault["iterations_lost"] <= 3
    assert "DeepSpeed: PipelineModule" in (tmp_path / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_whole_demo(tmp_path: Path, framework: str) -> None:
    with start_demo(tmp_path, "--framework", framework) as (child, owner):
        output, _ = child.communicate(timeout=800)
        assert child.returncode == 0, output
        assert owned(owner) == []
    assert output.splitlines()[-2].startswith("demo: bit-exact, 4 faults survived, report in ")
    found = json.loads((tmp_path / "summary.json").read_text())
    assert found["bit_exact"] is True
    assert [fault["name"] for fault in found["faults"]] == ["rank", "writing", "all", "node"]
    assert (tmp_path / "trace.json").exists()
    logs = [path.read_text() for path in (tmp_path / "faulted").glob("node*.log")]
    assert len(logs) == 3 and not any("workers are started as new processes" in log for log in logs)
    *killed, lost = found["faults"]
    for fault in killed:
        assert (fault["source"], fault["rebuilt_shards"]) == ("memory", [])
        assert 0 <= fault["iterations_lost"] <= 9  # from one fault to the next: snapshots wait for protection
    assert "peer_parity" in lost["source"] and len(lost["rebuilt_shards"]) == len(lost["ranks"]) == 4
    assert lost["rebuilt_bytes"] > 5e5 and lost["parts"]["rebuild"] > 0
    for fault in found["faults"]:
        assert 0 < fault["total_secs"] < 120
        assert min(fault["parts"][part] for part in PARTS if part != "rebuild") > 0
    if framework == "megatron":
        assert [reshape["scene"] for reshape in found["reshapes"]] == [SHRINK, LIMIT]
        for reshape in found["reshapes"]:
            check_reshape(reshape)
    else:
        assert found["reshapes"] == []


def check_reshape(reshape: dict[str, Any]) -> None:
    assert (reshape["from"], reshape["to"], reshape["bit_equal"]) == ("tp2pp2dp2", "tp2pp1dp2", True)
    assert reshape["differences"] == [] and min(reshape["tensors_compared"][kind] for kind in demo.KINDS[:3]) > 20
    restart = reshape["restart"]
    assert restart["layout"] == "tp2pp2dp2 → tp2pp1dp2"
    if reshape["scene"] == SHRINK:
        assert len(restart["rebuilt_shards"]) == 4 and restart["rebuilt_bytes"] > 5e5
        assert "peer_parity" in restart["source"]
    else:
        assert restart["source"] == "storage"
    assert reshape["largest_difference_of_a_loss"] < 0.2
