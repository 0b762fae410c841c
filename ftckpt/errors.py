"""The errors ftckpt raises, split by what an operator does next."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, ClassVar


class SettingSyntax(Enum):
    """How users write settings: ``--ftckpt-slots``, ``"slots"`` in JSON, ``slots=`` in Python, or ``--slots`` to a
    command."""

    FLAG = "flag"
    JSON = "json"
    PYTHON = "python"
    OPTION = "option"


_FLAG = re.compile(r"--ftckpt(?:-([a-z]+(?:-[a-z]+)*))?(?![\w*-])(?=(:?))( (?=\d))?")
"""Of a flag its name, whether a colon follows, and the space before its number."""

_writing: dict[str, SettingSyntax] = {}  # of single settings; of all others under ""


def settings_are_written(writing: SettingSyntax, names: Iterable[str] = ("",)) -> None:
    """From here on texts name settings so: those called ``names``, or all that nothing else was said of."""
    _writing.update(dict.fromkeys(names, writing))


def written(text: str) -> str:
    """``text``, which names settings by their flags, as the users of this process write them."""

    def name(match: re.Match[str]) -> str:
        setting = (match[1] or "enabled").replace("-", "_")
        writing = _writing.get(setting, _writing.get("", SettingSyntax.PYTHON))
        before_value = match[3] or ""
        if writing is SettingSyntax.FLAG:
            return match[0]
        if writing is SettingSyntax.OPTION:
            return f"--{match[1] or 'ftckpt'}{before_value}"
        if writing is SettingSyntax.JSON:
            return f'"{setting}"{before_value and ": "}'
        return setting if match[2] else f"{setting}="

    return _FLAG.sub(name, text)


class FtckptError(Exception):
    """Base of every error that ftckpt raises on purpose; its text is one line with the remedy, and names settings by
    their flags, which ``str`` turns into what users write."""

    final: ClassVar[bool] = False
    """Whether each further attempt of the same launcher run would meet it again."""
    of_all_ranks = False
    """Whether every rank of the job raises it, so that one of them may speak for all."""

    def __str__(self) -> str:
        return written(super().__str__())

    def to_json(self) -> dict[str, Any]:
        """For another process, which makes the error of it with ``error_from_json``; as text, never as a pickle."""
        return {"kind": type(self).__name__, "error": super().__str__()}


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
    """Attempt after attempt has made no snapshot and come no further: a further one would not either."""

    final = True


class SilentCorruptionError(FtckptError):
    """Ranks that must hold the same bits do not: hardware that computes or remembers wrongly is to be replaced."""

    final = True
    of_all_ranks = True


class CaptureError(FtckptError):
    """A snapshot could not be taken; training goes on unless ``on_error`` is ``raise``."""


class SmpError(FtckptError):
    """The snapshot management process of a node cannot be started or reached: protection is degraded."""


class PeerError(SmpError):
    """An SMP cannot be reached, is too slow, refuses, or answers nonsense: look at its node."""


class PeerTimeoutError(PeerError):
    """The SMP took the connection, and sent no hello in time."""


class VersionError(PeerError):
    """The other side is no SMP, or one of another version of ftckpt."""


class PeerAuthError(PeerError):
    """One side of a connection does not know the job's secret, or refuses the proof of the other."""


class ProtectionUnavailableError(FtckptError):
    """A snapshot cannot be protected: a node does not answer, no room, corrupt bytes. The text names it."""


class LayoutError(ConfigError):
    """No parallel layout fits: the text says of each one why not."""

    final = False  # it may fit the ranks of the next attempt


class StorageError(FtckptError):
    """Storage is full, away, refuses, or holds what it should not; ``lasting``: trying again is of no use."""

    def __init__(self, text: str, *, lasting: bool = False) -> None:
        super().__init__(text)
        self.lasting = lasting

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), "lasting": self.lasting}


class DamagedError(StorageError):
    """What lies on storage is not what was written, as its checksum, size or header proves."""

    def __init__(self, text: str, *, lasting: bool = True) -> None:
        super().__init__(text, lasting=lasting)


class ConvertError(FtckptError):
    """A checkpoint cannot be read, written or converted: the text names the tensor, the file or the field."""


class SpecError(ConvertError):
    """A specification of parameter names is wrong, or does not match each tensor exactly once."""


class EventLogError(FtckptError):
    """Events are missing; the text says which, and how to get them."""


def error_from_json(value: Mapping[str, Any], prefix: str = "") -> FtckptError:
    """The error of another process, by its ``to_json``, with ``prefix`` before its text."""
    kind, text = globals().get(str(value.get("kind"))), f"{prefix}{value.get('error')}"
    if not (isinstance(kind, type) and issubclass(kind, FtckptError)):
        return FtckptError(text)
    return kind(text, lasting=bool(value.get("lasting"))) if issubclass(kind, StorageError) else kind(text)


def in_words(error: Exception) -> str:
    """What to tell users of ``error``: those of others may say nothing without their class."""
    return str(error) if isinstance(error, FtckptError) else f"{type(error).__name__}: {error}"
