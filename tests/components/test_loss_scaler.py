"""The loss scale under DeepSpeed: a dynamic one is restored; a static one comes from the configuration."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.errors import lacks

state = pytest.importorskip("ftckpt.deepspeed.state")


def dynamic(scale: float = 65536.0) -> Any:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    scaler = DynamicLossScaler(scale, 2.0, 1000, 1, 2, False)
    return SimpleNamespace(loss_scaler=scaler)


def static(scale: float) -> Any:
    from deepspeed.runtime.fp16.loss_scaler import LossScaler

    return SimpleNamespace(loss_scaler=LossScaler(scale))


def test_a_dynamic_scale_goes_on_where_it_stood() -> None:
    before, after = dynamic(), dynamic()
    vars(before.loss_scaler).update(cur_scale=32768, cur_iter=7, last_overflow_iter=5, cur_hysteresis=1)
    state.load_scaler(after, state.save_scaler(before))
    assert vars(after.loss_scaler) == vars(before.loss_scaler)


@pytest.mark.parametrize(
    ("saved", "here", "scale", "said"),
    [
        (static(1.0), dynamic(), 65536, ""),  # bf16, then fp16
        (dynamic(), static(1.0), 1, "65536"),  # fp16, then bf16
        (dynamic(), static(128.0), 128, "65536"),
        (static(128.0), static(256.0), 256, None),
        (dynamic(), SimpleNamespace(), None, ""),
    ],
)
def test_of_another_kind_it_is_as_configured(
    saved: Any, here: Any, scale: float | None, said: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "ftckpt")
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "log_once", lambda text, *args: lines.append(text % args))
        state.load_scaler(here, state.save_scaler(saved))
    assert (here.loss_scaler.cur_scale if scale is not None else None) == scale
    assert len(lines) == (said is not None) and not lacks("".join(lines), *(said or "").split())
