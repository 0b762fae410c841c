"""What a rank has to do with storage: it sees to the place at the start, and to the last snapshot at the end."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from ftckpt.config import Config, taken_over
from ftckpt.errors import LaunchError, StorageError
from ftckpt.events import Events
from ftckpt.group import Group
from ftckpt.job.flushes import FlushGuard
from ftckpt.job.last_flush import Newest, flush_last
from ftckpt.job.protection import Protection
from ftckpt.job.session import RankState
from ftckpt.model import codec
from ftckpt.model.snapshot import SnapshotId
from ftckpt.persist.place import Place, prepare


class RankStorage:
    """One rank's part; SMPs write. ``bring_last`` and ``problem`` are collective."""

    def __init__(
        self, config: Config, group: Group, events: Events, protection: Protection, state: RankState
    ) -> None:
        self._config = config
        self._group = group
        self._events = events
        self._protection = protection
        self._state = state
        self._place = Place.of(config.persist, config.persist_format)
        self.snapshots = self._place.snapshots
        """Where snapshots lie; "" without storage."""

    def prepare(self) -> None:
        """Make the place ready. Raises StorageError where it cannot be used, and trying again is of no use."""
        try:
            prepare(self._place)
        except StorageError as error:
            if error.lasting:
                raise StorageError(f"persist: {error}", lasting=True) from None

    def bring_last(self, newest: Newest, saved: int) -> StorageError | None:
        """Bring what is on its way, and the ``newest`` snapshot where the framework has not ``saved`` it by itself;
        what went wrong, where that is to be an error.

        Raises:
            RuntimeError: a rank is gone.
        """
        config, state = self._config, self._state
        last = [newest] if newest.sealed is None or newest.sealed.iteration > saved else []
        if taken_over(config.persist):  # Megatron would have saved that one, too
            going = state.flushes.current
            last.insert(0, Newest(going, going, state.flushes.persisted))
        # All of them, whichever fails.
        done = [
            flush_last(
                self._group, self._events, one, self._mark, self._observe, timeout_secs=config.persist_timeout_secs
            )
            for one in last
        ]
        if all(done) or config.on_error != "raise":
            return None
        text = f"the last snapshot did not come to storage, memory keeps it: {self.problem()}"
        return StorageError(text, lasting=True)

    def problem(self) -> str:
        """What the SMPs say of the last flush. All ranks raise by the same verdict, and so come here; where one does
        not, this rank knows its own node's reason."""
        causes = [self._protection.smp.flush_problem()]
        with suppress(RuntimeError, LaunchError):
            if not self._state.lost:
                causes = codec.gather(self._group, causes[0], str)
        return "; ".join(sorted(set(filter(None, causes)))) or "no SMP says why: persist_timeout_secs are over"

    def _mark(self, last: SnapshotId) -> None:
        self._protection.mark(replace(self._state.marks, flush=last))

    def _observe(self, last: SnapshotId) -> FlushGuard:
        self._protection.pause(evaluates=False)  # a sign of life
        return self._protection.observe_flush(last)
