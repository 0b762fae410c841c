"""What a launcher run has come to on this machine: a record that outlives its ranks, and ends the launcher's retries.

A launcher starts all ranks again whenever one fails: after an error that each attempt meets anew, and after a crash
in the exit of a job that is done. What earlier attempts came to lies in a file of the launcher run, which the next
one reads before anything else: how many starts in a row came to nothing, and whether it is over. The file is named
for the process of the launcher and for what it has launched, so that another run of the same job finds nothing, a
second one by the same process neither, and whoever comes later knows without a guess which files are of no use any
more.
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
from ftckpt.memory.directory import clean_job, fresh_name, require_own
from ftckpt.memory.locks import FileLock
from ftckpt.memory.page import owner_lives, owner_word, pid_namespace

RUN_VARIABLE = "FTCKPT_RUN"
"""Names a launcher run that is none of torchrun: a script that starts a job again and again sets it."""
MOST_STARTS = 3
"""Starts in a row that may end without a snapshot, and no further than those before them."""
_LOCK_SECS = 5.0
_TORCHRUN = "TORCHELASTIC_RUN_ID"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_OF_PROCESS = re.compile(r"([0-9a-f]+)-([0-9]+)-([0-9a-f]+)-[0-9a-f]+")
_KEPT_SECS = 14 * 86400.0
"""A record of which nobody here knows whether its launcher has ended. No script waits so long before it starts a job
again; that a row of failures is forgotten does no harm."""
_SUFFIX = ".run"
RUNS_PREFIX = "ftckpt-runs-"
"""Of the name of a directory, which a number follows: no job is called so."""


@dataclass(frozen=True)
class RunOutcome:
    """Of one launcher run on one machine.

    ``code`` is None while it may go on, else the exit code of each further attempt, for the reason ``text``.
    ``starts`` counts those of ``job`` since a snapshot was whole, or one has come further than all before it.
    ``repeated``: the last attempt has said it again. ``arena`` tells where snapshots lay that a rank may have left
    which crashed as they were removed. ``attempts`` are all starts of ``job``: no boundary behind ``furthest`` is
    known that any but the last has passed.
    """

    starts: int = 0
    code: int | None = None
    text: str = ""
    repeated: bool = False
    arena: str = ""
    job: str = ""
    attempts: int = 0
    furthest: int = -1

    @property
    def over(self) -> bool:
        return self.code is not None

    def of(self, job: str) -> RunOutcome:
        """What it says of ``job``: all, where that is "", for unknown; nothing, where it is of another one."""
        return self if not job or self.job in ("", job) else RunOutcome()

    def with_reached(self, reached: int) -> RunOutcome:
        """The last attempt has passed the boundary ``reached``, and none behind it; -1: no boundary is known of."""
        # What the first one has passed nobody can have passed before; who fails there again has come no further.
        if not self.attempts:
            return self
        is_further = self.attempts > 1 and reached > self.furthest
        return replace(self, starts=0 if is_further else self.starts, furthest=max(reached, self.furthest))


class LauncherRun:
    """The launcher run ``name``, as one process of an attempt knows it; where that is "" nothing is stored, and
    nothing is over.

    Nothing raises: a job trains without a record as it does with one. ``problem`` says why there is none. ``job`` is
    what this process trains, "" where that is not known: what another job of the same launcher came to is not its
    own.
    """

    def __init__(self, name: str, heard: LauncherRun | None = None) -> None:
        self.name = name
        self.job = ""
        self.problem = ""
        self._heard = heard or self
        self._found: dict[str, RunOutcome] = {}  # by the job that was begun
        self._is_done = False

    def unheard(self) -> LauncherRun:
        """For a rank that another one speaks for: it stores nothing, but what it has done it can take back."""
        return LauncherRun("", self)

    @cached_property
    def before(self) -> RunOutcome:
        """What attempts before this process came to; what it has ended itself it may begin anew."""
        return self.read()

    def read(self) -> RunOutcome:
        """What earlier attempts came to."""
        try:
            return _load(_path(self.name)) if self.name else RunOutcome()
        except (OSError, ValueError, TypeError, FtckptError) as error:
            self.problem = str(error)
            return RunOutcome()

    def begin(self, job: str, reached: int = -1) -> int:
        """One more start of ``job``; returns how many before it came to nothing. Records of launchers that ended are
        removed.

        What is over is not any more: who comes here knows of that, and trains all the same. A process that begins
        anew, as after a load from storage, is no further start; one launcher may start several jobs in turn.
        ``reached``: the last boundary that the start before this one is known to have passed.
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
        """This start is none of those that made no snapshot: what kept it from that may be over at the next one."""
        self._change(lambda now: replace(now, starts=max(0, now.starts - 1)))

    def progress(self) -> None:
        """A snapshot is whole that this attempt has made."""
        self._change(lambda now: replace(now, starts=0))

    def end(self, code: int | None, text: str, arena: str = "", job: str = "", *, is_last: bool = False) -> bool:
        """What ended this attempt, and with a ``code`` every further one; whether nobody has said so before.

        Where nothing can be stored everybody is the first. Who is the first in the last attempt says it for its end.
        """
        is_first, self._heard._is_done = True, code == 0
        job = job or self.job

        def change(now: RunOutcome) -> RunOutcome:
            nonlocal is_first
            now = now.of(job)
            is_first = not now.over and now.text != text
            if now.over:
                return now
            repeated = now.repeated or (is_first and is_last)
            return replace(now, code=code, text=text, repeated=repeated, arena=arena, job=job or now.job)

        self._change(change)
        return is_first

    def resume(self) -> None:
        """What this process has done is not all: it trains another model, or its script has failed since."""
        if self._is_done:
            self._is_done = False
            self._change(lambda now: replace(now, code=now.code or None))

    def repeat(self) -> bool:
        """Whether nobody has said again what ended the run."""
        is_first = True

        def change(now: RunOutcome) -> RunOutcome:
            nonlocal is_first
            is_first = not now.repeated
            return replace(now, repeated=True)

        self._change(change)
        return is_first

    def remove_leftovers(self) -> None:
        """Remove the snapshots of a job that was done: a rank may have crashed as it was to do so."""
        if self.before.code == 0 and self.before.job:
            with suppress(FtckptError, OSError):  # what a live process holds stays
                clean_job(Path(self.before.arena), self.before.job)

    def remove(self) -> None:
        """Forget what earlier attempts came to."""
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
            lock = FileLock(folder / "lock", _LOCK_SECS, f"the records in {folder}", "end it")
            with lock, fresh_name(_path(self.name)) as fresh:
                fresh.write_text(json.dumps(asdict(change(self.read()))))
                fresh.rename(_path(self.name))
        except (OSError, FtckptError) as error:
            self.problem = str(error)


@dataclass(frozen=True)
class AgentProcess:
    """torchrun's process on this machine: the words of its command line, its environment and where it was started."""

    owner: int
    command: list[str]
    env: dict[str, str]
    directory: Path = Path("/")


def agent_of(env: Mapping[str, str]) -> AgentProcess | None:
    """The agent that started this process; None: none did, or it cannot be looked at."""
    run_id = env.get(_TORCHRUN)
    if run_id is None:
        return None
    try:
        pid = os.getppid()
        # A wrapper between the agent and the rank has the agent's settings as the rank does; the agent has not.
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
"""Those that this process has asked for: a second engine or load is no second start of it."""
off_in_children(_runs.clear)  # what the parent has done a child cannot take back


def launcher_run(env: Mapping[str, str]) -> LauncherRun:
    """What started this process, and may start it again.

    ``FTCKPT_RUN`` where that is set, else torchrun's agent; one without a name where neither is.
    """
    name = ""
    if _NAME.fullmatch(given := env.get(RUN_VARIABLE, "")):
        # Nodes of a cluster may share what is temporary.
        name = f"{given}.{node_here(env)[0]}"
    elif (agent := agent_of(env)) is not None:
        name = f"{agent.owner:x}-{this_machine()}-{_launch(agent, env)}"
    return _runs.setdefault(name, LauncherRun(name))


def _launch(agent: AgentProcess, env: Mapping[str, str]) -> str:
    """What tells the launches of one process apart, as a sweep or a notebook makes them; the same for all attempts of
    a launch, and all ranks of this machine."""
    facts = [env[_TORCHRUN]]
    # RUN/attempt_N/LOCAL_RANK/error.json: torch draws RUN once for each configuration of a launch.
    attempt = Path(env.get("TORCHELASTIC_ERROR_FILE", "")).parent.parent
    if attempt.name == f"attempt_{env.get('TORCHELASTIC_RESTART_COUNT')}":
        facts.append(str(attempt.parent))
        # A script may launch twice with one configuration. On several nodes the directory of a first attempt is made
        # anew where another node has failed, and torchrun launches but once.
        is_torchrun = any(word.endswith(("torchrun", "torch.distributed.run")) for word in agent.command[:4])
        if env.get("GROUP_WORLD_SIZE") == "1" and not is_torchrun:
            facts.append(_made_ns(attempt.parent / "attempt_0"))
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:8]


@cache
def _made_ns(directory: Path) -> str:
    """When the last entry was made in it: before the ranks begin. Looked up once: a long job's may be tidied away."""
    try:
        return str(directory.stat().st_mtime_ns)
    except OSError:
        return ""


def this_machine() -> str:
    """What tells process ids of one boot and one pid namespace from those of others."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    return f"{pid_namespace()}-{boot[:12]}"


def _folder() -> Path:
    """Not with the arenas: of a run whose settings are wrong nobody knows where those are."""
    return Path(tempfile.gettempdir()) / f"{RUNS_PREFIX}{os.geteuid()}"


def _path(name: str) -> Path:
    return _folder() / f"{name}{_SUFFIX}"


def _load(path: Path) -> RunOutcome:
    folder = path.parent
    if not folder.exists():
        return RunOutcome()
    require_own(folder)  # somebody else could end this user's jobs
    try:
        return RunOutcome(**json.loads(path.read_text()))
    except FileNotFoundError:
        return RunOutcome()


def _remove_stale() -> None:
    """Records of agents of this machine and pid namespace that have ended, and what is old where nobody can tell."""
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
