"""The record of a launcher run on this machine: it outlives the ranks and ends the launcher's retries.

A launcher restarts all ranks whenever one fails: also after an error that every attempt repeats, and after a crash
in the exit of a completed job. Each attempt first reads the run's file: the number of consecutive starts without
progress, and whether the run is over. The file name contains the launcher's process and a digest of the launch. So
another run of the same job has another file, even by the same process, and later runs can tell which files are
stale.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from pathlib import Path

from ftckpt.config import node_here
from ftckpt.errors import FtckptError
from ftckpt.forks import off_in_children
from ftckpt.memory.atomic_files import replace_file
from ftckpt.memory.directory import clean_job, require_own
from ftckpt.memory.locks import FileLock
from ftckpt.memory.page import owner_lives, owner_word, pid_namespace

RUN_VARIABLE = "FTCKPT_RUN"
"""Names a launcher run without torchrun; scripts that restart a job set it."""
MOST_STARTS = 3
"""Maximum of consecutive starts without a snapshot and without further progress in training."""
_LOCK_SECS = 5.0
_TORCHRUN = "TORCHELASTIC_RUN_ID"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_OF_PROCESS = re.compile(r"([0-9a-f]+)-([0-9]+)-([0-9a-f]+)-[0-9a-f]+")
_KEPT_SECS = 14 * 86400.0
"""Age at which a record is stale if it is unknown whether its launcher runs. It exceeds any script's pause between
restarts, and losing a count of failures is harmless."""
_SUFFIX = ".run"
RUNS_PREFIX = "ftckpt-runs-"
"""Prefix of a directory name, followed by a user id; it is no job's directory."""


@dataclass(frozen=True)
class RunOutcome:
    """The outcome of one launcher run on one machine so far.

    ``code``: None while the run may continue, otherwise the exit code of every further attempt, for the reason
    ``text``. ``starts``: starts of ``job`` since the last committed snapshot or the last progress beyond earlier
    attempts. ``arena``: the root of snapshots that a rank may have left behind by crashing during their removal.
    ``attempts``: all starts of ``job``. ``furthest``: the furthest boundary that an attempt is known to have passed,
    except the current one.
    """

    starts: int = 0
    code: int | None = None
    text: str = ""
    arena: str = ""
    job: str = ""
    attempts: int = 0
    furthest: int = -1

    @property
    def over(self) -> bool:
        return self.code is not None

    def of(self, job: str) -> RunOutcome:
        """This outcome if it belongs to ``job`` or either job is unknown (""); otherwise an empty one."""
        return self if not job or self.job in ("", job) else RunOutcome()

    def with_reached(self, reached: int) -> RunOutcome:
        """This outcome after the last attempt passed ``reached`` as its last boundary; -1: unknown."""
        # The first attempt has none to compare with: a second one that fails at the same boundary is no progress.
        if not self.attempts:
            return self
        is_further = self.attempts > 1 and reached > self.furthest
        return replace(self, starts=0 if is_further else self.starts, furthest=max(reached, self.furthest))


class LauncherRun:
    """One process's access to the record of the launcher run ``name``; "" stores nothing and is never over.

    No method raises: a job trains without a record too, and ``problem`` is the reason. ``job`` is the job of this
    process, "" if unknown: the outcome of another job of the same launcher does not apply to it.
    """

    def __init__(self, name: str, heard: LauncherRun | None = None) -> None:
        self.name = name
        self.job = ""
        self.problem = ""
        self._heard = heard or self
        self._found: dict[str, RunOutcome] = {}  # job → outcome before its first ``begin`` in this process
        self._is_done = False

    def unheard(self) -> LauncherRun:
        """A run that stores nothing, for a rank that another one speaks for; its ``end`` marks this run as done."""
        return LauncherRun("", self)

    @cached_property
    def before(self) -> RunOutcome:
        """The outcome before this process, without its own changes."""
        return self.read()

    def read(self) -> RunOutcome:
        """The outcome now; empty if there is no readable record."""
        try:
            return _load(_path(self.name)) if self.name else RunOutcome()
        except (OSError, ValueError, TypeError, FtckptError) as error:
            self.problem = str(error)
            return RunOutcome()

    def begin(self, job: str, reached: int = -1) -> int:
        """Count a start of ``job``; returns the number of consecutive starts without progress before it.

        Clears an earlier end: the caller knows of it and trains nevertheless. A second call for the same job in this
        process, as after a load from storage, is not counted; one launcher may start several jobs in turn.
        ``reached``: the last boundary that the previous start is known to have passed. Stale records are removed.
        """
        self.job, is_first = job, job not in self._found

        def found(now: RunOutcome) -> RunOutcome:
            return now.of(job).with_reached(reached) if is_first else now.of(job)

        def change(now: RunOutcome) -> RunOutcome:
            now = found(now)
            attempts = now.attempts + is_first
            return RunOutcome(now.starts + is_first, job=job, attempts=attempts, furthest=now.furthest)

        if is_first:
            self._found[job] = found(self.before)
        self._change(change)
        _remove_stale()
        return self._found[job].starts

    def take_back(self) -> None:
        """Uncount this start: the obstacle to its snapshots may be gone at the next one."""
        self._change(lambda now: replace(now, starts=max(0, now.starts - 1)))

    def progress(self) -> None:
        """Reset the count of starts: this attempt has a committed snapshot."""
        self._change(lambda now: replace(now, starts=0))

    def end(self, code: int | None, text: str, arena: str = "", job: str = "") -> bool:
        """Store the end of this attempt, and with a ``code`` of every further one.

        Returns whether the reason is new and the run was not over: then the caller logs it. Without a record this is
        always true.
        """
        is_first, self._heard._is_done = True, code == 0
        job = job or self.job

        def change(now: RunOutcome) -> RunOutcome:
            nonlocal is_first
            now = now.of(job)
            is_first = not now.over and now.text != text
            if now.over:
                return now
            return replace(now, code=code, text=text, arena=arena, job=job or now.job)

        self._change(change)
        return is_first

    def resume(self) -> None:
        """Withdraw this process's "job completed": it trains another model, or its script has failed since."""
        if self._is_done:
            self._is_done = False
            self._change(lambda now: replace(now, code=now.code or None))

    def remove_leftovers(self) -> None:
        """Remove the snapshots of a completed job: a rank may have crashed before it removed them."""
        if self.before.code == 0 and self.before.job:
            with suppress(FtckptError, OSError):  # a live process of the job
                clean_job(Path(self.before.arena), self.before.job)

    def remove(self) -> None:
        """Delete the record of earlier attempts."""
        with suppress(OSError, FtckptError):
            if self.name:
                _path(self.name).unlink(missing_ok=True)

    def _change(self, change: Callable[[RunOutcome], RunOutcome]) -> None:
        if not self.name:
            return
        try:
            folder = _folder()
            folder.mkdir(mode=0o700, exist_ok=True)
            require_own(folder)
            with FileLock(folder / "lock", _LOCK_SECS, f"the records in {folder}", "end it"):
                replace_file(_path(self.name), json.dumps(asdict(change(self.read()))).encode())
        except (OSError, FtckptError) as error:
            self.problem = str(error)


@dataclass(frozen=True)
class AgentProcess:
    """torchrun's process on this machine: its command line, environment and working directory."""

    owner: int
    command: list[str]
    env: dict[str, str]
    directory: Path = Path("/")


def agent_of(env: Mapping[str, str]) -> AgentProcess | None:
    """The agent that started this process; None if there is none or /proc does not show it."""
    run_id = env.get(_TORCHRUN)
    if run_id is None:
        return None
    try:
        pid = os.getppid()
        # A wrapper between agent and rank inherits the variable that the agent sets; the agent itself lacks it.
        while (agent := _environment(pid)).get(_TORCHRUN) == run_id:
            pid = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
        return AgentProcess(owner_word(pid), _words(pid, "cmdline"), agent, Path(os.readlink(f"/proc/{pid}/cwd")))
    except (OSError, ValueError):
        return None


def _words(pid: int, name: str) -> list[str]:
    return Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace").rstrip("\0").split("\0")


def _environment(pid: int) -> dict[str, str]:
    words = (word.partition("=") for word in _words(pid, "environ"))
    return {name: value for name, _, value in words}


_runs: dict[str, LauncherRun] = {}
"""Runs of this process by name: a second engine or load is not a second start."""
off_in_children(_runs.clear)  # a child must not withdraw its parent's completion


def launcher_run(env: Mapping[str, str]) -> LauncherRun:
    """The launcher run that started this process: named by ``FTCKPT_RUN``, otherwise by torchrun's agent.

    Without either it has no name and stores nothing.
    """
    name = ""
    if _NAME.fullmatch(given := env.get(RUN_VARIABLE, "")):
        # The node's name is added because nodes may share the temporary directory.
        name = f"{given}.{node_here(env)[0]}"
    elif (agent := agent_of(env)) is not None:
        name = f"{agent.owner:x}-{this_machine()}-{_launch(agent, env)}"
    return _runs.setdefault(name, LauncherRun(name))


def _launch(agent: AgentProcess, env: Mapping[str, str]) -> str:
    """A digest that distinguishes the launches of one process, such as a sweep or a notebook. It is the same for all
    attempts of a launch and all ranks of this machine."""
    facts = [env[_TORCHRUN]]
    # RUN/attempt_N/LOCAL_RANK/error.json: torch creates RUN once per launch configuration.
    attempt = Path(env.get("TORCHELASTIC_ERROR_FILE", "")).parent.parent
    if attempt.name == f"attempt_{env.get('TORCHELASTIC_RESTART_COUNT')}":
        facts.append(str(attempt.parent))
        # A script may launch the same configuration twice. Not with several nodes, where the directory of the first
        # attempt is created again after another node fails; not with torchrun, which launches only once.
        is_torchrun = any(word.endswith(("torchrun", "torch.distributed.run")) for word in agent.command[:4])
        if env.get("GROUP_WORLD_SIZE") == "1" and not is_torchrun:
            facts.append(_made_ns(attempt.parent / "attempt_0"))
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:8]


@cache
def _made_ns(directory: Path) -> str:
    """Modification time of a directory, which changes last before the ranks start. Cached: the directory of a long
    job may be deleted by a tmp cleaner."""
    try:
        return str(directory.stat().st_mtime_ns)
    except OSError:
        return ""


def this_machine() -> str:
    """An id of this boot and pid namespace, within which pids are comparable."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    return f"{pid_namespace()}-{boot[:12]}"


def _folder() -> Path:
    """The directory of records. Not below the arena root, which is unknown if the settings are wrong."""
    return Path(tempfile.gettempdir()) / f"{RUNS_PREFIX}{os.geteuid()}"


def _path(name: str) -> Path:
    return _folder() / f"{name}{_SUFFIX}"


def _load(path: Path) -> RunOutcome:
    folder = path.parent
    if not folder.exists():
        return RunOutcome()
    require_own(folder)  # otherwise another user could end this user's jobs
    try:
        return RunOutcome(**json.loads(path.read_text()))
    except FileNotFoundError:
        return RunOutcome()


def _remove_stale() -> None:
    """Delete records of agents that have exited, and old ones of agents that this process cannot check."""
    oldest = time.time() - _KEPT_SECS
    try:
        there = list(_folder().glob(f"*{_SUFFIX}"))
    except OSError:  # no temporary directory can be used
        return
    for path in there:
        with suppress(OSError):
            process = _OF_PROCESS.fullmatch(path.name.removesuffix(_SUFFIX))
            if process and f"{process[2]}-{process[3]}" == this_machine():
                is_stale = not owner_lives(int(process[1], 16))
            else:
                is_stale = path.stat().st_mtime < oldest
            if is_stale:
                path.unlink(missing_ok=True)
