"""Learning rate schedulers: restored exactly, or an error names the difference."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ftckpt.errors import MismatchError
from ftckpt.model.objects import encode

_REMEDY = "use the scheduler and settings of the job that took the snapshot, or remove it with 'ftckpt clean JOB'"


def save(scheduler: Any) -> Any:
    """The scheduler's state; None without a scheduler."""
    return None if scheduler is None else scheduler.state_dict()


def load(scheduler: Any, saved: Any) -> None:
    """Restores the result of ``save``, regardless of the scheduler's current state.

    It may write learning rates into the optimizer's groups, so these must be loaded afterwards.

    Raises:
        MismatchError: only one of the two is None, the scheduler rejects the state, or has another one after loading.
    """
    if scheduler is None and saved is None:
        return
    name = "no scheduler" if scheduler is None else type(scheduler).__name__
    if scheduler is None or saved is None:
        there = "none" if saved is None else "the state of one"
        raise MismatchError(f"the job has {name}, and the snapshot has {there}; {_REMEDY}")
    # Megatron's ``load_state_dict`` adds loaded steps to the counted ones. Reset only if they are saved: in another
    # class this attribute may be a setting, which loading would not restore.
    if "num_steps" in saved and hasattr(scheduler, "num_steps"):
        scheduler.num_steps = 0
    try:
        scheduler.load_state_dict(copy.deepcopy(saved))
    except Exception as error:  # a class of the script's own may raise anything
        raise MismatchError(
            f"scheduler {name} rejects the saved state: {type(error).__name__}: {error}; {_REMEDY}"
        ) from error
    differing = list(_differences(saved, scheduler.state_dict(), ""))
    if differing:
        raise MismatchError(f"scheduler {name} differs from the saved state: {', '.join(differing)}; {_REMEDY}")


def load_reshaped(scheduler: Any, saved: Sequence[Any]) -> None:
    """Restores the results of ``save`` on ranks of another layout, which must be equal.

    Raises:
        MismatchError: they differ; see ``load``.
    """
    for other in saved[1:]:
        if differing := list(_differences({"": saved[0]}, {"": other}, "")):
            raise MismatchError(
                f"pipeline stages of the snapshot have different schedulers ({', '.join(differing)}), which no other "
                "layout can load: start with the layout of the snapshot"
            )
    load(scheduler, saved[0])


def _differences(saved: Any, now: Any, where: str) -> Iterator[str]:
    if isinstance(saved, Mapping) and isinstance(now, Mapping):
        # By name, because attributes may have been set in another order.
        for key in {**saved, **now}:
            name = f"{where}.{key}" if where else str(key)
            if key in saved and key in now:
                yield from _differences(saved[key], now[key], name)
            else:
                yield f"{name} is {'missing' if key in saved else 'new'}"
    elif encode(saved) != encode(now):
        yield f"{where} is {now!r:.60}, it was {saved!r:.60}"
