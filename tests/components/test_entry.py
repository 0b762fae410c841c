"""Where frameworks are entered: patches, live tensors, objects, fences."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import random
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ftckpt.torch
from ftckpt.deepspeed import initialize
from ftckpt.errors import CaptureError, MismatchError, UnsupportedError
from ftckpt.frameworks import torch_state
from ftckpt.frameworks.entry import Integration, Patches
from ftckpt.frameworks.live_tensors import Holders, LiveTensors
from ftckpt.frameworks.optimizers import ParameterRange, materialise, state_tensors, stepped_pieces
from ftckpt.frameworks.tensors import LogicalBox, frozen_pieces
from ftckpt.model.fragment import Box, Fragment
from ftckpt.torch.hooks import follow
from ftckpt.torch.state import PlainState
from tests.support.errors import raises
from tests.support.plain import Recorder

# --- patches ---


class Framework:
    def step(self, size: int) -> str:
        """A function of the framework."""
        return f"stepped {size}"


def shout(original: Callable[..., str], *args: Any) -> str:
    return original(*args).upper()


def test_a_copy_or_a_pickle_of_what_has_a_wrapped_method_has_that_of_its_class() -> None:
    engine = Framework()
    Patches().wrap(engine, "step", shout)
    Patches().wrap(engine, "step", lambda original, size: original(size) + "!")
    assert engine.step(3) == "STEPPED 3!"
    for other in (copy.deepcopy(engine), pickle.loads(pickle.dumps(engine))):  # noqa: S301
        assert other.step.__self__ is other and other.step(4) == "stepped 4"
    assert inspect.signature(engine.step) == inspect.signature(Framework().step)


def test_what_cannot_be_taken_back_leaves_nothing_else_in_force() -> None:
    integration, engine = Integration(), Framework()
    integration.hooks.wrap(engine, "step", shout)
    integration.hooks.undo.append(lambda: [].remove(0))
    integration.hooks.shadow(engine, "extra", 1)
    del engine.extra  # type: ignore[attr-defined]
    integration.hooks.shadow(engine, "more", 2)
    module = types.ModuleType("framework")
    module.say = lambda: "hello"  # type: ignore[attr-defined]
    original = module.say
    integration.patches.wrap(module, "say", shout)
    integration.checkpointer = object()  # type: ignore[assignment]
    with pytest.raises(ValueError):
        integration.remove()
    assert not vars(engine) and module.say is original
    assert integration.checkpointer is None


def test_what_is_installed_twice_is_wrapped_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runner installs, and so does a script that imports ftckpt.deepspeed."""
    framework = types.ModuleType("deepspeed")
    framework.initialize = framework.init_distributed = original = lambda: "built"  # type: ignore[attr-defined]
    integration = Integration()
    monkeypatch.setitem(sys.modules, "deepspeed", framework)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(initialize, "integration", integration)
    initialize.install()
    wrapped = framework.initialize
    initialize.install()
    assert framework.initialize is wrapped is not original and len(integration.patches.undo) == 2
    integration.remove()
    assert framework.initialize is original


# --- tensors ---


def test_tensors_that_were_replaced_or_added_are_named() -> None:
    tensors = {"a": torch.ones(2), "b": torch.ones(3), "empty": torch.ones(0)}

    def alive() -> Iterator[tuple[str, object, torch.Tensor]]:
        return (("buffer", name, tensor) for name, tensor in tensors.items())

    live = LiveTensors(alive, lambda: Holders(others=list(tensors.values())))
    live.note()
    tensors["a"].add_(1)
    tensors["empty"] = torch.ones(0)
    live.check("")
    tensors["b"] = tensors["b"].clone()
    with raises(CaptureError):
        live.check("attach later")
    live.note()
    tensors["c"] = torch.ones(1)
    with raises(CaptureError, "0"):
        live.check("attach later")


def whole(name: str, tensor: torch.Tensor) -> list[LogicalBox]:
    shape = tuple(tensor.shape)
    return [LogicalBox(name, shape, Box((0,) * len(shape), shape), 0)]


def test_frozen_parameters_are_saved_and_unstepped_ones_that_train_are_refused_by_name() -> None:
    trained, frozen, empty = (torch.nn.Parameter(torch.ones(n), requires_grad=n == 2) for n in (2, 3, 0))
    boxes = {p: whole(name, p) for name, p in (("trained", trained), ("frozen", frozen), ("empty", empty))}
    pieces = list(frozen_pieces(boxes, {trained}, lambda parameter: (0, parameter)))
    assert [(p.fragment.key, p.tensor.data_ptr()) for p in pieces] == [("weight/frozen", frozen.data_ptr())]
    with raises(UnsupportedError, "trained", "requires_grad_(False)"):
        list(frozen_pieces(boxes, set(), lambda parameter: (0, parameter)))


def test_a_range_in_a_flat_master_gives_the_elements_that_are_its_own() -> None:
    """A sharded optimizer's range: elements 2 to 5 of a parameter, at 1 in a master of 5."""
    parameter = torch.nn.Parameter(torch.arange(6.0).bfloat16().view(2, 3))
    master, moment = torch.arange(5.0), torch.arange(5.0) * 10
    part = ParameterRange(parameter, 2, parameter.detach().view(-1)[2:5], master, 1)
    state = {"exp_avg": moment, "step": torch.tensor(4.0), "nothing": None}
    pieces = list(stepped_pieces({parameter: whole("w", parameter)}, [part], lambda _: state))
    seen = {p.fragment.key: (p.fragment.start, p.fragment.stop, p.tensor.tolist()) for p in pieces}
    assert seen["weight/w"] == (2, 5, [2.0, 3.0, 4.0])
    assert seen["master/w"] == (2, 5, [1.0, 2.0, 3.0])
    assert seen["exp_avg/w"] == (2, 5, [10.0, 20.0, 30.0])
    assert seen["step/w"] == (0, 1, [4.0])
    assert [p.derived_from is not None for p in pieces if p.fragment.key == "weight/w"] == [True]


def test_state_that_a_loaded_checkpoint_has_reordered_gives_the_same_fragments() -> None:
    parameter = torch.nn.Parameter(torch.ones(4))
    part = ParameterRange(parameter, 0, parameter, parameter)
    begun = {"step": torch.tensor(4.0), "exp_avg": torch.ones(4), "exp_avg_sq": torch.ones(4)}

    def described(state: dict[str, torch.Tensor]) -> list[Fragment]:
        return [p.fragment for p in stepped_pieces({parameter: whole("w", parameter)}, [part], lambda _: state)]

    assert described(begun) == described(dict(reversed(begun.items())))


@pytest.mark.parametrize(("value", "message"), [(torch.ones(3), "3 4"), (torch.ones(4, 4).t()[0], ""), ("text", "")])
def test_state_of_another_kind_is_refused_by_name(value: Any, message: str) -> None:
    parameter = torch.nn.Parameter(torch.ones(4))
    part = ParameterRange(parameter, 0, parameter, parameter)
    with raises(UnsupportedError, *message.split()):
        list(stepped_pieces({parameter: whole("w", parameter)}, [part], lambda _: {"odd": value}))
    with raises(UnsupportedError, "a", "(4,)"):
        list(stepped_pieces({}, [part], lambda _: {}))


# --- objects and generators ---


class Counter:
    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_objects_come_back_under_their_names_and_a_missing_one_is_an_error_with_the_remedy() -> None:
    saved = torch_state.save_all({"a": Counter(1), "b": Counter(2)})
    a = Counter(0)
    torch_state.load_all({"a": a}, saved)
    assert a.count == 1
    with raises(MismatchError, "'c'", "a, b"):
        torch_state.load_all({"c": Counter(0)}, saved)


def draws() -> list[float]:
    return [random.random(), float(np.random.random()), float(torch.rand(1))]


# --- the plain integration, without a job ---


class Noisy(Counter):
    """An object that draws numbers while it takes its state, as a data loader may."""

    def load_state_dict(self, state: dict[str, int]) -> None:
        super().load_state_dict(state)
        torch.rand(5)
        random.random()


def plain_job() -> tuple[torch.nn.Module, torch.optim.Optimizer, PlainState]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight  # tied
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, PlainState(model, optimizer, None, {"noisy": Noisy(3)})


def test_generators_are_set_after_all_that_may_draw_from_them() -> None:
    _, _, state = plain_job()
    state.describe()
    saved = state.save_objects()
    first = draws()
    state.load_objects(saved)
    state.finish_load()
    assert draws() == first


@pytest.mark.parametrize("is_named", [True, False])
def test_the_fence_follows_the_closure_of_a_step(is_named: bool) -> None:
    model, optimizer, state = plain_job()
    state.describe()
    recorder = Recorder()
    follow(ftckpt.torch.patches, recorder, model, optimizer, state)  # type: ignore[arg-type]

    def closure() -> float:
        loss = model(torch.ones(1, 3)).sum()
        loss.backward()
        recorder.log.append("end of closure")
        return 7.0

    result = optimizer.step(closure=closure) if is_named else optimizer.step(closure)  # type: ignore[arg-type]
    state.save_objects()
    ftckpt.torch.remove()
    assert recorder.log == ["forward", "backward", "end of closure", "fence"] and result == 7.0


def test_the_fence_stands_before_the_write_until_hooks_are_removed() -> None:
    model, optimizer, state = plain_job()
    state.describe()
    recorder = Recorder()
    follow(ftckpt.torch.patches, recorder, model, optimizer, state)  # type: ignore[arg-type]
    optimizer.register_step_pre_hook(lambda *_: recorder.log.append("write"))  # called after ours
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state.save_objects()
    assert recorder.log == ["forward", "backward", "fence", "write"]
    ftckpt.torch.remove()
    recorder.log.clear()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert recorder.log == ["write"]
    with raises(CaptureError):
        state.save_objects()


# --- a tensor that was moved, replaced or added is detected, whoever did it; unchanged tensors are only checked ---


PART = "part"


class Job:
    """A model with a module that has nothing, under Adam; ``named`` is how often names were asked for."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(3, 2), nn.Dropout(), nn.BatchNorm1d(2), nn.Linear(2, 2))
        self.optimizer = torch.optim.Adam(self.model.parameters())
        materialise(self.optimizer)
        self.named = 0
        self.live = LiveTensors(self._tensors, lambda: Holders((self.model,), (self.optimizer,)), PART)
        self.live.note()
        self.named = 0

    @property
    def first(self) -> Any:
        return self.model[0]

    def _tensors(self) -> Iterator[tuple[str, object, torch.Tensor]]:
        self.named += 1
        for name, parameter in self.model.named_parameters():
            yield "parameter", name, getattr(parameter, PART, parameter)
        yield from (("buffer", name, buffer) for name, buffer in self.model.named_buffers())
        yield from state_tensors(self.optimizer)

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 3)).sum().backward()
        self.optimizer.step()


def assigned(job: Job) -> None:
    job.model.load_state_dict(copy.deepcopy(job.model.state_dict()), assign=True)


def exchanged(job: Job) -> None:
    weight, bias = job.model[2].weight, job.model[2].bias
    weight.data, bias.data = bias.data, weight.data


def replaced_moment(job: Job) -> None:
    state = job.optimizer.state[job.first.weight]
    state["exp_avg"] = state["exp_avg"].clone()


def moved_moment(job: Job) -> None:
    state = job.optimizer.state[job.first.weight]
    state["exp_avg_sq"].data = state["exp_avg_sq"].data.clone()


CHANGES: dict[str, Callable[[Job], Any]] = {
    "data moved": lambda job: setattr(job.first.weight, "data", job.first.weight.data.clone()),
    "data of two exchanged": exchanged,
    "parameter replaced": lambda job: setattr(job.first, "weight", nn.Parameter(job.first.weight.detach().clone())),
    "parameter added": lambda job: job.first.register_parameter("scale", nn.Parameter(torch.ones(1))),
    "first parameter added": lambda job: job.model[1].register_parameter("rate", nn.Parameter(torch.ones(1))),
    "parameter taken away": lambda job: delattr(job.first, "bias"),
    "buffer replaced": lambda job: setattr(job.model[2], "running_mean", torch.zeros(2)),
    "module replaced": lambda job: job.model.__setitem__(0, nn.Linear(3, 2)),
    "first module added": lambda job: job.model[1].add_module("within", nn.Linear(1, 1)),
    "loaded by assignment": assigned,
    "group added": lambda job: job.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
    "moment replaced": replaced_moment,
    "moment moved": moved_moment,
    "state loaded": lambda job: job.optimizer.load_state_dict(copy.deepcopy(job.optimizer.state_dict())),
    "state added": lambda job: job.optimizer.state[job.first.bias].update(max_exp_avg_sq=torch.ones(2)),
    "state forgotten": lambda job: job.optimizer.state.clear(),
}


REPLACED = "replaced after training began; attach later"
ADDED = "added after training began; .* before ftckpt is attached, with a learning rate of 0"
GONE = "removed after training began; attach later"
HOW = {
    "parameter added": ADDED, "first parameter added": ADDED, "first module added": ADDED, "group added": ADDED,
    "state added": ADDED, "state forgotten": GONE, "parameter taken away": GONE,
}  # fmt: skip
"""The reported change, where it is not ``REPLACED``."""


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_moved_replaced_or_added_is_noticed(change: str) -> None:
    job = Job()
    job.train()
    job.live.check("")
    CHANGES[change](job)
    with pytest.raises(CaptureError, match=f"(was|were) {HOW.get(change, REPLACED)}"):
        job.live.check("attach later")
    # As long as it is so: nobody has described it anew.
    with pytest.raises(CaptureError):
        job.live.check("")


def test_while_nothing_moves_nobody_asks_for_names() -> None:
    job = Job()
    for _ in range(3):
        job.train()
        job.model.load_state_dict(copy.deepcopy(job.model.state_dict()))
        job.live.check("")
    assert job.named == 0


def test_hooks_go_with_those_who_asked() -> None:
    hooks = nn.modules.module._global_parameter_registration_hooks
    gc.collect()  # what other tests have left in circles would go in the middle of this one
    before = len(hooks)
    jobs = [Job(), Job()]
    assert len(hooks) == max(before, 1)
    while jobs:
        del jobs[0].live
        jobs.pop(0)
    assert len(hooks) == before
