"""Launch history: attempts, verdicts and errors of the runs of a launcher."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import DistNetworkError
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from ftckpt.errors import ConfigError, FtckptError, LaunchError, LostError
from ftckpt.frameworks import launcher
from ftckpt.frameworks.launcher import is_of_another_rank
from ftckpt.memory import launch_record
from ftckpt.memory.launch_record import LauncherRun, RunOutcome, launcher_run
from ftckpt.runner import worker
from tests.support.errors import lacks
from tests.support.pool import run_ranks
from tests.support.processes import run_python

# --- the record of a launcher run ---


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


def shared(error: FtckptError) -> FtckptError:
    error.of_all_ranks = True
    return error


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


# --- a script's own load, which may be partial, does not resume from half-loaded state ---


@pytest.mark.parametrize("touched", [True, False])
def test_a_script_under_deepspeed_is_awaited_only_where_nothing_was_touched(
    touched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = pytest.importorskip("ftckpt.deepspeed.session")
    lost, awaited = LostError("gone"), list[Any]()
    lost.touched = touched

    def refuse(*_: Any, **__: Any) -> None:
        raise lost

    for name, value in {"EngineSession": refuse, "AwaitedLoad": lambda *given: awaited.append(given)}.items():
        monkeypatch.setattr(session, name, value)
    monkeypatch.setattr(session.launcher, "go_on", lambda: None)
    monkeypatch.setattr(session.dist, "is_initialized", lambda: True)
    config: Any = SimpleNamespace(on_lost="storage")
    if touched:
        with pytest.raises(LostError, match="gone"):
            session.follow(lambda: ("engine",), (), {}, config)
    else:
        session.follow(lambda: ("engine",), (), {}, config)
    assert bool(awaited) is not touched


# --- the owner of an exception, by its type and by the code that raised it, never by its text ---


def caught(action: Callable[[], object]) -> BaseException:
    with pytest.raises(Exception) as caught:
        action()
    return caught.value


def upload() -> None:
    raise ConnectionError("upload of the model: Connection reset by peer")


def wrong_text() -> None:
    raise RuntimeError("[pair.cc:553] Connection closed by peer")


def wait_for_a_key() -> None:
    dist.HashStore().wait(["k"], timedelta(milliseconds=1))


def wrong_argument() -> None:
    """A statement of torch's own, in a module that communicates."""
    exec("raise RuntimeError('Broken pipe')", {"__name__": "torch.distributed.distributed_c10d"})


def launch(cause: Callable[[], None]) -> None:
    try:
        cause()
    except RuntimeError as error:
        raise LaunchError("Connection reset by peer") from error


@pytest.mark.parametrize("action", [upload, wrong_text, wrong_argument, lambda: launch(wrong_text)])
def test_a_script_s_own_failure_is_its_own_whatever_it_says(action: Callable[[], None]) -> None:
    assert not is_of_another_rank(caught(action))


@pytest.mark.parametrize("action", [wait_for_a_key, lambda: launch(wait_for_a_key)])
def test_errors_of_torch_distributed_are_of_another_rank(action: Callable[[], None]) -> None:
    assert is_of_another_rank(caught(action))
    assert not is_of_another_rank(ConfigError("Connection reset by peer"))


def lose(rank: int, world_size: int, kind: str) -> tuple[str, bool]:
    import torch

    from ftckpt.group import Group

    group = Group(20.0)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    actions: dict[str, Callable[[], object]] = {
        "barrier": dist.barrier,
        "object": lambda: dist.all_gather_object([None, None], 3),
        "model": lambda: torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2)),
        "group": group.barrier,
    }
    try:
        actions[kind]()
    except RuntimeError as error:
        return type(error).__name__, is_of_another_rank(error)
    return "", False


@pytest.mark.multiproc
@pytest.mark.parametrize("kind", ["barrier", "object", "model", "group"])
def test_a_rank_that_has_lost_another_says_nothing_of_itself(kind: str) -> None:
    first, _ = run_ranks(lose, 2, kind, expect_failures=True, stand_in=False)
    assert first.value == ("RuntimeError", True), first
