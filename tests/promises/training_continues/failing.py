"""A training script that fails by plan: an example of ``launch/`` with one of its functions wrapped.

    torchrun ... -m ftckpt.megatron tests/promises/training_continues/failing.py ARGUMENTS OF launch/train_gpt.py

FTCKPT_TEST_FAILURES names a directory with a list of failures, one for each attempt of the job. Right before one acts
it records process and time, which later attempts and the test read.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "launch")]

from tests.support import constants, killing  # noqa: E402

DIRECTORY_VAR = "FTCKPT_TEST_FAILURES"
ALL = -1
MESSAGE = "out of memory, for a test"


@dataclass(frozen=True)
class Failure:
    """``stage`` is a key of STAGES, ``how`` what ``_fail`` knows; ``nth``: at which call in the attempt, from 1.

    ``cleanup`` is what the script does in a ``finally``: nothing, ``destroy`` the process groups, ``close`` the
    checkpointer.
    """

    stage: str
    rank: int
    how: str = "raise"
    nth: int = 4
    cleanup: str = ""


def _fail(how: str) -> None:
    if how == "raise":
        import torch

        raise torch.OutOfMemoryError(MESSAGE)
    if how == "exit":
        sys.exit(3)
    if how == "interrupt":
        raise KeyboardInterrupt(MESSAGE)
    os.kill(os.getpid(), signal.Signals[how])
    time.sleep(1)  # ends when the handler has raised


_OPTIMIZER = "megatron.core.optimizer.optimizer:MixedPrecisionOptimizer"
_DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
STAGES: dict[str, tuple[str, bool]] = {
    "data": ("text_data:TextData.next_batch", False),
    "forward": ("train_gpt:forward_step", False),
    "after fence": (f"{_OPTIMIZER}.step_with_ready_grads", False),
    "masters written": (f"{_DISTRIBUTED}._copy_main_params_to_model_params", False),
    "weights written": (f"{_OPTIMIZER}.step_with_ready_grads", True),
    "boundary": ("ftckpt.session.checkpointer:Checkpointer.step", False),
    "in step": ("ftckpt.session.snapshot_driver:SnapshotDriver._agree", True),
    "save object": ("text_data:Progress.state_dict", False),
    "after step": ("ftckpt.session.checkpointer:Checkpointer.step", True),
    "proof": ("ftckpt.session.snapshot_driver:SnapshotDriver._prove", False),
    "attach": ("train_gpt:attach_checkpointer", False),
    "describe": ("ftckpt.megatron.state:MegatronState.describe", False),
    "choose": ("ftckpt.restore.restart:Restart.choose", False),
    "load object": ("text_data:Progress.load_state_dict", False),
    "finish load": ("ftckpt.megatron.state:MegatronState.finish_load", False),
    "lay out": ("ftckpt.session.shard:Shard.lay_out", False),
    "restored": ("ftckpt.session.checkpointer:Checkpointer.restore", True),
    "end": ("train_gpt:dump", False),
    "close": ("ftckpt.session.checkpointer:Checkpointer.close", False),
    "closed": ("ftckpt.session.checkpointer:Checkpointer.close", True),
    "ds data": ("train_deepspeed:Batches.__next__", False),
    "ds forward": ("deepspeed_model:Block.forward", False),
    "ds iteration": ("train_deepspeed:train_step", False),
    "ds optimizer": ("deepspeed.runtime.engine:DeepSpeedEngine._take_model_step", False),
    "ds stepped": ("deepspeed.runtime.engine:DeepSpeedEngine._take_model_step", True),
    "ds initialize": ("ftckpt.deepspeed.state:DeepSpeedState.__init__", True),
}


def write_plan(directory: Path, failures: list[Failure]) -> None:
    directory.mkdir()
    (directory / "plan.json").write_text(json.dumps([asdict(failure) for failure in failures]))


def fired(directory: Path) -> list[dict[str, Any]]:
    """Failures that have acted, in the order of time."""
    found = [json.loads(path.read_text()) for path in directory.glob("fired*")]
    return sorted(found, key=lambda one: float(one["time"]))


def _due(directory: Path) -> tuple[int, Failure] | None:
    """The failure of this attempt: the first that has not acted yet."""
    for number, fields in enumerate(json.loads((directory / "plan.json").read_text())):
        if not list(directory.glob(f"fired{number}.*")):
            return number, Failure(**fields)
    return None


def _install(directory: Path, rank: int, number: int, failure: Failure) -> None:
    place, after = STAGES[failure.stage]
    calls = itertools.count(1)

    def reached(*_: Any) -> None:
        if next(calls) == failure.nth:
            line = {"number": number, "rank": rank, "pid": os.getpid(), "time": time.time()}
            new = directory / f"new{number}.{rank}"
            new.write_text(json.dumps(line))
            new.rename(directory / f"fired{number}.{rank}")
            _fail(failure.how)

    killing.wrap(place, killing.at_calls(reached, after))


def main() -> None:
    constants.from_environment()
    directory, rank = Path(os.environ[DIRECTORY_VAR]), int(os.environ["RANK"])
    script = "train_deepspeed" if "--deepspeed_config" in sys.argv else "train_gpt"
    module: Any = importlib.import_module(script)
    planned = _due(directory)
    due = planned if planned is not None and planned[1].rank in (rank, ALL) else None
    if due is not None:
        _install(directory, rank, *due)
    cleanup = due[1].cleanup if due is not None else ""
    kept: list[Any] = []
    if cleanup == "close":
        killing.wrap("train_gpt:build", lambda build: lambda *args: kept.append(build(*args)) or kept[0])
    try:
        module.main(sys.argv[1:])
    finally:
        if cleanup == "close":
            kept[0].checkpointer.close()
        if cleanup == "destroy":
            module.dist.destroy_process_group()


if __name__ == "__main__":
    main()
