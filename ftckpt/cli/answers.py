"""The output of commands: lines or JSON on stdout, warnings and progress on stderr."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple, TextIO

from ftckpt.model.text import human

_TERMINAL_SECS, _LOG_SECS = 0.2, 10.0
_CLEAR_LINE = "\r\x1b[K"


class Answer(NamedTuple):
    """The result of a command: the JSON value that ``--json`` prints, if any, and the exit status."""

    value: Any
    status: int = 0


Lines = Iterator[str | Answer]
"""A running command: its lines of text as they become available, then its answer. Without an answer: status 0."""


def alarming(text: str, stream: TextIO | None = None) -> str:
    """``text`` about a problem: in red if ``stream`` (default: stdout) is a terminal, unless NO_COLOR is set."""
    is_plain = os.environ.get("NO_COLOR") or not (stream or sys.stdout).isatty()
    return text if is_plain else f"\x1b[31m{text}\x1b[0m"


def warn(text: str) -> None:
    """Prints a line about something wrong to stderr."""
    print(alarming(f"ftckpt: {text}", sys.stderr), file=sys.stderr, flush=True)


class ProgressLine:
    """Progress of a long operation on stderr, as a context: one line that changes on a terminal and is removed at the
    end; elsewhere, in logs, a line every 10 s. ``total_bytes`` 0: unknown."""

    def __init__(self, what: str, total_bytes: int = 0) -> None:
        self._what, self._total_bytes, self._done_bytes = what, total_bytes, 0
        self._is_terminal = sys.stderr.isatty()
        self._began = self._shown = time.monotonic()

    def __call__(self, nbytes: int = 0, more_bytes: int = 0) -> None:
        """Adds ``nbytes``, and ``more_bytes`` to the total; may be called at any rate."""
        self._done_bytes += nbytes
        self._total_bytes += more_bytes
        now = time.monotonic()
        if now - self._shown < (_TERMINAL_SECS if self._is_terminal else _LOG_SECS):
            return
        self._shown = now
        text, secs = f"ftckpt: {self._what}: ", now - self._began
        if self._done_bytes:
            of = f" of {human(self._total_bytes)}" if self._total_bytes else ""
            text += f"{human(self._done_bytes)}{of}, {human(int(self._done_bytes / secs))}/s, "
        text += f"{secs:.0f} s"
        print(
            _CLEAR_LINE + text if self._is_terminal else text, end="" if self._is_terminal else "\n", file=sys.stderr
        )
        sys.stderr.flush()

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_terminal and self._shown > self._began:
            print(_CLEAR_LINE, end="", file=sys.stderr, flush=True)
