"""What a rank has to do with storage: it sees to the place at the start, and to the last snapshot at the end."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from ftckpt.config import Config
from ftckpt.errors import LaunchError, StorageError
from ftckpt.events import Events
from ftckpt.group import Group
from ftckpt.job.last_flush import flush_last
from ftckpt.job.last_snapshot import End, JobEnd, RankEnd
from ftckpt.job.protection import Protection
from ftckpt.job.session import RankState
from ftckpt.model import codec
from ftckpt.model.snapshot import SnapshotId
from ftckpt.model.text import human_secs
from ftckpt.notice import Notice
from ftckpt.persist import commit
from ftckpt.persist.exports import prepare
from ftckpt.persist.place import Place


def save_command(config: Config) -> str:
    """What brings a job's memory to another place, for people."""
    return f"ftckpt save {config.job} DIR{_arena(config)}, on every node at once"


def clean_command(config: Config) -> str:
    """What removes a job's memory, for people."""
    return f"'ftckpt clean {config.job}{_arena(config)}' on every node"


def _arena(config: Config) -> str:
    return "" if config.arena == Config.arena else f" --arena {config.arena}"


_NOBODY = "no SMP says why, and its time is over"


class RankStorage:
    """One rank's part; SMPs write. ``bring_last`` is collective."""

    def __init__(
        self, config: Config, group: Group, events: Events, protection: Protection, state: RankState
    ) -> None:
        self._config = config
        self._group = group
        self._events = events
        self._protection = protection
        self._state = state
        self._told = -1  # the last iteration of which this rank has told
        self._place = Place.of(config.persist, config.persist_format)
        self.snapshots = self._place.snapshots
        """Where snapshots lie; "" without storage."""

    @property
    def wants_last(self) -> bool:
        """Whether the last snapshot of the job is to come there."""
        return bool(self._config.persist) and self._config.persist_at_end == "on"

    def prepare(self) -> None:
        """Make the place ready. Raises StorageError where it cannot be used, and trying again is of no use."""
        try:
            prepare(self._place)
        except StorageError as error:
            if error.lasting:
                raise StorageError(f"--ftckpt-persist: {error}", lasting=True) from None

    def bring_last(self, rank: RankEnd) -> str:
        """Bring the last snapshot, which is taken where it is missing and can be; returns why it did not come, empty
        where it did.

        Raises:
            RuntimeError: a rank is gone.
        """
        ending = JobEnd.of(codec.gather(self._group, rank.find(), End))
        last = self._take_missing(ending, rank) or ending.newest
        if last is None or last in ending.persisted:
            return ""
        self._protection.mark(replace(self._state.marks, flush=last))
        trying = (
            f"it is tried again until {human_secs(commit.FLUSH_SECS)} are over; who cannot wait ends the job, whose "
            f"memory stays then, and brings that to another place by {save_command(self._config)}"
        )
        came = flush_last(
            self._group, self._events, last, self._protection, timeout_secs=commit.FLUSH_SECS, trying=trying
        )
        return "" if came else self._problem_at_end(last)

    def tell_problem(self, iteration: int) -> None:
        """This node cannot bring that iteration there: all ranks will raise, and are to know why. They read of it at
        different times, when none may wait for another, so that this comes before the round which says so."""
        if self._config.on_error == "raise" and self._told != iteration:
            self._told = iteration
            if cause := self._protection.smp.flush_problem():
                self._notice(iteration).post(cause)

    def problem(self, iteration: int) -> str:
        """What a node has told of it."""
        return self._notice(iteration).read() or _NOBODY

    def _take_missing(self, ending: JobEnd, rank: RankEnd) -> SnapshotId | None:
        """The snapshot of the last iteration, once all ranks have it; None where none is missing or can be had."""
        if ending.lacking < 0:
            return None
        last, reason = SnapshotId(self._state.lineage, ending.lacking), ending.objection or rank.prove()
        if not reason:
            problems = codec.gather(self._group, rank.take(last, ending.keep), str)
            reason = next((f"rank {number}: {text}" for number, text in enumerate(problems) if text), "")
        if not reason:
            rank.agree(last)
            return last
        before = f"iteration {ending.newest.iteration}" if ending.newest is not None else "none before it, either"
        self._events.emit(
            "last_not_taken", iteration=last.iteration, reason=reason,
            newest=ending.newest.iteration if ending.newest is not None else None,
        )  # fmt: skip
        self._events.announce(
            f"of iteration {last.iteration}, the last one, there is no snapshot ({reason}); to storage goes {before}"
        )
        return None

    def _problem_at_end(self, lacking: SnapshotId) -> str:
        """What the SMPs say of the last flush, that of ``lacking``. Collective; a rank that cannot reach the others
        knows its own node's reason."""
        causes = [self._protection.smp.flush_problem(lambda: self._protection.observe_flush(lacking).goes_on)]
        with suppress(RuntimeError, LaunchError):
            causes = codec.gather(self._group, causes[0], str)
        return "; ".join(sorted(set(filter(None, causes)))) or _NOBODY

    def _notice(self, iteration: int) -> Notice:
        return Notice(f"{self._group.name}/not-persisted/{iteration}")
