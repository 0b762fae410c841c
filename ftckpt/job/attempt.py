"""One attempt of a launcher at a job, as the record of the launcher run learns of it."""

from __future__ import annotations

import logging
from pathlib import Path

from ftckpt.config import Config
from ftckpt.errors import StalledError
from ftckpt.group import Group
from ftckpt.model import codec
from ftckpt.store.outcome import MOST_STARTS, LauncherRun

log = logging.getLogger("ftckpt")


class AttemptRecord:
    """What this process adds to the record of ``run``, which is given to one of the ranks that it started here."""

    def __init__(self, config: Config, run: LauncherRun) -> None:
        self._config = config
        self._run = run
        self._has_snapshot = False

    def begin(self, group: Group) -> None:
        """Count it, and refuse what would fail as the attempts before it did: a launcher that has no such rule goes
        on for days. Collective.

        Raises:
            StalledError: on all ranks together.
        """
        mine = self._run.begin().starts if self._run.name else -1
        if self._run.problem:
            log.warning("ftckpt: what this attempt comes to cannot be kept for the next: %s", self._run.problem)
        # The least: a node that comes and goes has failed in a row while others made snapshots.
        starts = min((found for found in codec.gather(group, mine, int) if found >= 0), default=0)
        if starts >= MOST_STARTS:
            error = StalledError(
                f"{starts} attempts in a row have made no snapshot that is whole on all ranks: what ended them would "
                "end the next one, too; see their errors above, and start the job again when that is mended"
            )
            error.of_all_ranks = True
            raise error

    def progress(self) -> None:
        """A snapshot of this attempt is whole: the first one ends the row of those that came to nothing."""
        if not self._has_snapshot:
            self._has_snapshot = True
            self._run.progress()

    def finish(self, iteration: int) -> None:
        """The job is done with ``iteration``: no further attempt trains anything."""
        text = f"job {self._config.job} finished at iteration {iteration}: nothing is left to train"
        self._run.end(0, text, str(Path(self._config.arena).absolute()), self._config.job)
