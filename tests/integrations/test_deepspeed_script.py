"""A script that does not know which iteration was restored is refused before the first batch, and no other."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch

from ftckpt.errors import ConfigError
from tests.support.ds_jobs import SMALL
from tests.support.event_logs import logged
from tests.support.pool import run_ranks

pytestmark = pytest.mark.multiproc
pytest.importorskip("deepspeed")

WIDTH = 4
JSON = {**SMALL, "gradient_accumulation_steps": 2}


class Counters:
    """Megatron-DeepSpeed's: fields of its arguments."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args

    def state_dict(self) -> dict[str, int]:
        # At the boundary: the loop counts the iteration behind the step.
        return {"iteration": self.args.iteration + 1, "consumed": self.args.consumed + 4}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.args.iteration, self.args.consumed = state["iteration"], state["consumed"]


def train(engine: Any, args: argparse.Namespace, how: str) -> None:
    for _ in range(2):
        engine.backward(engine(torch.ones(2, WIDTH)).square().mean())
        engine.step()
    if how == "asks behind":
        assert engine.global_steps
    args.iteration, args.consumed = args.iteration + 1, args.consumed + 4


def script(rank: int, world_size: int, arena: str, how: str) -> tuple[str, int, list[str]]:
    """Trains three iterations; returns the refusal, the engine's iteration then, and the log."""
    from tests.standin import deepspeed as standin

    standin.install()
    import deepspeed

    import ftckpt.deepspeed

    args = argparse.Namespace(iteration=0, consumed=0, one=1, three=3, flag=False)
    lines = logged()
    if "registers" in how:
        ftckpt.deepspeed.register("counters", Counters(args))
    section = {"enabled": True, "job": "job", "node": "node", "arena": arena, "protect": "none"}
    engine, *_ = deepspeed.initialize(
        args=args if "gives" in how else None, model=torch.nn.Linear(WIDTH, WIDTH), config={**JSON, "ftckpt": section}
    )
    if "loads" in how:
        _, state = engine.load_checkpoint(f"{arena}-saved", load_module_only="module" in how)
        args.iteration = state["iteration"] if state else 0
    if "forgets" in how:
        args.iteration = args.consumed = 0
    if how == "asks":
        assert engine.global_steps % 3 == 0
    refusal = ""
    try:
        for number in range(3):
            train(engine, args, how)
            if "loads" in how and number == 0:
                engine.save_checkpoint(f"{arena}-saved", client_state={"iteration": args.iteration})
    except ConfigError as error:
        refusal = str(error)
    steps = vars(engine)["global_steps"]
    ftckpt.deepspeed.remove()  # the last snapshot is finished
    return refusal, steps, lines


NOT_READ = "engine.global_steps is 3, restored from memory, but the script has not read it"
BEGINS_ANEW = (
    "first batch args.iteration is 0 and engine.global_steps 3, args.consumed is 0 and engine.global_samples 12"
)
CASES = {
    "counts": NOT_READ,
    "counts and gives arguments": BEGINS_ANEW,
    "gives, registers and forgets": BEGINS_ANEW,
    "loads": NOT_READ,
    "loads a module": NOT_READ,
    "asks": "",
    "asks behind": "",
    "registers": "",
    "gives and registers": "",
}


@pytest.mark.parametrize("how", CASES)
def test_a_script_that_does_not_know_what_was_restored_is_refused_by_name(how: str, arena_root: Path) -> None:
    def attempt() -> tuple[str, int, list[str]]:
        (result,) = run_ranks(script, 1, str(arena_root / "a"), how, stand_in=False)
        found: tuple[str, int, list[str]] = result.value
        return found

    (arena_root / "a").mkdir()
    refusal, steps, lines = attempt()
    assert (refusal, steps) == ("", 3)
    foretold = any("after a restart it would start at 0" in line for line in lines)
    assert foretold == how.startswith(("counts", "loads"))
    refusal, steps, lines = attempt()
    if not CASES[how]:
        assert (refusal, steps) == ("", 6)
        assert any("has not read engine.global_steps since iteration 3" in line for line in lines) == (
            "behind" in how
        )
        return
    assert CASES[how] in refusal and "read the position from engine.global_steps" in refusal
    assert "\n" not in refusal and steps == 3
    assert attempt()[:2] == (refusal, 3), "a refusal lost the snapshots"
