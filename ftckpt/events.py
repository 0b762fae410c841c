"""Events as JSON lines: what ftckpt did, when, and how long training was blocked by it."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import IO, Any

log = logging.getLogger("ftckpt")

LOUD = frozenset(
    {
        "snapshot_error", "turned_off", "replicas_differ", "fallback", "lost", "not_derived", "older_than_storage",
        "shares_kept", "no_budget", "hang", "smp_error", "smp_restarted", "not_protected",
        "not_covered", "corrupt", "peer_lost", "peer_refused", "protection_lessened",
    }
)  # fmt: skip


class Progress:
    """Tells how far a long piece of work is, every ``every_secs``; silent where it takes less."""

    def __init__(self, what: str, every_secs: float = 3.0) -> None:
        self._what = what
        self._every_secs = every_secs
        self._begun = self._told = time.monotonic()

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        """Called as often as one likes."""
        now = time.monotonic()
        if now - self._told >= self._every_secs:
            self._told = now
            rate = done_bytes / (now - self._begun) / 1e9
            log.info("ftckpt: %s: %.1f of %.1f GB, %.1f GB/s", self._what, done_bytes / 1e9, total_bytes / 1e9, rate)


class Events:
    """One rank's event stream, or, with ``name``, that of a process beside the ranks.

    Every line has ``time`` (seconds since the epoch), ``event`` and ``rank`` (or ``process``, the name); durations
    end in ``_secs``, sizes in ``_bytes``. ``blocked_secs`` is time the training thread waited; background time has
    its own name. Lines go to ``directory/rank<R>.jsonl`` or ``directory/<name>.jsonl`` (appended, so that attempts
    follow each other); without a directory only loud events are kept, as log messages. Safe to call from several
    threads: each line is one ``write`` of an unbuffered file. A file that cannot be written any more is given up
    with a warning.
    """

    def __init__(self, directory: Path | None, rank: int, name: str = "") -> None:
        self._rank = rank
        self._who: dict[str, Any] = {"process": name} if name else {"rank": rank}
        self._name = name or f"rank {rank}"
        self._file: IO[bytes] | None = None
        self.direct(directory)

    def direct(self, directory: Path | None) -> None:
        """Let lines go to a file in ``directory`` from now on; it is made. None: to no file.

        Raises:
            OSError: it cannot be written.
        """
        fresh = None
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
            fresh = open(directory / f"{self._name.replace(' ', '')}.jsonl", "ab", buffering=0)
        old, self._file = self._file, fresh
        if old is not None:
            old.close()

    def emit(self, event: str, **fields: Any) -> None:
        """Record ``event``; loud ones are logged as warnings too."""
        if event in LOUD:
            log.warning("ftckpt %s: %s %s", self._name, event, json.dumps(fields, default=str))
        file = self._file
        if file is not None:
            line = {"time": time.time(), "event": event, **self._who, "pid": os.getpid(), **fields}
            data = json.dumps(line, default=str).encode() + b"\n"
            try:
                if not file.closed:  # another thread has directed lines elsewhere
                    file.write(data)
            except OSError as error:
                log.warning("ftckpt %s: no more events: %s", self._name, error)
                self.close()

    def tell(self, text: str) -> None:
        """One line for people, from rank 0 and from processes with a name alone."""
        if self._rank == 0 or "process" in self._who:
            log.info("ftckpt: %s", text)

    def close(self) -> None:
        """Close the file; events after this are only logged."""
        if self._file is not None:
            self._file.close()
            self._file = None
