"""The demo: its conclusions on logs made up here, what Ctrl-C leaves, and (slow) the whole of it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from ftckpt.config import Config
from launch import demo, demo_report, demo_shrink
from launch.demo_charts import attempts_of, ticks_of
from launch.demo_frameworks import FRAMEWORKS, SMALL
from launch.demo_measure import KINDS, PARTS, FaultCost, Strike, blocked_by_iteration, compare, fault_cost
from launch.demo_node import Losing
from launch.demo_processes import DemoError
from launch.demo_run import Run, Watch
from launch.demo_scenes import SCENES, SHRINK, NodeLoss, marks_of

pytestmark = pytest.mark.faults

REPOSITORY = Path(__file__).parents[2]
OWNER_VAR = "FTCKPT_TEST_OWNER"
SETTINGS = {**SMALL, "job": "j"}
HASHES = {"model0.w": "a1", "optimizer0.0.master": "b2", "optimizer0.0.exp_avg": "c3", "rng.cpu": "d4"}


def line(iteration: int, loss: float, seen: float = 0.0) -> dict[str, Any]:
    return {"iteration": iteration, "loss": loss, "loss_hex": loss.hex(), "time": 0.5, "seen": seen}


@pytest.fixture
def finals(tmp_path: Path) -> tuple[Path, Path]:
    """The final hashes of two equal runs of two ranks."""
    folders = (tmp_path / "reference", tmp_path / "faulted")
    for folder in folders:
        folder.mkdir()
        for rank in ("tp0-pp0-dp0", "tp0-pp0-dp1"):
            (folder / f"{rank}.json").write_text(json.dumps(HASHES))
    return folders


REFERENCE = [line(1, 5.0), line(2, 4.5), line(3, 4.25)]


def test_equal_runs_are_bit_exact_though_an_iteration_was_trained_twice(finals: tuple[Path, Path]) -> None:
    found = compare(REFERENCE, [*REFERENCE[:2], *REFERENCE[1:]], *finals)
    assert found.bit_exact
    assert found.num_losses == 4
    kinds = {"weights": 2, "masters": 2, "moments": 2, "steps": 0, "learning rates": 0, "RNG states": 2}
    assert found.tensors == kinds


def test_a_loss_that_differs_in_its_last_bit_is_named(finals: tuple[Path, Path]) -> None:
    other = 4.500000000000001
    found = compare(REFERENCE, [REFERENCE[0], line(2, other), *REFERENCE[1:]], *finals)
    assert not found.bit_exact
    assert found.differences == (f"loss of iteration 2: {other.hex()} is not {(4.5).hex()}",)


def test_a_loss_that_is_missing_is_named(finals: tuple[Path, Path]) -> None:
    assert compare(REFERENCE, REFERENCE[:2], *finals).differences == ("loss of iteration 3: missing",)


def test_tensors_that_differ_or_are_missing_are_named(finals: tuple[Path, Path]) -> None:
    changed = {**HASHES, "optimizer0.0.exp_avg": "ff"}
    (finals[1] / "tp0-pp0-dp0.json").write_text(json.dumps(changed))
    del changed["rng.cpu"], changed["optimizer0.0.exp_avg"]
    (finals[1] / "tp0-pp0-dp1.json").write_text(json.dumps({**changed, "optimizer0.0.exp_avg": "c3"}))
    found = compare(REFERENCE, REFERENCE, *finals)
    assert found.differences == (
        "tp0-pp0-dp0/optimizer0.0.exp_avg: ff is not c3",
        "tp0-pp0-dp1/rng.cpu: missing is not d4",
    )


def test_nothing_compared_is_not_bit_exact(tmp_path: Path) -> None:
    assert not compare([], [], tmp_path, tmp_path).bit_exact


def attempt(lineage: str, pids: tuple[int, int], joined: float, start: int | None, last: int) -> list[Any]:
    """Events of two ranks: joined, 0.2 s of restore, a boundary each second, of rank 1 a bit later."""
    events = []
    for rank, pid in enumerate(pids):
        who = {"rank": rank, "pid": pid}
        first = (start or 0) + 1
        late = 0.1 * rank
        restored = {"iteration": start, "lineage": lineage, "blocked_secs": 0.2}
        events.append({"event": "joined", "time": joined + late, **who})
        events.append({"event": "restored", "time": joined + late + 0.2, **restored, **who})
        for iteration in range(first, last + 1):
            when = joined + late + 1 + iteration - first
            events.append({"event": "fence", "time": when - 0.2, "blocked_secs": 0.01, **who})
            events.append({"event": "fence", "time": when - 0.1, "blocked_secs": 0.02 * rank, **who})
            snapshot = {"iteration": iteration, "blocked_secs": 0.001}
            events.append({"event": "snapshot", "time": when, **snapshot, **who})
    return events


def test_the_cost_of_a_fault() -> None:
    events = attempt("aa", (1, 2), 100.0, None, 3) + attempt("bb", (11, 12), 110.0, 2, 5)
    lines = [line(3, 4.0, seen=103.2), line(4, 4.0, seen=103.9), line(3, 4.0, seen=111.0)]
    strike = Strike("writing", "copy", 3, [1], 104.0)
    cost = fault_cost(strike, events=events, lines=lines, gone={1: 104.7, 2: 104.1})
    assert (cost.restored_iteration, cost.iterations_lost, cost.iteration) == (2, 2, 3)
    assert tuple(cost.parts.values()) == pytest.approx((0.7, 5.4, 0.0, 0.2, 0.8))
    assert cost.total_secs == pytest.approx(111.1 - 104.0)
    assert (cost.source, cost.rebuilt_shards) == ("memory", ())


def rebuilt(pid: int, when: float, shard: str, **sources: int) -> dict[str, Any]:
    found = {mode: {"chunks": 1, "bytes": nbytes} for mode, nbytes in sources.items()}
    what = {"shards": [shard], "bytes": sum(sources.values()), "secs": 0.05 * pid / 11, "sources": found}
    return {"event": "rebuilt", "time": when, "rank": 0, "pid": pid, **what}


LOST = Strike("node", "node", 4, [0, 1], 104.0, frozenset({"a", "b"}))


def lost_node(*events: dict[str, Any]) -> FaultCost:
    found = [*attempt("aa", (1, 2), 100.0, None, 3), *attempt("bb", (11, 12), 110.0, 2, 5), *events]
    return fault_cost(LOST, events=found, lines=[], gone={1: 104.7, 2: 104.1})


def test_the_cost_of_a_lost_node_has_what_was_rebuilt_and_from_what() -> None:
    cost = lost_node(
        rebuilt(11, 110.1, "a", replica_parity=10, peer_parity=7), rebuilt(12, 110.1, "b", peer_parity=5)
    )
    assert (cost.source, cost.rebuilt_shards, cost.rebuilt_bytes) == ("peer_parity+replica_parity", ("a", "b"), 22)
    assert cost.rebuild_secs == pytest.approx(0.05 * 12 / 11)
    assert cost.rebuild_secs + cost.load_secs == pytest.approx(0.2)
    assert cost.total_secs == pytest.approx(111.1 - 104.0)


def test_a_lost_shard_that_was_not_rebuilt_is_an_error() -> None:
    with pytest.raises(ValueError, match="fault node: b were lost and not rebuilt"):
        lost_node(rebuilt(11, 110.1, "a", peer_parity=7))


def test_an_attempt_that_never_came_back_has_no_cost() -> None:
    events, strike = attempt("aa", (1, 2), 100.0, None, 3), Strike("rank", "forward", 3, [1], 104.0)
    with pytest.raises(ValueError, match="none after it that went on"):
        fault_cost(strike, events=events, lines=[], gone={1: 105.0, 2: 105.0})


class Lost:
    """Records which node is lost, and which takes its place."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def lose(self, node: str) -> list[int]:
        self.told.append(f"lost {node}")
        return [71, 72]

    def replace(self, node: str) -> None:
        self.told.append(f"started {node}")


def test_a_node_is_lost_once_a_snapshot_of_this_attempt_is_protected(tmp_path: Path) -> None:
    (tmp_path / "node1" / "tp0-pp1.0123abcd").mkdir(parents=True)
    loss, happened = NodeLoss("node1", "node2", 3, tmp_path / "marker"), Lost()
    losing = Losing(loss, tmp_path / "node1", happened, happened.replace)
    join = {"event": "joined", "rank": 4, "node": "node1"}
    protected = {"event": "protected", "iteration": 1}
    early = [("event", join), ("event", protected), ("iteration", line(1, 5.0)), ("event", join)]
    for kind, found in [*early, ("iteration", line(2, 4.5))]:  # the second start has protected nothing yet
        losing.see(kind, found)
        losing.poll()
    assert happened.told == [] and marks_of(loss) is None
    losing.see("event", protected)
    deadline = time.monotonic() + 10
    while not happened.told and time.monotonic() < deadline:
        losing.poll()
        time.sleep(0.01)
    losing.poll()
    assert happened.told == ["lost node1", "started node2"]
    assert not (tmp_path / "node1").exists()
    (told,) = marks_of(loss) or []
    assert (told["iteration"], told["protected"], told["ranks"], told["pids"]) == (3, 1, [4], [71, 72])
    assert told["shards"] == ["tp0-pp1"]


def test_a_marker_that_is_being_written_does_not_count(tmp_path: Path) -> None:
    loss = NodeLoss("node1", "node2", 3, tmp_path / "marker")
    loss.marker.touch()
    assert marks_of(loss) is None


def test_blocked_time_is_of_the_last_attempt() -> None:
    found = blocked_by_iteration(attempt("aa", (1, 2), 100.0, None, 2))
    assert found.keys() == {1, 2}
    assert (found[1].boundary, found[1].fence, found[1].slowest) == pytest.approx((0.001, 0.02, 0.031))


def test_a_node_that_nothing_replaces(tmp_path: Path) -> None:
    (tmp_path / "node1").mkdir()
    run, loss = demo_shrink.plan(FRAMEWORKS["megatron"], ["--iterations", "6"], tmp_path, "j")
    assert (run.least_nodes, run.digested, run.faults, loss.iteration) == (1, True, (loss,), 3)
    assert Config(**run.ftckpt).layouts == "tp2pp2dp2,tp2pp1dp2"
    happened = Lost()
    losing = Losing(loss, tmp_path / "node1", happened, happened.replace)
    losing.see("event", {"event": "protected", "iteration": 1})
    losing.see("iteration", line(2, 5.0))
    deadline = time.monotonic() + 10
    while not happened.told and time.monotonic() < deadline:
        losing.poll()
        time.sleep(0.01)
    losing.poll()
    assert happened.told == ["lost node1"]


DIGEST = {"weight/a": [4, "0a"], "master/a": [4, "0b"], "exp_avg/a": [4, "0c"], "exp_avg_sq/a": [4, "0d"]}
COST = FaultCost("shrink", (4, 5), "node", 3, 104.0, 2, 1, 1.0, 2.0, 0.5, 0.5, 1.0, "peer_parity", ("b",), 22)


def reshape_of(folder: Path, restored: dict[str, Any], told: bool = True) -> demo_shrink.Reshape:
    """Of a run that went from the digest of iteration 2 to ``restored``."""
    runs = [Run(name, folder / name, FRAMEWORKS["megatron"], []) for name in ("reference", SHRINK)]
    for run, digest, again in zip(runs, (DIGEST, restored), (False, True), strict=True):
        run.folder.mkdir(exist_ok=True)
        rows = [{"iteration": 2, "restored": not again, "digest": {}}, {"iteration": 2, "restored": again}]
        rows[1]["digest"] = digest
        run.digests.write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = {"event": "reshaped", "from": "tp2pp2dp2", "to": "tp2pp1dp2", "iteration": 2}
    sizes = {"secs": 0.25, "read_bytes": 2_000_000, "received_bytes": 1_000_000}
    events = [{**names, **sizes, "rank": rank, "time": 110.0 if told else 90.0} for rank in range(2)]
    watch = Watch(lines=[line(2, 4.5), line(3, 4.25 + 1 / 64)], events=events)
    return demo_shrink.conclude(COST, watch, REFERENCE, *runs)


def test_a_reshape_is_compared_with_the_reference_at_its_iteration(tmp_path: Path) -> None:
    found = reshape_of(tmp_path, DIGEST)
    assert found.bit_equal and found.compared == {"weights": 1, "masters": 1, "moments": 2}
    told = found.summary()
    assert (told["from"], told["to"], told["source"], told["bit_equal"]) == ("tp2pp2dp2", "tp2pp1dp2", "memory", True)
    assert told["rebuilt"] == {"shards": ["b"], "bytes": 22, "from": ["peer_parity"]}
    assert (told["iteration"], told["read_bytes"], told["largest_difference_of_a_loss"]) == (2, 4_000_000, 1 / 64)


def test_a_tensor_that_a_reshape_changed_or_left_out_is_named(tmp_path: Path) -> None:
    found = reshape_of(
        tmp_path, {**{key: DIGEST[key] for key in DIGEST if key != "weight/a"}, "exp_avg/a": [4, "00"]}
    )
    assert not found.bit_equal and found.differences == ("exp_avg/a", "weight/a")


def test_a_run_that_did_not_reshape_shows_nothing(tmp_path: Path) -> None:
    with pytest.raises(DemoError, match="no rank told of another layout after the fault"):
        reshape_of(tmp_path, DIGEST, told=False)


@pytest.mark.parametrize("equal", [True, False])
def test_report_and_verdict_of_a_reshape(
    equal: bool, finals: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reshape = reshape_of(tmp_path, DIGEST if equal else {})
    watch = Watch(lines=REFERENCE, events=[], secs=9.0)
    alone = demo.summarize([], FRAMEWORKS["megatron"], None, [], reference=watch, faulted=None, reshape=reshape)
    for found in (alone, {**summary(True, finals), "reshape": reshape.summary()}):
        assert demo.conclude(found, tmp_path) == (0 if equal else 1)
        told = capsys.readouterr().out.splitlines()
        verdict = "bit-equal" if equal else "NOT bit-equal, 4 differences"
        assert [
            line
            for line in told
            if line.startswith("demo: reshaped from tp2pp2dp2 to tp2pp1dp2 in iteration 2: " + verdict)
        ]
        assert json.loads(told[-1])["bit_equal"] is equal
        assert ("faults" in json.loads(told[-1])) == (found is not alone)
        assert json.loads((tmp_path / "summary.json").read_text())["reshape"]["bit_equal"] is equal
        page = (tmp_path / "report.html").read_text()
        assert ("4 logical tensors, all equal" in page) == equal and "tp2pp1dp2 after" in page
        parser = Page()
        parser.feed(page)
        assert (parser.open, parser.fetched) == ([], [])


def test_deepspeed_has_no_such_scene(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        demo.parse_args(["--framework", "deepspeed", "--scene", SHRINK])
    assert "a DeepSpeed job does not restart in another layout" in capsys.readouterr().err
    assert demo.parse_args(["--framework", "deepspeed"])[0].shrink is False
    args, _ = demo.parse_args(["--scene", SHRINK])
    assert args.shrink and args.scenes == [] and demo.parse_args([])[0].shrink


class Page(HTMLParser):
    """Collects what is not closed, and whatever a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data")]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href")]


def summary(bit_exact: bool, finals: tuple[Path, Path]) -> dict[str, Any]:
    events = attempt("aa", (1, 2), 100.0, None, 3) + attempt("bb", (11, 12), 110.0, 2, 3)
    cost = fault_cost(Strike("writing", "copy", 3, [1], 104.0), events=events, lines=[], gone={1: 104.7, 2: 104.1})
    watch = Watch(lines=REFERENCE, events=events, secs=9.0)
    lines = REFERENCE if bit_exact else [*REFERENCE, line(2, 4.75)]
    comparison = compare(REFERENCE, lines, *finals)
    return demo.summarize(
        ["--scene", "<script>"], FRAMEWORKS["megatron"], comparison, [cost], reference=watch, faulted=watch
    )


@pytest.mark.parametrize("bit_exact", [True, False])
def test_report_and_verdict(
    bit_exact: bool, finals: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = demo.conclude(summary(bit_exact, finals), tmp_path)
    told = capsys.readouterr().out.splitlines()
    page = (tmp_path / "report.html").read_text()
    if bit_exact:
        assert code == 0
        assert told[0] == f"demo: bit-exact, 1 fault survived, report in {tmp_path / 'report.html'}"
        assert "Bit-exact after 1 fault<" in page
    else:
        assert code == 1
        assert told[0].startswith("demo: loss of iteration 2: ") and told[-2].startswith(
            "demo: NOT bit-exact, 1 difference"
        )
        assert "Not bit-exact" in page and "loss of iteration 2" in page
    assert json.loads(told[-1]) == {"framework": "Megatron-core", "faults": 1, "bit_exact": bit_exact}
    assert json.loads((tmp_path / "summary.json").read_text())["bit_exact"] is bit_exact
    parser = Page()
    parser.feed(page)
    assert (parser.open, parser.fetched) == ([], [])
    assert not re.search(r"url\(|@import|https?:|<script", page)


def test_charts_cut_curves_and_choose_round_ticks() -> None:
    assert attempts_of([(1, 5.0), (2, 4.0), (2, 4.0), (3, 3.0)]) == [
        [(1, 5.0), (2, 4.0)],
        [(2, 4.0), (3, 3.0)],
    ]
    assert ticks_of(0.0, 14.2) == [0.0, 2.5, 5.0, 7.5, 10.0, 12.5, 15.0]
    assert ticks_of(3.0, 3.0)[0] <= 3.0 <= ticks_of(3.0, 3.0)[-1]


def test_the_report_needs_no_snapshot_events(finals: tuple[Path, Path]) -> None:
    assert "No snapshot was taken" in demo_report.render({**summary(True, finals), "blocked_secs": {}})


def test_flags_are_all_that_the_run_with_faults_has_more(tmp_path: Path) -> None:
    plain, saved = (FRAMEWORKS["megatron"].command(tmp_path, ["--seed", "5"], chosen) for chosen in ({}, SETTINGS))
    assert plain[0] == "ftckpt.megatron" and plain[-2:] == ["--seed", "5"]
    assert saved[: len(plain)] == plain
    assert Config.from_flags(saved[len(plain) :]) == (Config(**SETTINGS), [])


def test_a_section_is_all_that_the_run_with_faults_has_more(tmp_path: Path) -> None:
    shipped = json.loads((REPOSITORY / "configs" / "deepspeed_zero1_pp.json").read_text())
    configs = []
    for chosen in ({}, SETTINGS):
        *words, path = FRAMEWORKS["deepspeed"].command(tmp_path, ["--seed", "5"], chosen)
        assert words[0] == "ftckpt.deepspeed" and words[-3:] == ["--seed", "5", "--deepspeed_config"]
        configs.append(json.loads(Path(path).read_text()))
    plain, saved = configs
    assert saved.pop("ftckpt") == {**shipped.pop("ftckpt"), **SETTINGS}
    assert saved == plain and plain.keys() == shipped.keys()
    assert (plain["optimizer"]["params"]["betas"], plain["optimizer"]["params"]["torch_adam"]) == ([0.9, 0.95], True)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "PREPARES megatron"),
        (["--scene", "all"], "PREPARES megatron"),
        (["--scene", "rank", "--framework", "deepspeed"], "PREPARES deepspeed"),
        (["--framework=deepspeed", "--scene", "rank"], "PREPARES deepspeed"),
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
        for pid in owned(owner):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def owned(owner: str) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{OWNER_VAR}={owner}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_nothing(tmp_path: Path, signum: int) -> None:
    with start_demo(tmp_path, "--scene", "rank") as (child, owner):
        deadline = time.monotonic() + 150
        while len(owned(owner)) < 11 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(owned(owner)) >= 11, "the demo, two agents and eight ranks did not come up"
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
    assert found["framework"] == "DeepSpeed" and "deepspeed" in found["versions"]
    assert all(found["num_tensors_compared"][kind] >= 8 for kind in KINDS)
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
    assert (tmp_path / "timeline.html").exists()
    *killed, lost = found["faults"]
    for fault in killed:
        assert (fault["source"], fault["rebuilt_shards"]) == ("memory", [])
        assert 0 <= fault["iterations_lost"] <= 4
    assert "peer_parity" in lost["source"] and len(lost["rebuilt_shards"]) == len(lost["ranks"]) == 4
    assert lost["rebuilt_bytes"] > 5e5 and lost["rebuild_secs"] > 0
    for fault in found["faults"]:
        assert 0 < fault["total_secs"] < 120
        assert min(fault[f"{part.replace('-', '_')}_secs"] for part in PARTS if part != "rebuild") > 0
    if framework == "megatron":
        check_reshape(found["reshape"])
    else:
        assert found["reshape"] is None


def check_reshape(told: dict[str, Any]) -> None:
    assert (told["from"], told["to"], told["source"], told["bit_equal"]) == ("tp2pp2dp2", "tp2pp1dp2", "memory", True)
    assert told["differences"] == [] and min(told["tensors_compared"][kind] for kind in KINDS[:3]) > 20
    assert len(told["rebuilt"]["shards"]) == 4 and told["rebuilt"]["bytes"] > 5e5
    assert told["largest_difference_of_a_loss"] < 0.2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_node_lost_for_good_alone(tmp_path: Path) -> None:
    with start_demo(tmp_path, "--scene", SHRINK, "--iterations", "12") as (child, owner):
        output, _ = child.communicate(timeout=500)
        assert child.returncode == 0, output
        assert owned(owner) == []
    assert output.splitlines()[-2].startswith("demo: reshaped from tp2pp2dp2 to tp2pp1dp2 in iteration ")
    found = json.loads((tmp_path / "summary.json").read_text())
    check_reshape(found["reshape"])
    assert found["bit_exact"] is None and found["faults"] == []


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_each_scene_alone(tmp_path: Path, framework: str, scene: str) -> None:
    words = ["--framework", framework, "--scene", scene, "--iterations", "8"]
    with start_demo(tmp_path, *words) as (child, owner):
        output, _ = child.communicate(timeout=500)
        assert child.returncode == 0, output
        assert owned(owner) == []
    assert output.splitlines()[-2].startswith("demo: bit-exact, 1 fault survived, report in ")
