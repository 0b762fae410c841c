"""What tests of errors see, and what they do not let pass."""

from __future__ import annotations

import pytest

from ftckpt.errors import ConfigError, FtckptError, LostError
from tests.support.errors import a_rank_raises, raises
from tests.support.pool import RankFailure

pytestmark = pytest.mark.usefixtures("as_flags")

TEXT = "interval: 0 is too small for tp1-dp0; give --ftckpt-interval"


@pytest.mark.parametrize("words", [(), ("interval",), ("0", "tp1-dp0", "--ftckpt-interval"), ("too small",)])
def test_what_an_error_names_is_found(words: tuple[str, ...]) -> None:
    with raises(ConfigError, *words) as caught:
        raise ConfigError(TEXT)
    assert str(caught.value) == TEXT
    with raises(FtckptError, *words):
        raise ConfigError(TEXT)


@pytest.mark.parametrize("word", ["slots", "inter", "terval", "tp1-dp", "small 0"])
def test_what_it_does_not_name_is_not(word: str) -> None:
    with pytest.raises(AssertionError), raises(ConfigError, "interval", word):
        raise ConfigError(TEXT)


def test_an_error_has_one_line_and_its_class() -> None:
    with pytest.raises(AssertionError), raises(ConfigError, "interval"):
        raise ConfigError("interval\nis 0")
    with pytest.raises(LostError), raises(ConfigError, "interval"):
        raise LostError("interval")
    with pytest.raises(pytest.fail.Exception), raises(ConfigError):
        pass


def test_an_error_of_a_rank_is_one_line_of_its_traceback() -> None:
    traceback = f"--- rank 0: exit code 1\nftckpt.errors.ConfigError: {TEXT}\n--- rank 1\nLostError: no arena of tp0"
    with a_rank_raises(ConfigError, "interval", "tp1-dp0"):
        raise RankFailure(traceback, [])
    with a_rank_raises(LostError, "tp0"):
        raise RankFailure(traceback, [])
    for kind, word in ((LostError, "interval"), (FtckptError, "interval"), (ConfigError, "slots")):
        with pytest.raises(AssertionError), a_rank_raises(kind, word):
            raise RankFailure(traceback, [])
