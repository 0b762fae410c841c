"""Extra state of modules: empty state is accepted, any other refused, however late it appears."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

from ftckpt.errors import UnsupportedError
from ftckpt.frameworks.extra_state import ExtraState, scaling_states
from ftckpt.torch.state import PlainState
from tests.standin import te
from tests.standin.te import modules
from tests.support.errors import raises


class Keeper(torch.nn.Module):
    def __init__(self, kept: Any = None) -> None:
        super().__init__()
        self.kept = kept

    def get_extra_state(self) -> Any:
        return self.kept


def model(**inner: torch.nn.Module) -> torch.nn.Module:
    return torch.nn.ModuleDict(inner)


def multiply() -> modules.Linear:
    return modules.Linear(16, 16, init_method=torch.nn.init.ones_)


@pytest.fixture(params=te.RELEASES)
def _release(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(te, "release", request.param)
    monkeypatch.setattr(modules.FP8GlobalStateManager, "buffers", {})


@pytest.mark.usefixtures("_release")
def test_modules_of_transformer_engine_that_keep_nothing_are_accepted() -> None:
    norm = modules.LayerNorm(16, 1e-5, torch.float32)
    linear, scaled_now = multiply(), multiply()
    with modules.fp8_autocast(fp8_recipe=modules.Float8CurrentScaling()):
        scaled_now(torch.ones(2, 16))
    # Before 2.4 all of these give something, after it the last one still does, up to 2.17.
    assert (linear.get_extra_state().numel() > 0) == (te.release == "2.2") == (norm.get_extra_state().numel() > 0)
    assert (scaled_now.get_extra_state().numel() > 0) == (te.release != "2.18")
    ExtraState(model(norm=norm, linear=linear, scaled_now=scaled_now)).refuse()
    assert not scaling_states(scaled_now)


@pytest.mark.usefixtures("_release")
def test_delayed_scaling_is_refused_where_it_cannot_be_saved_once_it_is_there() -> None:
    linear = multiply()
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
    state = PlainState(linear, optimizer, None, {})
    state.describe()
    state.save_objects()  # at the start of training
    with modules.fp8_autocast():
        linear(torch.ones(2, 16)).sum().backward()
    for _ in range(3):  # no boundary after it may pass
        with raises(UnsupportedError):
            state.save_objects()


@pytest.mark.parametrize(
    "kept, words",
    [
        (torch.ones(3), "12"),
        (torch.ones(2, 2, dtype=torch.uint8)[:, 0], "2"),
        (io.BytesIO(b"12345"), "5"),
        ({"scale": 1.0}, ""),
        (torch.frombuffer(bytearray(b"\x80\x04K\x01."), dtype=torch.uint8), "5"),
    ],
)
def test_other_extra_state_is_refused_by_the_name_of_its_module(kept: Any, words: str) -> None:
    with raises(UnsupportedError, "outer.keeper", *words.split()):
        ExtraState(model(outer=model(keeper=Keeper(kept)))).refuse()


def test_what_comes_with_the_first_iteration_is_seen() -> None:
    keeper = Keeper()
    extra = ExtraState(model(keeper=keeper))
    extra.refuse()
    extra.look_again()
    keeper.kept = torch.ones(1)
    for _ in range(3):
        with raises(UnsupportedError, "keeper"):
            extra.look_again()
