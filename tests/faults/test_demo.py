"""The demo: its conclusions on logs made up here, what Ctrl-C leaves, and (slow) the whole of it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ftckpt.cli.recovery import PARTS
from ftckpt.config import Config
from launch import demo, demo_job
from launch.demo_job import FRAMEWORKS, LIMIT, RESHAPING, SCENES, SHRINK, SMALL, Run, Strike, Watch
from tests.support.errors import raises
from tests.support.processes import RunError, environment, kill_all, running
from tests.support.run_logs import RunLogs, check_page
from tests.support.waiting import until

pytestmark = pytest.mark.faults

REPOSITORY = Path(__file__).parents[2]
OWNER_VAR = "FTCKPT_TEST_OWNER"
SETTINGS = {**SMALL, "job": "j"}
HASHES = {"model0.w": "a1", "optimizer0.0.master": "b2", "optimizer0.0.exp_avg": "c3", "rng.cpu": "d4"}


def line(iteration: int, loss: float) -> dict[str, Any]:
    return {"iteration": iteration, "loss": loss, "loss_hex": loss.hex(), "time": 0.01}


REFERENCE = [line(1, 5.0), line(2, 4.5), line(3, 4.25)]


def made_up(name: str, folder: Path, lines: list[dict[str, Any]], **more: Any) -> Run:
    """A run of two ranks that was never started."""
    run = Run(name, folder / name, FRAMEWORKS["megatron"], [], lines=lines, **more)
    run.final.mkdir(parents=True)
    for rank in ("tp0-pp0-dp0", "tp0-pp0-dp1"):
        (run.final / f"{rank}.json").write_text(json.dumps(HASHES))
    return run


@pytest.fixture
def reference(tmp_path: Path) -> Run:
    return made_up("reference", tmp_path, REFERENCE)


def test_equal_runs_are_bit_exact_though_an_iteration_was_trained_twice(reference: Run, tmp_path: Path) -> None:
    comparison = demo.compare(reference, made_up("faulted", tmp_path, [*REFERENCE[:2], *REFERENCE[1:]]))
    assert comparison.equal and comparison.num_losses == 4
    kinds = {"weights": 2, "masters": 2, "moments": 2, "steps": 0, "learning rates": 0, "RNG states": 2}
    assert comparison.compared == kinds


def test_losses_that_differ_in_their_last_bit_or_are_missing_are_named(reference: Run, tmp_path: Path) -> None:
    other = 4.500000000000001
    comparison = demo.compare(reference, made_up("faulted", tmp_path, [REFERENCE[0], line(2, other), REFERENCE[1]]))
    assert not comparison.equal
    assert comparison.differences == (
        f"loss of iteration 2: {other.hex()} is not {(4.5).hex()}",
        "loss of iteration 3: missing",
    )


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


def test_nothing_compared_is_not_bit_exact(tmp_path: Path) -> None:
    empty = Run("none", tmp_path, FRAMEWORKS["megatron"], [])
    assert not demo.compare(empty, empty).equal
    assert not demo.compare(made_up("reference", tmp_path, []), made_up("faulted", tmp_path, [])).equal


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


def test_a_fault_without_a_restart_of_its_own_is_an_error(tmp_path: Path) -> None:
    run = with_faults(tmp_path, "rank", "all", lines=REFERENCE)
    assert [cost.name for cost in demo.costs_of(run)] == ["rank", "all"]
    run.strikes = [*run.strikes, Strike("node", 3, tmp_path / "fired-node")]
    with raises(RunError, "rank, all", "each fault"):
        demo.costs_of(run)


def test_a_lost_shard_that_was_not_rebuilt_is_an_error(tmp_path: Path) -> None:
    run = with_faults(tmp_path / "b", "node", lines=REFERENCE, shards=("b",))
    (cost,) = demo.costs_of(run)
    assert (cost.source, cost.rebuilt_shards, cost.rebuilt_bytes) == ("peer_parity", ("b",), 22)
    with raises(RunError, "node", "a"):
        demo.costs_of(with_faults(tmp_path / "a", "node", lines=REFERENCE, shards=("a", "b")))


class Lost:
    """Stands in for processes: records which node is lost, and which takes its place."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def lose(self, node: str) -> list[int]:
        self.calls.append(f"lost {node}")
        return [71, 72]

    def start(self, node: str) -> None:
        self.calls.append(f"started {node}")


@pytest.mark.parametrize("name", ["node", SHRINK])
def test_a_node_is_lost_once_a_snapshot_of_this_attempt_is_protected(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_job, "ARENA", tmp_path)
    node_dir = tmp_path / "ftckpt-j" / "node1"
    (node_dir / "tp0-pp1.0123abcd").mkdir(parents=True)
    strike = Strike(name, 3, tmp_path / "marker")
    run, lost = made_up("faulted", tmp_path, [], strikes=[strike]), Lost()
    run.event_dir.mkdir()
    watch = Watch(run, "j", lost, lost.start)  # type: ignore[arg-type]
    assert lost.calls == []
    who = {"rank": 4, "pid": os.getpid()}
    join, protected = ({"event": event, "node": "node1", "iteration": 1, **who} for event in ("joined", "protected"))
    # The second start has protected nothing yet.
    for event, loss in ((join, None), (protected, None), (None, line(1, 5.0)), (join, None), (None, line(2, 4.5))):
        for path, value in ((run.event_dir / "rank4.jsonl", event), (run.log, loss)):
            with open(path, "a") as file:
                file.write(json.dumps(value) + "\n" if value else "")
        watch.look()
    assert lost.calls == [] and strike.marks() == []
    with open(run.event_dir / "rank4.jsonl", "a") as file:
        file.write(json.dumps(protected) + "\n")
    deadline = time.monotonic() + 10
    while not strike.marks() and time.monotonic() < deadline:
        watch.look()
    watch.look()
    assert lost.calls == ["lost node1"]
    assert not node_dir.exists()
    (mark,) = strike.marks()
    assert (mark["iteration"], mark["protected"], mark["ranks"], mark["pids"]) == (3, 1, [4], [71, 72])
    assert mark["shards"] == ["tp0-pp1"]
    (note,) = map(json.loads, (run.event_dir / "demo.jsonl").read_text().splitlines())
    assert (note["event"], note["name"], note["iteration"], note["ranks"]) == ("fault", name, 3, [4])


def test_faults_wait_until_agents_restart_without_imports_the_standby_too(tmp_path: Path) -> None:
    run, lost = made_up("faulted", tmp_path, [], strikes=[Strike("node", 3, tmp_path / "marker")]), Lost()
    (gate,) = run.gate

    def start(node: str) -> None:
        lost.start(node)
        run.log_of(node).touch()

    watch = Watch(run, "j", lost, start)  # type: ignore[arg-type]
    for node in demo_job.NODES:
        run.log_of(node).write_text("ftckpt: 9 modules are preloaded")
    watch.look()
    assert lost.calls == [] and gate.action == "wait", "before all train a standby could take a place"
    gate.marker_of(0).touch()
    watch.look()
    watch.look()
    assert lost.calls == ["started node2"] and not gate.over.exists()
    run.log_of("node2").write_text("ftckpt: 9 modules are preloaded")
    watch.look()
    assert gate.over.exists()


def test_a_marker_that_is_being_written_does_not_count(tmp_path: Path) -> None:
    strike = Strike("node", 3, tmp_path / "marker")
    strike.marker.touch()
    assert strike.marks() == []


def test_the_fault_of_a_writer_waits_for_a_snapshot_that_can_be_interrupted(tmp_path: Path) -> None:
    plan = Strike("writing", 7, tmp_path / "marker").plan()
    assert [fault.iteration for fault in plan] == list(range(7, 15))
    assert len({fault.marker for fault in plan}) == 1
    assert [fault.iteration for fault in Strike("all", 7, tmp_path / "marker").plan()] == [7]


DIGEST = {"weight/a": [4, "0a"], "master/a": [4, "0b"], "exp_avg/a": [4, "0c"], "exp_avg_sq/a": [4, "0d"]}


def shrunk(folder: Path, reference: Run, restored: dict[str, Any], reshaped_at: float = 110.0) -> tuple[Run, Any]:
    """A run that went from the digest of iteration 2 to ``restored``, and what is concluded from it."""
    run = with_faults(folder, SHRINK, lines=[line(2, 4.5), line(3, 4.25 + 1 / 64)])
    for one, digest, again in ((reference, DIGEST, False), (run, restored, True)):
        rows = [{"iteration": 2, "restored": not again, "digest": {}}]
        rows.append({"iteration": 2, "restored": again, "digest": digest})
        one.digests.write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = {"event": "loaded", "from": "tp2pp2dp2", "to": "tp2pp1dp2", "iteration": 2, "time": reshaped_at}
    run.events = [{**names, "secs": 0.25, "read_bytes": 2_000_000, "received_bytes": 1_000_000}] * 2
    return run, demo.compare_reshaped(reference, run, demo.costs_of(run)[0])


def test_a_reshape_is_compared_with_the_reference_at_its_iteration(tmp_path: Path, reference: Run) -> None:
    _, reshape = shrunk(tmp_path, reference, DIGEST)
    assert reshape["bit_equal"] and reshape["tensors_compared"] == {"weights": 1, "masters": 1, "moments": 2}
    assert (reshape["from"], reshape["to"]) == ("tp2pp2dp2", "tp2pp1dp2")
    assert (reshape["restart"]["rebuilt_shards"], reshape["restart"]["source"]) == (("b",), "peer_parity")
    assert (reshape["iteration"], reshape["read_bytes"]) == (2, 4_000_000)
    assert reshape["largest_difference_of_a_loss"] == 1 / 64


def test_a_tensor_that_a_reshape_changed_or_left_out_is_named(tmp_path: Path, reference: Run) -> None:
    changed = {key: value for key, value in DIGEST.items() if key != "weight/a"} | {"exp_avg/a": [4, "00"]}
    _, reshape = shrunk(tmp_path, reference, changed)
    assert not reshape["bit_equal"] and reshape["differences"] == ["exp_avg/a", "weight/a"]


def test_a_run_that_did_not_reshape_shows_nothing(tmp_path: Path, reference: Run) -> None:
    with raises(RunError, "reshaped", "fault"):
        shrunk(tmp_path, reference, DIGEST, reshaped_at=90.0)


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


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("equal", [True, False])
def test_report_and_verdict_of_a_reshape(
    equal: bool, alone: bool, reference: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, reshape = shrunk(tmp_path, reference, DIGEST if equal else {})
    runs, findings = [reference, run], {"reshapes": [reshape]}
    if not alone:
        faulted = with_faults(tmp_path / "faulted", "rank", lines=REFERENCE)
        runs.insert(1, faulted)
        findings |= {"comparison": demo.compare(reference, faulted), "faults": demo.costs_of(faulted)}
    code, lines, text = concluded(runs, tmp_path, capsys, **findings)
    assert code == (0 if equal else 1)
    verdict = "bit-equal" if equal else "NOT bit-equal, 4 differences"
    (reshaped,) = [line for line in lines if ": reshaped " in line]
    assert reshaped.startswith(f"demo: faulted: reshaped from tp2pp2dp2 to tp2pp1dp2 in iteration 2: {verdict}")
    verdicts = json.loads(lines[-1])
    assert verdicts["bit_equal"] is equal and ("faults" in verdicts) is not alone
    assert ("4 logical tensors, all equal" in text) == equal
    assert ('<header class="good">' in text) == equal


def test_a_run_that_fails_leaves_the_report_of_those_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def execute(run: Run, job: str) -> None:
        if run.name == SHRINK:
            raise RunError("shrink: nothing moved\n--- node0:\nits log")
        passed = (
            made_up(run.name, tmp_path, REFERENCE)
            if not run.strikes
            else with_faults(tmp_path, *(strike.name for strike in run.strikes), lines=REFERENCE)
        )
        run.lines, run.folder, run.final, run.strikes = passed.lines, passed.folder, passed.final, passed.strikes

    monkeypatch.setattr(demo, "execute", execute)
    assert demo.main(["--out", str(tmp_path)]) == 1
    found = json.loads((tmp_path / "summary.json").read_text())
    assert found["failure"].startswith("shrink: nothing moved") and found["bit_exact"] is True
    assert [fault["name"] for fault in found["faults"]] == ["rank", "writing", "all", "node"]
    out, err = capsys.readouterr()
    assert "its log" in err and json.loads(out.splitlines()[-1])["failure"] == "shrink: nothing moved"
    page = (tmp_path / "report.html").read_text()
    check_page(page)
    assert '<header class="bad">' in page and "shrink: nothing moved" in page


def test_training_waits_while_an_smp_protects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strike = Strike("node", 3, tmp_path / "marker")
    run = made_up("faulted", tmp_path, [], strikes=[strike])
    watch, asked = Watch(run, "j", Lost(), Lost().start), []  # type: ignore[arg-type]
    monkeypatch.setattr(demo_job, "_ASK_SECS", 0.0)
    monkeypatch.setattr(watch, "_protects", lambda node: asked.append(node) or len(asked) < 4)
    watch._on_event({"event": "joined", "node": "node1", "rank": 4, "pid": os.getpid()})
    first, second, *_ = strike.plan()
    watch.look()
    assert not asked and first.action == "wait", "nobody waits yet"
    first.marker_of(0).touch()
    for _ in range(3):
        watch.look()
        assert not first.over.exists()
    watch.look()
    assert first.over.exists() and not second.over.exists() and asked == ["node1"] * 4
    watch.look()
    assert len(asked) == 4


def test_deepspeed_has_no_such_scene(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        demo.parse_args(["--framework", "deepspeed", "--scene", SHRINK])
    assert "the DeepSpeed example keeps its layout" in capsys.readouterr().err
    assert demo.parse_args(["--framework", "deepspeed"])[0].reshaping == []
    args, _ = demo.parse_args(["--scene", SHRINK])
    assert args.reshaping == [SHRINK] and args.scenes == [] and demo.parse_args([])[0].reshaping == [SHRINK, LIMIT]


def test_flags_are_all_that_the_run_with_faults_has_more(tmp_path: Path) -> None:
    plain, saved = (FRAMEWORKS["megatron"].command(tmp_path, ["--seed", "5"], chosen) for chosen in ({}, SETTINGS))
    assert plain[1] == "train_gpt" and plain[-2:] == ["--seed", "5"]
    assert saved[: len(plain)] == plain
    assert Config.from_flags(saved[len(plain) :]) == (Config(**SETTINGS), [])


def test_a_section_is_all_that_the_run_with_faults_has_more(tmp_path: Path) -> None:
    shipped = json.loads((REPOSITORY / "configs" / "deepspeed_zero1_pp.json").read_text())
    configs = []
    for chosen in ({}, SETTINGS):
        *words, path = FRAMEWORKS["deepspeed"].command(tmp_path, ["--seed", "5"], chosen)
        assert words[1] == "train_deepspeed" and words[-3:] == ["--seed", "5", "--deepspeed_config"]
        configs.append(json.loads(Path(path).read_text()))
    plain, saved = configs
    assert saved.pop("ftckpt") == {**shipped.pop("ftckpt"), **SETTINGS}
    assert saved == plain and plain.keys() == shipped.keys()
    assert (plain["optimizer"]["params"]["betas"], plain["optimizer"]["params"]["torch_adam"]) == ([0.9, 0.95], True)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "PREPARES megatron,metrics,report"),
        (["--scene", "all"], "PREPARES megatron,metrics,report"),
        (["--scene", "rank", "--framework", "deepspeed"], "PREPARES deepspeed,metrics,report"),
        (["--framework=deepspeed", "--scene", "rank"], "PREPARES deepspeed,metrics,report"),
        (["--framework", "jax"], "FAILS --framework: 'jax' is not one of megatron, deepspeed"),
    ],
)
def test_the_script_installs_the_framework_that_is_asked_for(tmp_path: Path, words: list[str], told: str) -> None:
    (tmp_path / "demo.sh").write_text((REPOSITORY / "launch" / "demo.sh").read_text())
    stand_in = "prepare() { echo PREPARES $1; exit; }\nfail() { echo FAILS $*; exit 1; }\n"
    (tmp_path / "environment.sh").write_text(stand_in)
    ran = subprocess.run(["bash", tmp_path / "demo.sh", *words], capture_output=True, text=True, check=False)
    assert ran.stdout.splitlines() == [told], ran.stderr


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


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("scene", RESHAPING)
def test_another_layout_alone(tmp_path: Path, scene: str) -> None:
    with start_demo(tmp_path, "--scene", scene, "--iterations", "12") as (child, owner):
        output, _ = child.communicate(timeout=500)
        assert child.returncode == 0, output
        assert owned(owner) == []
    assert output.splitlines()[-2].startswith(f"demo: {scene}: reshaped from tp2pp2dp2 to tp2pp1dp2 in iteration ")
    found = json.loads((tmp_path / "summary.json").read_text())
    (reshape,) = found["reshapes"]
    check_reshape(reshape)
    assert found["bit_exact"] is None and found["faults"] == []


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("scene", [name for name in SCENES if name not in RESHAPING])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_each_scene_alone(tmp_path: Path, framework: str, scene: str) -> None:
    # A node is lost once a snapshot is protected.
    words = ["--framework", framework, "--scene", scene, "--iterations", "24" if scene == "node" else "8"]
    with start_demo(tmp_path, *words) as (child, owner):
        output, _ = child.communicate(timeout=500)
        assert child.returncode == 0, output
        assert owned(owner) == []
    assert output.splitlines()[-2].startswith("demo: bit-exact, 1 fault survived, report in ")
