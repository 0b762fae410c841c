"""State of optimizers inside DeepSpeed's, and the loss scale: a dynamic one is restored, a static one configured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from ftckpt.deepspeed import inner_optimizers, state
from ftckpt.errors import MismatchError, UnsupportedError
from tests.support.errors import lacks, raises

OPTIMIZERS: dict[str, Any] = {
    "adam": lambda parameters: torch.optim.Adam(parameters, amsgrad=True),
    "adamw": torch.optim.AdamW,
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adagrad": torch.optim.Adagrad,
}


def made(name: str) -> tuple[list[torch.nn.Parameter], Any]:
    torch.manual_seed(1)
    parameters = [torch.nn.Parameter(torch.randn(3, 2)), torch.nn.Parameter(torch.randn(4), requires_grad=False)]
    return parameters, OPTIMIZERS[name](parameters)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_the_same_and_frozen_parameters_get_no_state(name: str) -> None:
    results = []
    for ahead in (True, False):
        parameters, optimizer = made(name)
        if ahead:
            inner_optimizers.materialise(optimizer)
            before = {key: value.data_ptr() for key, value in optimizer.state[parameters[0]].items()}
            assert before
            assert name == "adagrad" or not optimizer.state.get(parameters[1])
        for _ in range(3):
            parameters[0].grad = torch.randn(3, 2)
            optimizer.step()
        if ahead:
            after = {key: value.data_ptr() for key, value in optimizer.state[parameters[0]].items()}
            assert after == before
        results.append(parameters)
        assert [group["params"] for group in optimizer.param_groups] == [parameters]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_unknown_optimizers_are_refused_with_the_known_ones() -> None:
    parameters, _ = made("adam")
    with raises(UnsupportedError, "torch.optim.rmsprop.RMSprop", "FusedAdam"):
        inner_optimizers.materialise(torch.optim.RMSprop(parameters))


def reshaped(
    groups: list[list[dict[str, Any]]], numbers: list[list[dict[str, int]]]
) -> tuple[Any, list[dict[str, int]]]:
    """Groups and numbers of a dense and an expert's parameter after what ranks of another layout had."""
    dense, expert = (torch.nn.Parameter(torch.randn(2)) for _ in range(2))
    settings = [{"params": [dense]}, {"params": [expert], "moe": True, "name": "ep_size_4"}]
    optimizer = torch.optim.SGD(settings, lr=0.1)
    optimizer.state[dense]["step"] = 0
    saved = [{"kind": "SGD", "groups": g, "numbers": n} for g, n in zip(groups, numbers, strict=True)]
    inner_optimizers.load_reshaped(optimizer, [dense, expert], saved)
    return optimizer.param_groups, [dict(optimizer.state[owner]) for owner in (dense, expert)]


DENSE = {"lr": 0.5}
EXPERTS = {"lr": 0.25, "moe": True, "name": "ep_size_2"}


def test_groups_and_numbers_of_another_layout_are_taken_by_what_they_are_for() -> None:
    groups, numbers = reshaped([[EXPERTS, EXPERTS, DENSE], [DENSE]], [[{"step": 7}, {}, {"step": 7}], [{"step": 7}]])
    assert [group["lr"] for group in groups] == [0.5, 0.25]
    assert groups[1]["name"] == "ep_size_4"
    assert numbers == [{"step": 7}, {}]


def test_what_only_the_old_layout_can_hold_is_refused() -> None:
    with raises(MismatchError, "3", "7"):
        reshaped([[DENSE, EXPERTS]], [[{"step": 7}, {"step": 3}]])
    with raises(MismatchError, "1", "2"):
        reshaped([[DENSE, {"lr": 0.75}, EXPERTS]], [[{"step": 7}]])
    with raises(MismatchError, "1"):
        reshaped([[DENSE, EXPERTS], [{"lr": 0.75}, EXPERTS]], [[{"step": 7}]] * 2)
    with raises(MismatchError, "torch.optim.sgd.SGD"):
        reshaped([[DENSE, EXPERTS]], [[{}]])


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
