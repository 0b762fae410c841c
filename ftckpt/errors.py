"""The errors that ftckpt raises, classified by the operator's next action."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, ClassVar


class SettingSyntax(Enum):
    """The syntax in which users write settings: ``--ftckpt-slots``, ``"slots"`` in JSON, ``slots=`` in Python, or
    ``--slots`` of a command."""

    FLAG = "flag"
    JSON = "json"
    PYTHON = "python"
    OPTION = "option"


_FLAG = re.compile(r"--ftckpt(?:-([a-z]+(?:-[a-z]+)*))?(?![\w*-])(?=(:?))( (?=\d))?")
"""Matches a flag: its name, whether a colon follows, and the space before its number."""

_writing: dict[str, SettingSyntax] = {}  # by setting; "" is the default


def settings_are_written(writing: SettingSyntax, names: Iterable[str] = ("",)) -> None:
    """Sets the syntax in which messages name the settings ``names``, by default all without one of their own."""
    _writing.update(dict.fromkeys(names, writing))


def written(text: str) -> str:
    """Rewrites flags in ``text`` to the syntax in which the user of this process writes settings."""

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
    """Base of all errors that ftckpt raises deliberately.

    The text is one line with a remedy. It names settings by their flags, which ``str`` converts to the user's syntax.
    """

    final: ClassVar[bool] = False
    """Whether every further attempt of the same launcher run would fail with it."""
    of_all_ranks = False
    """Whether every rank of the job raises it, so that only one needs to print it."""

    def __str__(self) -> str:
        return written(super().__str__())

    def to_json(self) -> dict[str, Any]:
        """Encodes the error for another process (see ``error_from_json``); as text, never as a pickle."""
        return {"kind": type(self).__name__, "error": super().__str__()}


class ConfigError(FtckptError):
    """A flag, a configuration field or a call is wrong: fix it and restart."""

    final = True


class LaunchError(FtckptError):
    """The launcher or the environment does not work with ftckpt: change how the job is started."""


class UnsupportedError(FtckptError):
    """A version, an optimizer or a part of the training state is not supported."""

    final = True


class MemoryBudgetError(FtckptError):
    """Host memory or the tmpfs is too small for the arenas: free some, or use another path."""


class ArenaError(FtckptError):
    """An arena cannot be opened or used: wrong owner, foreign format, locked by another process."""


class CorruptError(ArenaError):
    """Bytes in an arena do not match their checksum: the slot, header or control block is corrupt."""


class MismatchError(FtckptError):
    """A snapshot belongs to another model, layout or format version."""


class LostError(FtckptError):
    """Committed snapshots can no longer be reconstructed; the text names the missing parts."""

    final = True
    touched = False
    """Whether corrupt bytes are in the live state: only a load of the entire state may follow."""


class StalledError(FtckptError):
    """Several attempts in a row made neither a snapshot nor progress: another one is not expected to."""

    final = True


class SilentCorruptionError(FtckptError):
    """Replicas are not bit-equal: replace the faulty hardware."""

    final = True
    of_all_ranks = True


class CaptureError(FtckptError):
    """A snapshot could not be taken; training continues unless ``on_error`` is ``raise``."""


class SmpError(FtckptError):
    """The snapshot management process of a node cannot be started or reached: protection is degraded."""


class PeerError(SmpError):
    """An SMP is unreachable, too slow, refuses a request, or sends an invalid response: check its node."""


class PeerTimeoutError(PeerError):
    """The SMP accepted the connection but sent no hello in time."""


class VersionError(PeerError):
    """The peer is not an SMP, or has another version of ftckpt."""


class PeerAuthError(PeerError):
    """One side of a connection does not know the job's secret, or rejects the other's proof."""


class ProtectionUnavailableError(FtckptError):
    """A snapshot cannot be protected; the text has the cause: an unresponsive node, no memory, corrupt bytes."""


class LayoutError(ConfigError):
    """No parallel layout fits; the text has the reason for each."""

    final = False  # it may fit the ranks of the next attempt


class StorageError(FtckptError):
    """Storage is full, unreachable, denies access, or has unexpected content; ``lasting``: retrying is useless."""

    def __init__(self, text: str, *, lasting: bool = False) -> None:
        super().__init__(text)
        self.lasting = lasting

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), "lasting": self.lasting}


class DamagedError(StorageError):
    """An object on storage is corrupt according to its checksum, size or header."""

    def __init__(self, text: str, *, lasting: bool = True) -> None:
        super().__init__(text, lasting=lasting)


class ConvertError(FtckptError):
    """A checkpoint cannot be read, written or converted; the text names the tensor, the file or the field."""


class SpecError(ConvertError):
    """A specification of parameter names is wrong, or does not match each tensor exactly once."""


class EventLogError(FtckptError):
    """Events are missing; the text names them and the way to get them."""


def error_from_json(value: Mapping[str, Any], prefix: str = "") -> FtckptError:
    """Decodes the error of another process (see ``to_json``), with ``prefix`` before its text."""
    kind, text = globals().get(str(value.get("kind"))), f"{prefix}{value.get('error')}"
    if not (isinstance(kind, type) and issubclass(kind, FtckptError)):
        return FtckptError(text)
    return kind(text, lasting=bool(value.get("lasting"))) if issubclass(kind, StorageError) else kind(text)


def in_words(error: Exception) -> str:
    """The text of an error for users; for foreign errors it includes the class, without which some say nothing."""
    return str(error) if isinstance(error, FtckptError) else f"{type(error).__name__}: {error}"
