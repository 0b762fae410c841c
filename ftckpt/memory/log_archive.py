"""Archive of SMP logs with warnings, in the home directory: ``JOB@NODE.log``, and those of earlier runs as
``JOB@NODE.log.1`` and so on."""

from __future__ import annotations

import os
import re
import secrets
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ftckpt.events import log

_MOST_BYTES = 256 << 10
_RUNS = 4
"""Maximum of logs per job and node."""
_PER_NODE = 16
"""Maximum of logs per node. There is no total: a thousand nodes may share a home directory, with a log each."""
_WAIT_SECS = 2.0
"""Maximum wait for a home directory on storage that hangs."""
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO must not block the open
_LOUD = re.compile(rb"^(\S+ \S+ (WARNING|ERROR|CRITICAL) |Traceback )", re.MULTILINE)


class SmpLog(NamedTuple):
    """A log to archive."""

    job: str
    node: str
    text: bytes

    @property
    def is_loud(self) -> bool:
        """Whether it contains a warning or an error."""
        return _LOUD.search(self.text) is not None


def kept_path(job: str, node: str) -> Path:
    """Path of the newest archived log of a job and node. Raises OSError without a home directory."""
    home = Path(os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state"))
    if not home.is_absolute():
        raise OSError("no home directory")
    return home / "ftckpt" / f"{job}@{node}.log"  # no name has an @


def read_log(path: Path | int) -> bytes:
    """The last 256 KiB of a log; empty if it cannot be read. A given descriptor stays open."""
    try:
        fd = path if isinstance(path, int) else os.open(path, _READ)
        try:
            return os.pread(fd, _MOST_BYTES, max(0, os.fstat(fd).st_size - _MOST_BYTES))
        finally:
            if fd is not path:
                os.close(fd)
    except OSError:
        return b""


def take_log(path: Path, job: str, node: str) -> SmpLog:
    """Read and delete the log at ``path``. Of several concurrent callers one gets it, the others an empty log."""
    mine = path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")  # a name that ``remove_unfinished`` matches
    with suppress(OSError):
        path.rename(mine)
        taken = SmpLog(job, node, read_log(mine))
        mine.unlink()
        return taken
    return SmpLog(job, node, b"")


def keep_logs(logs: Sequence[SmpLog], tell: Callable[[str], None] = log.info) -> None:
    """Archive logs with warnings, report their paths by ``tell``, and delete old ones. Called last at shutdown; waits
    at most 2 s per log."""
    for one in logs:
        if one.is_loud:
            said: list[str] = [f"storage did not answer for {_WAIT_SECS:g} s"]
            keeping = threading.Thread(target=_keep, args=(one, said), name="ftckpt-log", daemon=True)
            try:
                keeping.start()
                keeping.join(_WAIT_SECS)
            except RuntimeError as error:  # a limit of processes
                said.append(f"its log cannot be kept: {error}")
            tell(f"ftckpt: what the SMP of node {one.node} warned of: {said[-1]}")


def _keep(one: SmpLog, said: list[str]) -> None:
    try:
        path = kept_path(one.job, one.node)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _make_room(path)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(one.text)
        said.append(f"its log is kept in {path}")
        _remove_old(path.parent, one.node)
    except OSError as error:
        said.append(f"its log cannot be kept: {error}")


def _make_room(path: Path) -> None:
    """Rotate earlier logs by one number; the oldest is overwritten."""
    names = [path, *(path.with_name(f"{path.name}.{number}") for number in range(1, _RUNS))]
    for older, newer in zip(names[:0:-1], names[-2::-1], strict=True):
        with suppress(FileNotFoundError):
            newer.rename(older)


def _remove_old(directory: Path, node: str) -> None:
    pattern = re.compile(rf".+@{re.escape(node)}\.log(\.\d+)?")
    with suppress(OSError):  # another job of this node deletes logs concurrently
        kept = [path for path in directory.iterdir() if pattern.fullmatch(path.name)]
        for old in sorted(kept, key=lambda path: path.stat().st_mtime)[:-_PER_NODE]:
            old.unlink(missing_ok=True)
