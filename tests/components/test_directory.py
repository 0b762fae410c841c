"""The directories of jobs and arenas: who holds them, and what is removed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from ftckpt.cli.targets import jobs_in
from ftckpt.errors import ArenaError
from ftckpt.memory.arena import Arena
from ftckpt.memory.atomic_files import remove_unfinished
from ftckpt.memory.directory import (
    SMP_LOCK_NAME,
    arena_path,
    clean_job,
    list_arenas,
    node_directory,
    remove_job_if_empty,
)
from ftckpt.memory.locks import FileLock, JobLock
from ftckpt.model.fragment import Box, Fragment
from ftckpt.model.manifest import Manifest
from tests.support.errors import lacks, raises

pytestmark = pytest.mark.usefixtures("as_flags")

REPOSITORY = Path(__file__).parents[2]
WEIGHTS = Fragment.whole("w", "F32", (3000,), Box((0,), (3000,)))


def manifest_of(tp: int) -> Manifest:
    return Manifest({"tp": tp}, {"tp": 2}, (WEIGHTS,), (), 100, 8192)


@contextmanager
def holder(code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A process that runs ``code``, reports that, and waits until it is killed."""
    code = f"import sys\nfrom pathlib import Path\n{code}\nprint('ready', flush=True)\nsys.stdin.read()"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


LOCK_FILE = """
from ftckpt.memory.locks import FileLock
lock = FileLock(Path(sys.argv[1]), 0, 'x', 'y')
"""
LOCK_ARENA = """
from ftckpt.memory.arena import Arena
arena = Arena.open(Path(sys.argv[1]), writable=True)
arena.lock(0)
"""
LOCK_JOB = """
from ftckpt.memory.locks import JobLock
lock = JobLock(Path(sys.argv[1]), 0)
"""


TRY_LOCK = """
import sys
from pathlib import Path
from ftckpt.memory.locks import FileLock
try:
    FileLock(Path(sys.argv[1]), 0, "it", "wait")
except Exception as error:
    print(error, end="")
else:
    print("free", end="")
"""


def answer_to_another(path: Path) -> str:
    """The message that another process gets when it tries to lock ``path``."""
    command = [sys.executable, "-c", TRY_LOCK, str(path)]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout


def test_a_live_holder_is_named_and_a_dead_one_forgotten(arena_root: Path) -> None:
    arena = Arena.create(node_directory(arena_root, "job", "node"), manifest_of(0), 2)
    with holder(LOCK_ARENA, arena.path) as process:
        begin = time.monotonic()
        with raises(ArenaError, "tp0", f"process {process.pid}", "wait"):
            arena.lock(0.3)
        assert 0.3 <= time.monotonic() - begin < 15
        os.kill(process.pid, signal.SIGKILL)
        arena.lock(30)
    arena.close()


def test_a_forked_worker_does_not_keep_the_lock(arena_root: Path) -> None:
    fork = LOCK_FILE + "\nimport os\npid = os.fork()\nif pid == 0:\n    import time; time.sleep(60)\n"
    fork += "Path(sys.argv[2]).write_text(str(pid))"
    with holder(fork, arena_root / "lock", arena_root / "worker") as process:
        worker = int((arena_root / "worker").read_text())
        try:
            with pytest.raises(ArenaError, match=f"process {process.pid}"):
                FileLock(arena_root / "lock", 0, "a", "b")
            os.kill(process.pid, signal.SIGKILL)
            FileLock(arena_root / "lock", 30, "a", "b").release()
            os.kill(worker, 0)
        finally:
            os.kill(worker, signal.SIGKILL)


def test_a_second_lock_in_one_process_is_refused_and_does_not_drop_the_first(arena_root: Path) -> None:
    with FileLock(arena_root / "lock", 0, "a", "b"):
        with pytest.raises(ArenaError):
            FileLock(arena_root / "lock", 60, "a", "b")
        assert not lacks(answer_to_another(arena_root / "lock"), str(os.getpid()))
    assert answer_to_another(arena_root / "lock") == "free"
    FileLock(arena_root / "lock", 0, "a", "b").release()


def test_a_lock_file_that_was_removed_protects_nothing(arena_root: Path) -> None:
    with FileLock(arena_root / "lock", 0, "a", "b"):
        (arena_root / "lock").unlink()
        with FileLock(arena_root / "lock", 0, "a", "b"):
            assert (arena_root / "lock").exists()


def test_the_job_lock_tells_who_runs(arena_root: Path) -> None:
    node_dir = node_directory(arena_root, "train7", "node")
    with holder(LOCK_JOB, node_dir) as process:
        with raises(ArenaError, "'train7'", f"process {process.pid}", "--ftckpt-job"):
            JobLock(node_dir, 0.1)
        assert not remove_job_if_empty(arena_root, "train7", "node")
        assert node_dir.exists()
    JobLock(node_dir, 5).release()


def test_an_ended_job_leaves_nothing(arena_root: Path) -> None:
    node_dir = node_directory(arena_root, "job", "node")
    lock = JobLock(node_dir, 0)
    arena = Arena.create(node_dir, manifest_of(0), 2)
    arena.lock(0)
    assert not remove_job_if_empty(arena_root, "job", "node")
    arena.remove()
    assert remove_job_if_empty(arena_root, "job", "node")
    lock.release()
    assert list(arena_root.iterdir()) == []
    assert remove_job_if_empty(arena_root, "job", "node")
    with JobLock(node_dir, 0):  # the next attempt begins from nothing
        assert node_dir.stat().st_mode & 0o777 == 0o700


def test_clean_refuses_a_live_job_then_takes_all(arena_root: Path) -> None:
    node_dir = node_directory(arena_root, "job", "node")
    paths = []
    for tp in range(2):
        arena = Arena.create(node_dir, manifest_of(tp), 2)
        arena.close()
        paths.append(arena.path)
    (node_dir / ".tp3.00000000.new-77").mkdir()
    keep = node_directory(arena_root, "job2", "node")
    for code, path in ((LOCK_JOB, node_dir), (LOCK_ARENA, paths[1])):
        with holder(code, path) as process:
            with pytest.raises(ArenaError, match=f"process {process.pid}"):
                clean_job(arena_root, "job")
            assert list_arenas(node_dir) == paths
    assert clean_job(arena_root, "job") == paths
    assert list(arena_root.iterdir()) == [keep.parent]
    assert clean_job(arena_root, "job") == []


def test_what_is_none_of_ftckpts_stays(arena_root: Path) -> None:
    node_dir = node_directory(arena_root, "job", "a")
    Arena.create(node_dir, manifest_of(0), 2).close()
    mine = [
        node_dir / "backup" / "slot0.safetensors", node_dir / "notes", node_dir / ".notes.new",
        node_dir / ".cache.0123abcd.new" / "kept", node_dir.parent / "notes", node_dir.parent / "my node" / "notes",
    ]  # fmt: skip
    for path in mine:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    (node_dir / ".mirror").symlink_to(node_dir / "backup")
    assert [path.name for path in list_arenas(node_dir)] == [arena_path(node_dir, manifest_of(0)).name]
    remove_unfinished(node_dir)
    assert not remove_job_if_empty(arena_root, "job", "a")
    told: list[str] = []
    assert len(clean_job(arena_root, "job", told.append)) == 1
    assert sorted(path for path in node_dir.parent.rglob("*") if path.is_file()) == sorted(mine)
    assert all(any(str(path) in line for line in told) for path in (node_dir / "backup", mine[1], mine[4]))


STARTS = """
import sys
from pathlib import Path
from ftckpt.memory.locks import JobLock
for number in range(300):
    with JobLock(Path(sys.argv[1]), 10) as lock:
        arena = lock.path.with_name(f"tp0.{number:08x}")
        arena.mkdir()
        for name in ("a", "b"):
            (arena / name).write_text("x")
        assert lock.path.exists() and {path.name for path in arena.iterdir()} == {"a", "b"}
        (lock.path.parent / "done").write_text("")
"""


def test_starts_beside_a_clean_that_goes_on_and_on_lose_nothing(arena_root: Path) -> None:
    node_dir = arena_root / "ftckpt-job" / "node"
    process = subprocess.Popen(
        [sys.executable, "-c", STARTS, str(node_dir)], stderr=subprocess.PIPE, text=True, cwd=REPOSITORY
    )
    try:
        while process.poll() is None:
            with suppress(ArenaError):  # a start is under way
                clean_job(arena_root, "job")
        assert process.stderr is not None
        assert process.returncode == 0, process.stderr.read()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "-x", "a b", "x" * 300])
def test_names_that_could_leave_the_root(arena_root: Path, name: str) -> None:
    for call in (
        lambda: node_directory(arena_root, name, "node"),
        lambda: node_directory(arena_root, "job", name),
        lambda: clean_job(arena_root, name),
        lambda: remove_job_if_empty(arena_root, "job", name),
    ):
        with pytest.raises(ArenaError):
            call()


def test_a_link_in_place_of_the_job(arena_root: Path) -> None:
    (arena_root / "elsewhere").mkdir()
    (arena_root / "ftckpt-job").symlink_to(arena_root / "elsewhere")
    (arena_root / "ftckpt-gone").symlink_to(arena_root / "nowhere")
    (arena_root / "ftckpt-file").write_text("")
    for job, text in (("job", "symbolic link"), ("gone", "symbolic link"), ("file", "not a directory")):
        with pytest.raises(ArenaError, match=text):
            node_directory(arena_root, job, "node")
        with pytest.raises(ArenaError, match=text):
            clean_job(arena_root, job)
    assert (arena_root / "elsewhere").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_what_belongs_to_another_user_is_left_alone(arena_root: Path) -> None:
    node_dir = node_directory(arena_root, "job", "node")
    arena = Arena.create(node_dir, manifest_of(0), 2)
    arena.close()
    os.chown(arena.path, 12345, -1)
    with raises(ArenaError, "uid 12345", "--ftckpt-job"):
        Arena.open(arena.path)
    for path in (node_dir, node_dir.parent):
        os.chown(path, 12345, -1)
        with raises(ArenaError, "12345"):
            node_directory(arena_root, "job", "node")
        with raises(ArenaError, "12345"):
            clean_job(arena_root, "job")
    assert list_arenas(node_dir) == [arena.path]


def test_records_of_launchers_are_no_job_whatever_jobs_are_called(tmp_path: Path) -> None:
    for name in ("ftckpt-night", "ftckpt-runs-night", "ftckpt-runs-1000"):
        (tmp_path / name / "n0").mkdir(parents=True)
        (tmp_path / name / "n0" / SMP_LOCK_NAME).touch()
    assert [one.job for one in jobs_in(tmp_path)] == ["night", "runs-night"]
