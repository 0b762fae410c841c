"""Errors as tests see them: the class, what is at fault as the user wrote it, the remedy; not the sentence."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from ftckpt.errors import FtckptError
from tests.support.pool import RankFailure


def lacks(text: str, *words: str) -> list[str]:
    """The ``words`` that do not occur in ``text``, or only as a part of a longer one."""
    return [word for word in words if not re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text)]


@contextmanager
def raises(kind: type[Exception], *words: str) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """An error of this class, in one line, that names each of ``words``."""
    with pytest.raises(kind) as caught:
        yield caught
    text = str(caught.value)
    assert "\n" not in text, text
    assert not lacks(text, *words), f"{lacks(text, *words)} not in: {text}"


@contextmanager
def a_rank_raises(kind: type[Exception], *words: str) -> Iterator[pytest.ExceptionInfo[RankFailure]]:
    """``raises`` for a rank of the pool: a line of its traceback has the class and the words."""
    with pytest.raises(RankFailure) as caught:
        yield caught
    told = re.findall(rf"^(?:\w+\.)*{kind.__name__}: (.*)$", str(caught.value), re.MULTILINE)
    assert told, str(caught.value)
    assert any(not lacks(text, *words) for text in told), f"not all of {words} in one of: {told}"


def message_of(action: Callable[[], object], kind: type[Exception] = FtckptError) -> str:
    """The message of the error of this class that ``action`` raises; empty where it raises none."""
    try:
        action()
    except kind as error:
        return str(error)
    return ""
