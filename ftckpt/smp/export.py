"""Export of a persisted snapshot to another format by ``ftckpt convert`` in a child process.

The child imports torch, which an SMP does not. It has the lowest priority on cores and disks, and ends with the SMP.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from ftckpt.errors import StorageError
from ftckpt.events import Events
from ftckpt.model.snapshot import SnapshotId
from ftckpt.persist.commit import checkpoints, committed, folder_of, require_owner
from ftckpt.persist.exports import Exports
from ftckpt.persist.paths import Place
from ftckpt.persist.storage import Storage
from ftckpt.smp.client import environment

_POLL_SECS = 0.1
_KILL_SECS = 10.0
"""Wait for the exit of a killed process; one that waits for an unreachable file system exits later."""
_MOST_CHARS = 500
"""Of its error output."""


def export(
    storage: Storage, place: Place, snapshot: SnapshotId, events: Events, *,
    owner: str, deadline: float, pause: Callable[[float], object],
) -> None:  # fmt: skip
    """Export ``snapshot`` unless that is done already, and remove exports whose snapshots are gone.

    Args:
        storage: the storage of the snapshots, which ``owner`` writes.
        deadline: as ``time.monotonic``.
        pause: waits some seconds; may raise, to cancel.

    Raises:
        StorageError: it failed, was not done in time, or its name is taken.
        OSError: the process cannot be started.
    """
    assert place.exports is not None
    form, begun = place.exports.form, time.monotonic()
    exports = Exports(place, owner)
    if not exports.complete(snapshot):
        require_owner(storage, owner)
        with exports.making(snapshot) as made:
            source = Path(place.snapshots, folder_of(snapshot.iteration))
            _convert(source, made.path, form, umask=exports.umask, deadline=deadline, pause=pause)
            require_owner(storage, owner)
            path = exports.publish(made)
        secs = round(time.monotonic() - begun, 3)
        events.emit("exported", iteration=snapshot.iteration, format=form, path=str(path), secs=secs)
    for iteration in exports.retain(_there(storage, exports.snapshots)):
        events.emit("removed", iteration=iteration, path=place.exports.root)


def _there(storage: Storage, snapshots: Iterable[SnapshotId]) -> set[SnapshotId]:
    """The ``snapshots`` that are committed, or may be: an unreadable checkpoint of that iteration counts."""
    there = {name: committed(storage, name) for name in checkpoints(storage)}
    unreadable = {name.iteration for name, stored in there.items() if stored is None}
    found = {stored.snapshot for stored in there.values() if stored is not None}
    return {one for one in snapshots if one in found or one.iteration in unreadable}


def _convert(
    source: Path, path: Path, form: str, *, umask: int, deadline: float, pause: Callable[[float], object]
) -> None:
    """Run the conversion; raises StorageError if it fails or exceeds the ``deadline``."""
    if time.monotonic() >= deadline:
        raise StorageError("no time was left for the conversion", lasting=True)
    # The module, not the command ``ftckpt``, which may not be in PATH.
    command = [sys.executable, "-m", "ftckpt.cli.main", "convert", str(source), str(path)]
    command += ["--to", form, "--workers", "1", "--background"]
    # A file, not a pipe: its progress output would fill a pipe.
    with TemporaryFile() as said:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=said, cwd="/", env=environment(),
            umask=umask, start_new_session=True,
        )  # fmt: skip
        try:
            while process.poll() is None:
                if time.monotonic() >= deadline:
                    raise StorageError("the conversion was not done in time", lasting=True)
                pause(_POLL_SECS)
        finally:
            _end(process)
        if process.returncode:
            raise StorageError(_last_line(said) or f"it ended with status {process.returncode}", lasting=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_KILL_SECS)
    if process.stdin is not None:
        process.stdin.close()


def _last_line(said: IO[bytes]) -> str:
    said.seek(0)
    lines = said.read().decode(errors="replace").strip().splitlines()
    return lines[-1][-_MOST_CHARS:] if lines else ""
