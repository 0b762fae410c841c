"""A script's own load, which may be partial, does not resume from half-loaded state."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ftckpt.errors import LostError


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
