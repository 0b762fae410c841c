"""The errors ftckpt raises, split by what an operator does next."""

from __future__ import annotations

from typing import ClassVar


class FtckptError(Exception):
    """Base of every error that ftckpt raises on purpose; its text is one line with the remedy."""

    final: ClassVar[bool] = False
    """Whether each further attempt of the same launcher run would meet it again."""
    of_all_ranks = False
    """Whether every rank of the job raises it, so that one of them may speak for all."""


class ConfigError(FtckptError):
    """A flag, a configuration field or a call is wrong: fix it and start again."""

    final = True


class LaunchError(FtckptError):
    """The launcher or the environment cannot work with ftckpt: change how the job is started."""


class UnsupportedError(FtckptError):
    """A version, an optimizer or a piece of training state that ftckpt does not know."""

    final = True


class MemoryBudgetError(FtckptError):
    """Host memory or the tmpfs is too small for the arenas: free some, or name another path."""


class ArenaError(FtckptError):
    """An arena cannot be opened or used: wrong owner, foreign format, locked by another process."""


class CorruptError(ArenaError):
    """Bytes in an arena do not match what was written: the slot, header or control block is bad."""


class MismatchError(FtckptError):
    """A snapshot belongs to another model, layout or format version."""


class LostError(FtckptError):
    """Snapshots that were whole can no longer be made whole; the text names what is missing."""

    final = True
    touched = False
    """Whether some of what proved bad is in the live state: only what loads all of it may follow."""


class StalledError(FtckptError):
    """Attempt after attempt has made no snapshot: a further one would not either."""

    final = True


class CaptureError(FtckptError):
    """A snapshot could not be taken; training goes on unless ``on_error`` is ``raise``."""


class SmpError(FtckptError):
    """The snapshot management process of a node cannot be started or reached: protection is degraded."""


class LayoutError(ConfigError):
    """No parallel layout fits: the text says of each one why not."""

    final = False  # it may fit the ranks of the next attempt


class StorageError(FtckptError):
    """Storage is full, away, refuses, or holds what it should not; ``lasting``: trying again is of no use."""

    def __init__(self, text: str, *, lasting: bool = False) -> None:
        super().__init__(text)
        self.lasting = lasting


class DamagedError(StorageError):
    """What lies on storage is not what was written, as its checksum, size or header proves."""

    def __init__(self, text: str, *, lasting: bool = True) -> None:
        super().__init__(text, lasting=lasting)


class ConvertError(FtckptError):
    """A checkpoint cannot be read, written or converted: the text names the tensor, the file or the field."""


class SpecError(ConvertError):
    """A specification of parameter names is wrong, or does not match each tensor exactly once."""


def in_words(error: Exception) -> str:
    """What to tell users of ``error``: those of others may say nothing without their class."""
    return str(error) if isinstance(error, FtckptError) else f"{type(error).__name__}: {error}"
