"""The record of a launcher run: who reads it, who may not, and when it is deleted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from torch.distributed import DistNetworkError
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from ftckpt.errors import ConfigError, FtckptError, LostError
from ftckpt.frameworks import launcher
from ftckpt.memory import launch_record
from ftckpt.memory.launch_record import LauncherRun, RunOutcome, launcher_run
from ftckpt.memory.page import owner_word, pid_namespace
from ftckpt.runner import worker
from tests.support.errors import lacks
from tests.support.processes import run_python


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(launch_record, "_runs", {})
    for name in ("TORCHELASTIC_RUN_ID", "FTCKPT_RUN", "RANK", "GROUP_RANK"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / f"ftckpt-runs-{os.geteuid()}"


def launched(env: Mapping[str, str] = os.environ) -> LauncherRun:
    """The record as another process of this launcher run finds it."""
    launch_record._runs.clear()
    return launcher_run(env)


def records(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.run"))


def test_starts_are_counted_until_a_snapshot_is_made() -> None:
    assert [LauncherRun("a").begin("j") for _ in range(3)] == [0, 1, 2]
    LauncherRun("a").progress()
    assert [LauncherRun("a").begin("j") for _ in range(2)] == [0, 1]
    LauncherRun("a").begin("j")
    LauncherRun("a").take_back()
    assert LauncherRun("a").read().starts == 2 and LauncherRun("b").read() == RunOutcome()


def test_an_attempt_that_comes_further_than_all_before_it_ends_the_row() -> None:
    """It resumes from checkpoints of its script. Attempts that fail at the same place are counted, from the first."""
    run = "a"
    reached = (99, 4, 8, 8, 12, 12, 11, 12)  # the first of these is of another launcher run
    assert [LauncherRun(run).begin("j", at) for at in reached] == [0, 1, 0, 1, 0, 1, 2, 3]
    assert [LauncherRun("b").begin("j", at) for at in (-1, 5, 5, 5)] == [0, 1, 2, 3]
    assert [LauncherRun("c").begin("j", at) for at in (-1, -1, -1, 3, 3)] == [0, 1, 2, 0, 1]
    assert [LauncherRun("c").begin("k", at) for at in (99, 1, 1)] == [0, 1, 2], "of another job"


def test_the_first_end_counts_and_the_process_that_came_to_it_may_begin_anew() -> None:
    """A second engine, for example; later processes see the first end."""
    run = LauncherRun("a")
    assert not run.before.over
    assert run.end(None, "no room") and not run.end(None, "no room")
    assert run.end(2, "refused") and not run.end(0, "done")
    assert run.read() == RunOutcome(0, 2, "refused") == LauncherRun("a").before
    assert run.read().of("j") == run.read(), "whoever has ended it did not know the job"
    run.begin("j")
    assert not run.read().over
    run.remove()
    assert run.read() == RunOutcome()


@pytest.mark.parametrize("code", [0, 2])
def test_what_another_job_came_to_ends_none(
    code: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A shell that runs one after the other with ``FTCKPT_RUN`` set. The runner sees no more than flags and
    environment; whoever is named by neither is taken for the only one."""
    monkeypatch.setenv("FTCKPT_RUN", "a")
    monkeypatch.setattr(worker, "_run", lambda *given: 7)
    launched().begin("one")
    launched().end(code, "one has ended")
    for words, ended in ((["--ftckpt-job", "two"], 7), (["--ftckpt-job=one"], code), ([], code)):
        launched()
        assert worker.main(["script", *words]) == ended
    for job, over in (("two", None), ("one", code)):
        monkeypatch.setenv("FTCKPT_JOB", job)
        launched()
        assert launcher.code_if_over() == over
        launched()
        assert launcher.code_if_over("two") is None, "what is configured comes before the environment"
    monkeypatch.setenv("FTCKPT_JOB", "two")
    launched()
    launcher.refuse(ConfigError("two is wrong"))
    assert "two is wrong" in capfd.readouterr().err
    launched()
    assert launcher.code_if_over() == 2
    assert launcher.code_if_over("one") is None


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
    assert not run.read().over and run.problem
    assert run.begin("j") == 0 and run.end(2, "refused")


def test_records_of_agents_that_ended_go(folder: Path) -> None:
    dead = subprocess.Popen(["sleep", "60"])
    names = [f"{owner_word(pid):x}-{launch_record.this_machine()}-0f" for pid in (dead.pid, os.getpid())]
    # Of another container, and of another machine with this folder: nobody here knows of their processes.
    others = [f"{owner_word(dead.pid):x}-{where}-0f" for where in ("1-0a", f"{pid_namespace()}-0a")]
    dead.kill()
    dead.wait()
    for name in (*names, *others, "named"):
        LauncherRun(name).end(0, "done")
    LauncherRun("mine").begin("j")
    assert records(folder) == sorted([names[1], *others, "named", "mine"])


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
    """By the first rank of a machine; errors of all ranks on the machine of rank 0. Without a record by each rank."""
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert [launcher.refuse(error) for _ in range(3)] == [2, 2, 2]
    assert capfd.readouterr().err == "ftckpt: x\n" * said
    launched()
    assert launcher.code_if_over() == (2 if error.final and "FTCKPT_RUN" in env else None)


def test_a_later_attempt_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Under torchrun its table repeats the reason, otherwise a line on stderr."""
    monkeypatch.setenv("FTCKPT_RUN", "a")
    monkeypatch.setattr(worker, "_run", lambda *given: pytest.fail("it runs"))
    launcher_run(os.environ).end(2, "no such layout")
    launched()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", path := str(tmp_path / "error.json"))
    assert worker.main(["script"]) == 2 and not capfd.readouterr().err
    table = str(ChildFailedError("train.py", {0: ProcessFailure(0, os.getpid(), 2, path)}))
    assert "traceback : ftckpt: no such layout\n" in table
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    launched()
    assert worker.main(["script"]) == 2
    assert capfd.readouterr().err == "ftckpt: no such layout\n"


def test_torchrun_shows_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", path := str(tmp_path / "error.json"))
    launcher.refuse(LostError("two\nlines"))
    assert "traceback : ftckpt: two lines\n" in str(ChildFailedError("x", {3: ProcessFailure(3, 7, 2, path)}))


def test_an_error_that_no_script_catches_is_known_to_the_next_attempt(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FTCKPT_RUN", "a")
    shown: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: shown.append(error))
    for _ in range(2):  # by each engine
        launcher.follow_uncaught()
    errors = [ValueError("of the script"), FtckptError("may pass"), LostError("lost")]
    for error in errors:
        assert not launched().before.over
        sys.excepthook(type(error), error, None)
    assert shown == errors[:1] and launched().before == RunOutcome(0, 2, "lost")
    assert not lacks(capfd.readouterr().err, "ftckpt", "may pass", "lost")


def test_the_runner_of_deepspeed_knows_a_job_by_its_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTCKPT_RUN", "a")
    monkeypatch.setattr(worker, "_run", lambda *given: 7)
    launched().end(0, "done", job="one")
    for job, code in (("one", 0), ("two", 7)):
        launched()
        (tmp_path / "ds.json").write_text(json.dumps({"ftckpt": {"enabled": True, "job": job}}))
        assert worker.main(["script", "--deepspeed_config", str(tmp_path / "ds.json")], "deepspeed") == code


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (MemoryError("no room for the next model"), None),
        (ConfigError("the next one is wrong"), 2),
        (ConnectionError("upload of the model: Connection reset by peer"), None),
        (DistNetworkError("failed to recv, got 0 bytes"), 0),
    ],
)
def test_a_script_that_fails_after_its_end_is_not_done(
    error: Exception, code: int | None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """But one that has lost another rank, as that crashes in its exit, is."""
    monkeypatch.setenv("FTCKPT_RUN", "a")
    monkeypatch.setattr(sys, "excepthook", lambda *shown: None)
    launcher.follow_uncaught()
    launched().end(0, "done", job="j")
    sys.excepthook(type(error), error, None)
    launched()
    assert launcher.code_if_over() == code
    assert not isinstance(error, ConfigError) or str(error) in capfd.readouterr().err


ENDED = """
import os, sys
from ftckpt.frameworks import launcher
from ftckpt.memory.launch_record import launcher_run

def main(argv):
    launcher_run(os.environ).end(0, "done")
    {end}

launcher.leave(main)
"""


@pytest.mark.parametrize(
    ("end", "is_done"),
    [("sys.exit()", True), ("os.abort()", True), ("sys.exit(3)", False), ("raise MemoryError", False)],
)
def test_under_a_runner_it_is_not_done_either(end: str, is_done: bool, tmp_path: Path) -> None:
    """A crash in the exit is none of the script's."""
    run_python(ENDED.format(end=end), FTCKPT_RUN="a", FTCKPT_NODE="n", TMPDIR=str(tmp_path))
    assert LauncherRun("a.n").read().code == (0 if is_done else None)


PARSES = "import argparse; p = argparse.ArgumentParser(); p.add_argument('--layers', type=int); "


@pytest.mark.parametrize(
    ("script", "code"),
    [
        (PARSES + "p.parse_args(['--layer', '4']); p.parse_args(['--nothing'])", 2),
        (PARSES + "p.parse_args(['--help'])", None),
        ("sys.exit(2)", None),
    ],
)
def test_arguments_that_a_script_does_not_take_are_tried_once(script: str, code: int | None, tmp_path: Path) -> None:
    """Unlike another exit with the same code, whose meaning is unknown."""
    text = f"import sys\nfrom ftckpt.frameworks import launcher\ndef main(argv):\n    {script}\nlauncher.leave(main)"
    run_python(text, FTCKPT_RUN="a", FTCKPT_NODE="n", TMPDIR=str(tmp_path))
    assert LauncherRun("a.n").read().code == code


LEAVING = """
import atexit, concurrent.futures, sys, threading, time
from ftckpt.frameworks import launcher
from ftckpt.session.gc_pause import imports_that_stay

def main(argv):
    global text, raw
    with imports_that_stay():
        text = open(sys.argv[1] + "/text", "w")
    raw = open(sys.argv[1] + "/raw", "wb")
    print("not flushed", file=text)
    raw.write(b"nor this")
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
def test_a_process_leaves_as_the_interpreter_does(end: str, code: int, error: str, tmp_path: Path) -> None:
    ended = run_python(LEAVING.format(end=end), tmp_path)
    assert (ended.returncode, ended.stdout) == (code, "thread\nregistered\n")
    assert error in ended.stderr and bool(error) == bool(ended.stderr)
    assert (tmp_path / "text").read_text() == "not flushed\n" and (tmp_path / "raw").read_bytes() == b"nor this"


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
from ftckpt.notice import StoreCall
store = HashStore()
question = StoreCall(lambda: store.wait(["never"], timedelta(milliseconds=300)))
raise SystemError("training fails")
"""


def test_a_question_to_the_store_aborts_no_process_that_ends() -> None:
    """Without the runner, too: what a rank failed of is its exit code."""
    ended = run_python(LATE)
    assert ended.returncode == 1 and "training fails" in ended.stderr


def test_threads_that_ask_for_the_interpreter_abort_nothing() -> None:
    """Code of torch that comes back from a wait finds no interpreter any more, and C++ answers that with abort."""
    ended = run_python(ASKING)
    assert ended.returncode == 0, ended.stderr
