"""What a launcher run came to: who reads it, who may not, and when it is gone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ftckpt.errors import ConfigError, FtckptError, LostError
from ftckpt.frameworks import launcher
from ftckpt.store import outcome
from ftckpt.store.outcome import LauncherRun, RunOutcome, agent_of, launcher_run
from ftckpt.store.page import owner_word, pid_namespace

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in ("TORCHELASTIC_RUN_ID", "FTCKPT_RUN", "RANK", "GROUP_RANK"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / f"ftckpt-runs-{os.geteuid()}"


def records(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.run"))


def test_starts_are_counted_until_a_snapshot_is_made() -> None:
    assert [LauncherRun("a").begin().starts for _ in range(3)] == [0, 1, 2]
    LauncherRun("a").progress()
    assert [LauncherRun("a").begin().starts for _ in range(2)] == [0, 1]
    assert LauncherRun("a").read().starts == 2 and LauncherRun("b").read() == RunOutcome()


def test_a_process_that_begins_anew_is_no_further_start() -> None:
    """As DeepSpeed's door after ``load_checkpoint``: each attempt would count twice."""
    for attempt in range(2):
        run = LauncherRun("a")
        assert [run.begin().starts for _ in range(3)] == [attempt] * 3
    assert run.read().starts == 2


def test_the_first_end_counts_and_a_start_takes_it_back() -> None:
    run = LauncherRun("a")
    assert run.end(None, "no room") and not run.end(None, "no room")
    assert run.end(2, "refused") and not run.end(0, "done")
    assert run.read() == RunOutcome(0, 2, "refused")
    assert run.begin().over and not run.read().over
    run.remove()
    assert run.read() == RunOutcome()


def test_without_a_launcher_nothing_is_stored_and_everybody_is_the_first(folder: Path) -> None:
    run = launcher_run({})
    assert run.name == "" and run.end(2, "refused") and run.end(2, "refused") and not run.read().over
    assert not folder.exists()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"code": 2, "more": 1}', "\x00\xff"])
def test_a_record_that_cannot_be_read_ends_nothing(folder: Path, content: str) -> None:
    run = LauncherRun("a")
    run.end(2, "refused")
    (folder / "a.run").write_bytes(content.encode("latin1"))
    assert not run.read().over and run.problem
    assert run.end(2, "refused") and run.read().over


def test_a_folder_of_somebody_else_is_not_believed(folder: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    LauncherRun("a").end(2, "refused")
    folder.rename(theirs)
    folder.symlink_to(theirs)
    run = LauncherRun("a")
    assert not run.read().over and "symbolic link" in run.problem
    assert run.begin() == RunOutcome() and run.end(2, "refused")


def test_records_of_agents_that_ended_go(folder: Path) -> None:
    dead = subprocess.Popen(["sleep", "60"])
    names = [f"{owner_word(pid):x}-{pid_namespace()}" for pid in (dead.pid, os.getpid())]
    dead.kill()
    dead.wait()
    elsewhere = f"{1 << 30:x}-1"  # of another container: nobody here knows of its processes
    for name in (*names, elsewhere, "named"):
        LauncherRun(name).end(0, "done")
    LauncherRun("mine").begin()
    assert records(folder) == sorted([names[1], elsewhere, "named", "mine"])


def test_a_wrapper_is_not_taken_for_the_agent() -> None:
    """The name must be that of the process that stays; a shell between it and the rank is another in each attempt."""
    command = "import os; from ftckpt.store.outcome import launcher_run as r; print(r(os.environ).name)"
    names = [
        subprocess.run(
            ["sh", "-c", '"$@"; true', "wrapper", sys.executable, "-c", command],
            env={**os.environ, "TORCHELASTIC_RUN_ID": "x", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for _ in range(2)
    ]
    assert names == [f"{owner_word(os.getpid()):x}-{pid_namespace()}"] * 2


def test_a_run_is_named_by_who_starts_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    env = {"FTCKPT_RUN": "job.0.17", "FTCKPT_NODE": "n1", "TORCHELASTIC_RUN_ID": "x"}
    assert launcher_run(env).name == "job.0.17.n1"
    agent = agent_of({"TORCHELASTIC_RUN_ID": "x"})
    assert agent is not None and agent.owner == owner_word(os.getppid())
    monkeypatch.setattr(outcome, "_environment", lambda pid: (_ for _ in ()).throw(PermissionError()))
    assert agent_of({"TORCHELASTIC_RUN_ID": "x"}) is None and launcher_run({"TORCHELASTIC_RUN_ID": "x"}).name == ""


def shared(error: FtckptError) -> FtckptError:
    error.of_all_ranks = True
    return error


@pytest.mark.parametrize(
    ("env", "error", "said"),
    [
        ({"FTCKPT_RUN": "a"}, ConfigError("x"), 1),
        ({"FTCKPT_RUN": "a"}, LostError("x"), 1),
        ({"FTCKPT_RUN": "a"}, FtckptError("x"), 1),
        ({"FTCKPT_RUN": "a", "GROUP_RANK": "1"}, shared(LostError("x")), 0),
        ({"FTCKPT_RUN": "a", "GROUP_RANK": "1"}, LostError("x"), 1),
        ({"RANK": "1"}, shared(LostError("x")), 0),
        ({"RANK": "1"}, LostError("x"), 3),
        ({"RANK": "0"}, shared(LostError("x")), 3),
    ],
)
def test_an_error_is_said_once(
    env: dict[str, str],
    error: FtckptError,
    said: int,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """By the first rank of a machine; of what all ranks raise, on the machine of rank 0. Without a record by each."""
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert [launcher.refuse(error) for _ in range(3)] == [2, 2, 2]
    assert capfd.readouterr().err == "ftckpt: x\n" * said
    assert launcher.code_if_over() == (2 if error.final and "FTCKPT_RUN" in env else None)


def test_a_later_attempt_ends_at_once(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FTCKPT_RUN", "a")
    launcher_run(os.environ).end(2, "no such layout")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "20")
    for count, text in (("1", ""), ("20", "ftckpt: no such layout\n")):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
        assert launcher.main(["script"], "p", "u", lambda _: pytest.fail("it runs")) == 2
        assert capfd.readouterr().err == text
    launcher_run(os.environ).begin()
    launcher_run(os.environ).end(0, "finished at iteration 7")
    assert launcher.main(["script"], "p", "u", lambda _: pytest.fail("it runs")) == 0
    assert capfd.readouterr().err == "ftckpt: finished at iteration 7\n"
    with pytest.raises(SystemExit) as ended:
        launcher.leave_if_over()
    assert ended.value.code == 0


LEAVING = """
import atexit, concurrent.futures, sys, threading, time
from ftckpt.frameworks import launcher

def main(argv):
    pool = concurrent.futures.ThreadPoolExecutor(1)
    pool.submit(time.sleep, 0.05)
    threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
    atexit.register(print, "registered")
    {end}

launcher.leave(main)
"""


@pytest.mark.parametrize(
    ("end", "code", "error"),
    [
        ("return 0", 0, ""),
        ("return 2", 2, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(300)", 44, ""),
        ("sys.exit('no data')", 1, "no data\n"),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
        ("raise ValueError('x')", 1, "ValueError: x"),
    ],
)
def test_a_process_leaves_as_the_interpreter_does(end: str, code: int, error: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LEAVING.format(end=end)], env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout) == (code, "thread\nregistered\n")
    assert error in ended.stderr and bool(error) == bool(ended.stderr)


ASKING = """
import threading, time
from datetime import timedelta
from torch._C._distributed_c10d import HashStore
from ftckpt.frameworks import launcher

def ask():
    while True:
        try:
            store.wait(["never"], timedelta(milliseconds=2))
        except RuntimeError:
            pass

store = HashStore()
for _ in range(4):
    threading.Thread(target=ask, daemon=True).start()
time.sleep(0.05)
launcher.leave(lambda _: 0)
"""


LATE = """
from datetime import timedelta
from torch._C._distributed_c10d import HashStore
from ftckpt.notice import Call
store = HashStore()
question = Call(lambda: store.wait(["never"], timedelta(milliseconds=300)))
raise SystemError("training fails")
"""


def test_a_question_to_the_store_aborts_no_process_that_ends() -> None:
    """Without the runner, too: what a rank failed of is its exit code."""
    ended = subprocess.run(
        [sys.executable, "-c", LATE], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert ended.returncode == 1 and "training fails" in ended.stderr


def test_threads_that_ask_for_the_interpreter_abort_nothing() -> None:
    """Code of torch that comes back from a wait finds no interpreter any more, and C++ answers that with abort."""
    ended = subprocess.run(
        [sys.executable, "-c", ASKING], env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60, check=False
    )
    assert ended.returncode == 0
