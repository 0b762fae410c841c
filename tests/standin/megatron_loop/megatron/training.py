"""Counts, evaluates, saves and loads as the train loop of Megatron-DeepSpeed does, around a tiny engine.

A stand-in for its ``megatron.training``, for tests: put the folder above on ``sys.path``. ``pretrain`` writes what it
logs into ``arguments.lines``; ``arguments.fault(place, iteration)`` is called where something may go wrong.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch

WIDTH, MICRO, SEQUENCE = 4, 2, 8
_arguments = Namespace()


def get_args() -> Namespace:
    return _arguments


def _create_ds_config_dict() -> dict[str, Any]:
    config: dict[str, Any] = _arguments.deepspeed_config
    _arguments.deepspeed_config = None  # DeepSpeed takes one configuration
    return config


def initialize(arguments: Namespace) -> None:
    global _arguments
    _arguments = arguments
    arguments.iteration = arguments.consumed_train_samples = 0
    arguments.consumed_valid_samples = arguments.consumed_train_tokens = 0
    if arguments.deepspeed:
        arguments.deepspeed_config_dict = _create_ds_config_dict()


def pretrain(arguments: Namespace) -> None:
    initialize(arguments)
    model, optimizer, _ = setup_model_and_optimizer(None, None)
    trained, valid = batches(arguments.consumed_train_samples), batches(5 + arguments.consumed_valid_samples)
    train(model, optimizer, trained, valid)


def batches(begin: int) -> Iterator[torch.Tensor]:
    """Batches after ``begin`` samples, with noise from the generator of the process."""
    while True:
        yield torch.full((MICRO, WIDTH), 0.1 * (begin % 10)) + 0.1 * torch.rand(MICRO, WIDTH)
        begin += MICRO


def setup_model_and_optimizer(model_provider: Any, model_type: Any) -> Any:
    arguments = get_args()
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Dropout(0.5), torch.nn.Linear(WIDTH, 1))
    config = arguments.deepspeed_config_dict
    engine, optimizer, *_ = deepspeed.initialize(args=arguments, model=model, config=config)
    arguments.iteration = load_checkpoint(engine) if arguments.load else 0
    return [engine], optimizer, None


def load_checkpoint(engine: Any) -> int:
    arguments = get_args()
    if arguments.finetune:
        engine.load_checkpoint(arguments.load, load_module_only=True)
        engine.global_steps = 0
        return 0
    path, state = engine.load_checkpoint(arguments.load, tag=arguments.load_tag)
    if path is None:
        return 0
    assert arguments.consumed_train_samples == arguments.consumed_valid_samples == 0
    for name in ("consumed_train_samples", "consumed_valid_samples", "consumed_train_tokens"):
        setattr(arguments, name, state[name])
    torch.set_rng_state(state["rng"])
    return int(state["iteration"])


def save_checkpoint(iteration: int, model: Any) -> None:
    arguments = get_args()
    names = ("consumed_train_samples", "consumed_valid_samples", "consumed_train_tokens")
    state = {"iteration": iteration, **{name: getattr(arguments, name) for name in names}}
    model[0].save_checkpoint(arguments.save, client_state={**state, "rng": torch.get_rng_state()})


def train_step(data: Any, model: Any) -> Any:
    arguments, engine = get_args(), model[0]
    for _ in range(engine.gradient_accumulation_steps()):
        loss = engine(next(data)).square().mean()
        arguments.fault("train", arguments.curr_iteration + 1)
        engine.backward(loss)
        engine.step(lr_kwargs={})
    return {"lm loss": loss.detach()}, 0, None, None


def training_log(losses: Any, sums: dict[str, Any], rate: float, iteration: int) -> None:
    arguments = get_args()
    sums["advanced"] = sums.get("advanced", 0) + 1
    for name, loss in losses.items():
        sums[name] = sums.get(name, torch.zeros(1)) + loss
    if iteration % arguments.log_interval == 0:
        counted = arguments.consumed_train_samples, arguments.consumed_train_tokens
        mean = sums["lm loss"].item() / sums["advanced"]
        arguments.lines.append((f"iteration {iteration}", *counted, rate, mean.hex()))
        sums.update({"advanced": 0, "lm loss": torch.zeros(1)})


def train(model: Any, optimizer: Any, data: Any, valid: Any) -> int:
    arguments = get_args()
    sums: dict[str, Any] = {}
    iteration = arguments.iteration
    model[0].train()
    while iteration < arguments.train_iters:
        arguments.curr_iteration = iteration
        losses, *_ = train_step(data, model)
        iteration += 1
        arguments.iteration = iteration
        samples = MICRO * model[0].gradient_accumulation_steps()
        arguments.consumed_train_samples += samples
        arguments.consumed_train_tokens += samples * SEQUENCE
        training_log(losses, sums, optimizer.param_groups[0]["lr"], iteration)
        if iteration % arguments.eval_interval == 0:
            evaluate(iteration, model, valid)
        if arguments.save and iteration % arguments.save_interval == 0:
            save_checkpoint(iteration, model)
        if iteration == arguments.exit_interval:
            sys.exit()
    return iteration


def evaluate(iteration: int, model: Any, valid: Any) -> None:
    arguments = get_args()
    model[0].eval()
    with torch.no_grad():
        loss = model[0](next(valid)).square().mean()
    arguments.fault("evaluate", iteration)
    arguments.consumed_valid_samples += MICRO
    model[0].train()
    arguments.lines.append((f"validation {iteration}", arguments.consumed_valid_samples, loss.item().hex()))
