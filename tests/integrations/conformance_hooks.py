"""On a rank: what the hooks of an integration report in iterations, in evaluation and in a forked child."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ftckpt import forks
from tests.support.plain import Recorder
from tests.support.processes import in_child

if TYPE_CHECKING:
    from tests.integrations.adapters import Adapter

_ITERATIONS = 4
"""A loss scale that begins too high skips the first ones, which write nothing."""


@dataclass(frozen=True)
class Followed:
    """Reports on one rank: of ``iterations`` under all fences and under each of two ``alone``, with an entry for each
    write of an inner optimizer; of an evaluation; of an iteration after the hooks were ``removed``; and whether hooks
    are silent in a child."""

    iterations: list[list[str]]
    alone: list[list[str]]
    evaluated: list[str]
    removed: list[str]
    silent_in_child: bool


class _Trainer(Recorder):
    """Stands where a checkpointer does, also in a child."""

    is_off = False

    def off(self) -> None:
        self.is_off = True


def follow(rank: int, world_size: int, adapter: Adapter) -> Followed:
    """Build the job and train under hooks without a session. Collective."""
    job, trainer = adapter.build(), _Trainer()
    writes: list[Any] = []

    def listen() -> Sequence[Callable[[], object]]:
        fences = job.listen(trainer)
        while writes:
            writes.pop().remove()
        for optimizer in job.optimizers():  # after the hooks that fence
            writes.append(optimizer.register_step_pre_hook(lambda *_: trainer.log.append("write")))
        return fences

    def iterate() -> list[str]:
        trainer.log.clear()
        job.train_iteration()
        return [word for word in trainer.log if not word.startswith("step")]

    fences = listen()
    forks.trains(trainer.off)
    iterations = [iterate() for _ in range(_ITERATIONS)]
    trainer.log.clear()
    job.evaluate()
    evaluated = list(trainer.log)
    silent = in_child(lambda: _is_silent(job, trainer))
    alone = []
    for index in range(len(fences)):
        fences[1 - index]()
        tried = (iterate() for _ in range(_ITERATIONS))
        alone.append(next((log for log in tried if "write" in log), []))
        job.remove_hooks()
        fences = listen()
    job.remove_hooks()
    removed = [word for word in iterate() if word != "write"]
    return Followed(iterations, alone, evaluated, removed, silent)


def problems_of(seen: Followed) -> list[str]:
    """Deviations from what hooks must report, in words."""
    problems = []
    for log in seen.iterations:
        places = {word for word in log if word not in ("fence", "write")}
        if not {"forward", "backward"} <= places <= {"forward", "backward", "window", "tail"}:
            problems.append(f"places were {sorted(places)}")
    for name, logs in (("all fences", seen.iterations), *((f"fence {i}", [log]) for i, log in enumerate(seen.alone))):
        if not any("write" in log for log in logs):
            problems.append(f"{name}: nothing was written")
        problems += [f"{name}: {log}" for log in logs if "write" in log and not _is_fenced(log)]
    if set(seen.evaluated) != {"pause"}:
        problems.append(f"evaluation reported {seen.evaluated}")
    if seen.removed:
        problems.append(f"removed hooks reported {seen.removed}")
    return problems + ["hooks reported something in a child"] * (not seen.silent_in_child)


def _is_fenced(log: list[str]) -> bool:
    """Whether a fence comes before the first write, with nothing computed in between or afterwards."""
    first = log.index("fence") if "fence" in log else len(log)
    return first < log.index("write") and not {"forward", "backward"} & set(log[first:])


def _is_silent(job: Any, trainer: _Trainer) -> bool:
    """Hooks alone: threads of the stand-in for a device are none of a child's."""
    trainer.log.clear()
    for optimizer in job.optimizers():
        for hook in list(optimizer._optimizer_step_pre_hooks.values()):
            hook(optimizer, (), {})
    return set(trainer.log) <= {"write"} and trainer.is_off and forks.is_child
