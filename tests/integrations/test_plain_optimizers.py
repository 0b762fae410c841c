"""Optimizers under plain torch: any state is restored bit for bit, or the optimizer is refused by name."""

from __future__ import annotations

import importlib
import logging.handlers
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import ftckpt.torch
from ftckpt.config import Config
from ftckpt.errors import CaptureError, FtckptError, MismatchError, UnsupportedError
from ftckpt.torch import optimizer_attributes
from ftckpt.torch.state import PlainState
from tests.integrations import adversarial_optimizers as adversarial
from tests.integrations.third_party_optimizers import (
    OPAQUE,
    Ambiguous,
    Averaging,
    Counting,
    Delegating,
    Early,
    Holding,
    Hooked,
    Lookahead,
    Marking,
    Mode,
    Scaled,
    Tallying,
    Warmup,
    Whitened,
)
from tests.promises.complete.test_node_loss import reference
from tests.support.errors import lacks, message_of
from tests.support.launching import Nodes
from tests.support.pool import run_ranks
from tests.support.repository import ROOT
from tests.support.resuming import HALF, Parts, attach, resumed, rows, simple

pytestmark = pytest.mark.multiproc


class Words(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.table((x.abs() * 5).long().clamp(max=15)).sum(1)
        return found


def dense(bias: bool = True) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 12, bias=bias), nn.GELU(), nn.Linear(12, 8, bias=bias))


Make = Callable[[Any], Any]
NAMES = (
    "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop",
    "SGD",
)  # fmt: skip
OF_TORCH: dict[str, tuple[Callable[[], nn.Module], Make]] = {
    name: (dense, partial(getattr(optim, name), lr=1e-2)) for name in NAMES if hasattr(optim, name)
}
OF_TORCH |= {
    "AdamW amsgrad": (dense, partial(optim.AdamW, lr=1e-2, amsgrad=True)),
    "RMSprop centered": (dense, partial(optim.RMSprop, lr=1e-2, momentum=0.9, centered=True)),
    "SGD momentum": (dense, partial(optim.SGD, lr=1e-2, momentum=0.9)),
    "SGD fused": (dense, partial(optim.SGD, lr=1e-2, momentum=0.9, fused=True)),
    "LBFGS": (dense, partial(optim.LBFGS, lr=0.1, max_iter=4, history_size=6)),
    "LBFGS line search": (dense, partial(optim.LBFGS, lr=0.1, line_search_fn="strong_wolfe")),
    "SparseAdam": (Words, lambda parameters: optim.SparseAdam(list(parameters), lr=1e-2)),
    "Whitened": (dense, Whitened),
}
if hasattr(optim, "Muon"):
    OF_TORCH["Muon"] = (partial(dense, bias=False), partial(optim.Muon, lr=1e-2))

OF_OTHERS = {
    "schedulefree": ("AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree"),
    "prodigyopt": ("Prodigy",),
    "lion_pytorch": ("Lion",),
    "pytorch_optimizer": (
        "SOAP",
        "Shampoo",
        "Lamb",
        "MADGRAD",
        "Ranger",
        "AdEMAMix",
        "GrokFastAdamW",
        "Kron",
    ),
}


def parts_of(model: nn.Module, optimizer: Any) -> Parts:
    if not isinstance(optimizer, optim.LBFGS):
        return simple(model, optimizer)
    torch.manual_seed(3)

    def train(iteration: int) -> torch.Tensor:
        x = torch.randn(4, 8)

        def loss() -> Any:
            optimizer.zero_grad()
            loss = (model(x) - x.sin()).pow(2).mean()
            loss.backward()
            return loss

        return torch.as_tensor(optimizer.step(loss)).detach()

    return Parts(model, optimizer, train)


def resume(rank: int, world_size: int, names: list[str], root: str) -> dict[str, Any]:
    """The results of ``resumed``, or the errors, by the name of the case."""
    found: dict[str, Any] = {}
    for number, name in enumerate(names):
        make_model, make = OF_TORCH.get(name) or (dense, of_other(name))

        def build(attempt: int, make_model: Any = make_model, make: Any = make) -> Parts:
            torch.manual_seed(1)
            model = make_model()
            optimizer = make(model.parameters())
            getattr(optimizer, "train", lambda: None)()
            return parts_of(model, optimizer)

        arena = Path(root, str(number))
        arena.mkdir(mode=0o700)
        try:
            found[name] = resumed(build, str(arena))
        except FtckptError as error:
            found[name] = str(error)
    return found


def of_other(name: str) -> Make:
    module, _, kind = name.rpartition(".")
    return partial(getattr(importlib.import_module(module), kind), lr=1e-2)


@pytest.fixture(scope="module")
def of_torch() -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="ftckpt-test-", dir="/dev/shm") as root:
        yield run_ranks(resume, 1, list(OF_TORCH), root, stand_in=False)[0].value


@pytest.mark.parametrize("name", OF_TORCH)
def test_a_restart_has_the_bits_of_an_unbroken_run(name: str, of_torch: dict[str, Any]) -> None:
    assert of_torch[name] == (HALF, True)


@pytest.mark.slow
@pytest.mark.parametrize("module", OF_OTHERS)
def test_a_restart_with_an_optimizer_of_another_package_has_the_bits_of_an_unbroken_run(
    module: str, arena_root: Path
) -> None:
    pytest.importorskip(module)
    names = [f"{module}.{kind}" for kind in OF_OTHERS[module]]
    found = run_ranks(resume, 1, names, str(arena_root), stand_in=False)[0].value
    assert found == dict.fromkeys(names, (HALF, True))


def refusals(rank: int, world_size: int) -> dict[str, str]:
    """The errors for optimizers that cannot be saved."""

    def said(make: Make) -> str:
        model = dense()
        optimizer = make(model.parameters())
        config = Config(enabled=True, job="refused", node="n")
        return message_of(lambda: ftckpt.torch.attach(model, optimizer, config=config).restore())

    def grow(state: dict[str, Any]) -> None:
        state.setdefault("losses", []).append(1.0)

    def refuse(state: dict[str, Any]) -> None:
        raise ValueError("no")

    return {
        "attribute": said(Counting),
        "growth": said(partial(Whitened, twist=grow)),
        "fails": said(partial(Whitened, twist=refuse)),
        "closure": said(Early),
        "wrapper": said(lambda parameters: Averaging(optim.AdamW(parameters))),
        **{kind: said(partial(Holding, held=make())) for kind, make in OPAQUE.items()},
        "setting": said(partial(Holding, setting=Warmup())),
        "enumeration": said(partial(Holding, setting=Mode.WARM)),
        "array": said(Tallying),
        "mark": said(Marking),
        "hook": said(Hooked),
        "slow weights": said(lambda parameters: Lookahead(optim.AdamW(parameters))),
        "number and text": said(lambda parameters: Ambiguous(parameters, 0, "0")),
        "dot": said(lambda parameters: Ambiguous(parameters, "nested.inner")),
    }


REFUSED = {
    "attribute": ("Counting", "num_steps"),
    "growth": ("Whitened", "grows"),
    "fails": ("Whitened", "ValueError"),
    "closure": ("Early", "closure"),
    "wrapper": ("Averaging", "AdamW"),
    **{kind: ("Holding", "attribute held[0]", kind) for kind in OPAQUE},
    "setting": ("Holding", "setting of group 0", "Warmup"),
    "enumeration": ("Holding", "setting of group 0", "Mode"),
    "array": ("Tallying", "attribute tally"),
    "mark": ("Marking", "attribute marks of parameter 0"),
    "hook": ("Hooked", "attribute seen"),
    "slow weights": ("Lookahead", "attribute optimizer"),
    "number and text": ("Ambiguous", "of 0.weight are written 0"),
    "dot": ("Ambiguous", "of 0.weight are written nested.inner"),
}


def test_an_optimizer_that_cannot_be_saved_is_refused_by_name_and_reason() -> None:
    said = run_ranks(refusals, 1, stand_in=False)[0].value
    assert {name: [word for word in words if word not in said[name]] for name, words in REFUSED.items()} == {
        name: [] for name in REFUSED
    }, said


def unmarked(rank: int, world_size: int) -> bool:
    """Whether the trial leaves the parameters' own attributes alone."""
    model = dense()
    model[0].weight.marks = []  # type: ignore[index,union-attr]
    state = PlainState(model, Marking(model.parameters()), None, {})
    message_of(state.describe)
    return model[0].weight.marks == []  # type: ignore[index,union-attr]


def test_a_trial_leaves_attributes_of_parameters_alone() -> None:
    assert run_ranks(unmarked, 1, stand_in=False)[0].value


def positional(rank: int, world_size: int, root: str) -> Any:
    """Weights after steps with a scale and perhaps a closure, without ftckpt and with it."""
    found: list[Any] = []
    for arena in ("", root):
        torch.manual_seed(1)
        parts = simple(nn.Linear(8, 8))
        parts = simple(parts.model, Scaled(parts.model.parameters()))
        checkpointer = attach(parts, arena)[0] if arena else None
        torch.manual_seed(2)
        for iteration, closures in enumerate(((), (lambda: None,)), start=1):  # type: ignore[var-annotated]
            parts.model(torch.randn(2, 8)).sum().backward()
            parts.optimizer.step(0.5, *closures)
            if checkpointer is not None:
                checkpointer.step(iteration)
        found.append(parts.model.weight.tolist())
        if checkpointer is not None:
            checkpointer.close(remove=True)
    return found


def test_arguments_of_a_step_keep_their_places(arena_root: Path) -> None:
    without, with_it = run_ranks(positional, 1, str(arena_root), stand_in=False)[0].value
    assert with_it == without


def delegated(rank: int, world_size: int, root: str) -> Any:
    def build(attempt: int) -> Parts:
        torch.manual_seed(1)
        model = dense()
        return simple(model, Delegating(optim.AdamW(model.parameters(), lr=1e-2)))

    return resumed(build, root)


def test_a_wrapper_without_state_is_its_inner_optimizer(arena_root: Path) -> None:
    assert run_ranks(delegated, 1, str(arena_root), stand_in=False)[0].value == (HALF, True)


def late(rank: int, world_size: int) -> list[str]:
    """The errors at boundaries for state that comes late, and for state that other code refers to."""
    kept: list[Any] = []

    def add(state: dict[str, Any]) -> None:
        if state["step"] == 5:
            state["extra"] = torch.zeros(3)

    found = []
    for twist in (add, lambda state: kept.append(state["factors"])):
        parts = simple(dense(), None)
        optimizer = Whitened(parts.model.parameters())
        state = PlainState(parts.model, optimizer, None, {})
        state.describe()
        optimizer.twist = twist  # type: ignore[assignment]
        parts = simple(parts.model, optimizer)
        said = []
        for iteration in range(6):
            parts.train(iteration)
            if twist is not add:
                kept[:] = [list(factors) for factors in kept]
            said.append(message_of(state.optimizer_state.settle, CaptureError))
        found.append(said[-1] if not said[0] or twist is not add else "early")
    return found


def test_state_that_the_trial_has_not_seen_fails_the_snapshot_by_name() -> None:
    extra, shared = run_ranks(late, 1, stand_in=False)[0].value
    assert "Whitened" in extra and "extra of 0.weight" in extra
    assert "Whitened" in shared and "factors.0 of 0.weight" in shared


HIDDEN = [kind.__name__ for kind in (*adversarial.EXACT, *adversarial.REFUSED, *adversarial.LATER)]
HIDDEN += [hook.__name__ for hook in (*adversarial.HOOKS, adversarial.warm)]
LATE = adversarial.LATE


def lives(rank: int, world_size: int, root: str, attempt: int) -> dict[str, Any]:
    """For each of ``HIDDEN`` the iteration that the attempt resumes from, its rows and what was logged, or the error
    at its start; attempt 0 is without ftckpt."""
    found: dict[str, Any] = {}
    log = logging.getLogger("ftckpt")
    for name in HIDDEN:
        torch.manual_seed(1)
        model = dense()
        if isinstance(make := getattr(adversarial, name), type):
            optimizer = make(model.parameters())
        else:
            optimizer = optim.AdamW(model.parameters(), lr=1e-2)
            optimizer.register_step_post_hook(make)
        parts = simple(model, optimizer, scheduler=optim.lr_scheduler.StepLR(optimizer, 3, 0.5))
        drawn, said = torch.get_rng_state(), logging.handlers.BufferingHandler(10_000)
        log.addHandler(said)
        try:
            checkpointer, start = attach(parts, f"{root}/{name}") if attempt else (None, 0)
        except UnsupportedError as error:
            found[name] = str(error)
            continue
        if not start:
            torch.set_rng_state(drawn)

        def boundary(iteration: int, checkpointer: Any = checkpointer, parts: Parts = parts) -> None:
            parts.scheduler.step()
            if checkpointer is not None:
                checkpointer.step(iteration)

        bits = rows(parts, start + 1, LATE + (40, 38, 40)[attempt], boundary)  # busy cores skip snapshots
        if checkpointer is not None:
            checkpointer.close(remove=attempt == 2)
        found[name] = start, bits, " ".join(record.getMessage() for record in said.buffer)
        log.removeHandler(said)
    return found


@pytest.fixture(scope="module")
def adversaries() -> Iterator[list[dict[str, Any]]]:
    """``lives`` of three processes."""
    with tempfile.TemporaryDirectory(prefix="ftckpt-test-", dir="/dev/shm") as root:
        for name in HIDDEN:
            Path(root, name).mkdir(mode=0o700)
        yield [run_ranks(lives, 1, root, attempt, stand_in=False)[0].value for attempt in range(3)]


@pytest.mark.parametrize(("kind", "word"), adversarial.REFUSED.items())
def test_state_in_other_places_is_refused_by_name(kind: type, word: str, adversaries: list[dict[str, Any]]) -> None:
    said = adversaries[1][kind.__name__]
    assert isinstance(said, str) and not lacks(said, kind.__name__, word), said


def check_resumed(name: str, iterations: range, adversaries: list[dict[str, Any]]) -> str:
    """The second attempt resumes from one of ``iterations`` with an unbroken run's bits; returns what the first
    logged."""
    unbroken, first, second = (attempt[name] for attempt in adversaries)
    assert second[0] in iterations
    assert first[1][: second[0]] + second[1] == unbroken[1]
    said: str = first[2]
    return said


@pytest.mark.parametrize("name", [kind.__name__ for kind in adversarial.EXACT] + ["warm"])
def test_state_and_settings_are_restored_whatever_writes_them(name: str, adversaries: list[dict[str, Any]]) -> None:
    check_resumed(name, range(LATE, 99), adversaries)


@pytest.mark.parametrize(("kind", "word"), adversarial.LATER.items())
def test_a_change_after_many_steps_has_no_snapshot_and_is_named(
    kind: type, word: str, adversaries: list[dict[str, Any]]
) -> None:
    said = check_resumed(kind.__name__, range(1, LATE), adversaries)
    assert not lacks(said, kind.__name__, word), said


@pytest.mark.parametrize(("hook", "word"), adversarial.HOOKS.items())
def test_what_a_step_hook_writes_elsewhere_has_no_snapshot_and_is_named(
    hook: Any, word: str, adversaries: list[dict[str, Any]]
) -> None:
    said = check_resumed(hook.__name__, range(1), adversaries)
    assert not lacks(said, "AdamW", word), said


def values_of(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Whole weights, and whole state with their shape or of one number."""
    found = {}
    for name, parameter in model.named_parameters():
        for key, value in {"weight": parameter.detach(), **optimizer.state[parameter]}.items():
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            if isinstance(whole, int | torch.Tensor):
                found[f"{key} {name.removeprefix('module.')}"] = torch.as_tensor(whole).tolist()
    return found


def reshaped(rank: int, world_size: int, arena: str, wrap: str, kind: str) -> Any:
    """Trains three iterations; returns the first iteration and values before and after them, or the error."""
    torch.manual_seed(1)
    model = dense()
    if wrap == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",)))
    elif world_size > 1:
        model = DistributedDataParallel(model)
    parts = simple(model, OF_TORCH[kind][1](model.parameters()))
    try:
        checkpointer, start = attach(parts, arena)
    except MismatchError as error:
        return str(error)
    before = values_of(model, parts.optimizer)
    for iteration in range(start + 1, start + 4):
        parts.train(iteration)
        checkpointer.step(iteration)
    checkpointer.close(remove=False)
    return start, before, values_of(model, parts.optimizer)


@pytest.mark.parametrize(
    ("kind", "before", "after", "refused"),
    [
        ("RMSprop", ("fsdp2", 2), ("ddp", 1), False),
        ("Adafactor", ("ddp", 2), ("ddp", 1), False),
        ("Whitened", ("ddp", 2), ("ddp", 1), False),
        ("Whitened", ("fsdp2", 2), ("fsdp2", 2), False),
        ("Whitened", ("fsdp2", 2), ("ddp", 1), True),
        ("Whitened", ("ddp", 2), ("fsdp2", 2), True),
    ],
)
def test_another_layout_has_the_same_state_or_refuses_that_of_shards_by_name(
    kind: str, before: tuple[str, int], after: tuple[str, int], refused: bool, arena_root: Path
) -> None:
    def lives(wrap: str, ranks: int) -> list[Any]:
        return [one.value for one in run_ranks(reshaped, ranks, str(arena_root), wrap, kind, stand_in=False)]

    first, second = lives(*before), lives(*after)
    if refused:
        assert all("Whitened" in said and "factors.0 of 0.weight" in said for said in second), second
        return
    for start, restored, _ in second:
        assert start == 3 and restored == first[0][2]


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.timeout(600)
@pytest.mark.parametrize("optimizer", ["torch.optim.RMSprop", "tests.integrations.third_party_optimizers.Whitened"])
def test_a_killed_rank_has_its_optimizer_back(optimizer: str, tmp_path: Path, arena_root: Path) -> None:
    arguments = ("--wrap", "ddp", "--layers", "1", "--hidden", "32", "--seq", "32", "--global-batch", "8",
                 "--micro-batch", "1", "--optimizer", optimizer)  # fmt: skip
    script = [str(ROOT / "launch" / "train_plain.py"), *arguments, "--ftckpt-chunk-size", "64KiB"]
    nodes = Nodes(tmp_path, arena_root, script, count=1, nproc=2)
    try:
        nodes.start_node("a", "127.0.0.1")
        nodes.kill_rank(1)
        nodes.finish()
        (restored,) = nodes.restored()
        assert restored >= 2
        nodes.check_equal(*reference(2, arguments))
        nodes.check_nothing_left()
    finally:
        nodes.stop()


def test_a_learning_rate_as_a_tensor_and_a_setting_of_a_group() -> None:
    """A script may assign the rate; a constant, which no snapshot has, it may not."""
    optimizer = optim.AdamW(dense().parameters(), lr=torch.tensor(1e-2))
    before = optimizer_attributes.watched(optimizer)
    optimizer.param_groups[0]["lr"] = torch.tensor(1e-3)
    assert optimizer_attributes.watched(optimizer) == before
    optimizer.param_groups[0]["rounding"] = torch.bfloat16
    now = optimizer_attributes.watched(optimizer)
    assert now.keys() - before.keys() == {"setting rounding of group 0"}
