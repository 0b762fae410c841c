"""What was half loaded is not gone on from by a load of the script's, which may be of a part."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ftckpt.errors import LostError, StorageError
from ftckpt.restore.restart import Restart


@pytest.mark.parametrize("touched", [True, False])
@pytest.mark.parametrize("then", ["decides", "loads"])
def test_an_error_behind_the_first_bytes_says_that_they_are_there(touched: bool, then: str) -> None:
    restart: Any = Restart.__new__(Restart)
    restart._is_touched = touched
    restart._events = SimpleNamespace(emit=lambda *_, **__: None)
    restart._bad = set()

    def fail(error: Exception) -> Any:
        raise error

    lost = LostError("none is left")
    restart._load = lambda *_: fail(StorageError("bad", lasting=True) if then == "decides" else lost)
    restart._decide = lambda: fail(lost)
    restart._end_coming = lambda: None
    decision: Any = SimpleNamespace(snapshot=SimpleNamespace(iteration=3))
    with pytest.raises(LostError) as caught:
        restart.load(decision, None, None)
    assert caught.value.touched is touched


@pytest.mark.parametrize("touched", [True, False])
def test_a_script_under_deepspeed_is_awaited_only_where_nothing_was_touched(
    touched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = pytest.importorskip("ftckpt.deepspeed.session")
    lost, awaited = LostError("gone"), list[Any]()
    lost.touched = touched

    def refuse(*_: Any, **__: Any) -> None:
        raise lost

    for name, value in {"EngineSession": refuse, "AwaitedLoad": lambda *given: awaited.append(given)}.items():
        monkeypatch.setattr(session, name, value)
    monkeypatch.setattr(session.launcher, "go_on", lambda: None)
    monkeypatch.setattr(session.dist, "is_initialized", lambda: True)
    config: Any = SimpleNamespace(on_lost="storage")
    if touched:
        with pytest.raises(LostError, match="gone"):
            session.follow(lambda: ("engine",), (), {}, config)
    else:
        session.follow(lambda: ("engine",), (), {}, config)
    assert bool(awaited) is not touched
