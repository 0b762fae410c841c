"""Schedulers of learning rates: brought back to exactly what was saved, or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ftckpt.errors import MismatchError
from ftckpt.model.objects import encode

_REMEDY = "start with the scheduler and the settings of the job that took it, or remove it with 'ftckpt clean JOB'"


def save(scheduler: Any) -> Any:
    """The scheduler's state; None where a job has no scheduler."""
    return None if scheduler is None else scheduler.state_dict()


def load(scheduler: Any, saved: Any) -> None:
    """Bring ``scheduler`` to what ``save`` gave, whatever it has counted or loaded before.

    It may write learning rates into the optimizer's groups: load these afterwards.

    Raises:
        MismatchError: only one of the two is None, the scheduler does not take the state, or has another one then.
    """
    if scheduler is None and saved is None:
        return
    name = "no scheduler" if scheduler is None else type(scheduler).__name__
    if scheduler is None or saved is None:
        there = "none" if saved is None else "the state of one"
        raise MismatchError(f"the job has {name}, and the snapshot has {there}; {_REMEDY}")
    # Megatron's ``load_state_dict`` adds the steps that it loads to those that were counted. Only where they are
    # saved: what another class has under this name may be a setting, and nothing would bring it back.
    if "num_steps" in saved and hasattr(scheduler, "num_steps"):
        scheduler.num_steps = 0
    try:
        scheduler.load_state_dict(copy.deepcopy(saved))
    except Exception as error:  # a class of the script's own may raise anything
        raise MismatchError(
            f"scheduler {name} does not take what was saved: {type(error).__name__}: {error}; {_REMEDY}"
        ) from error
    differing = list(_differences(saved, scheduler.state_dict(), ""))
    if differing:
        raise MismatchError(f"scheduler {name} is not what was saved: {', '.join(differing)}; {_REMEDY}")


def load_reshaped(scheduler: Any, saved: Sequence[Any]) -> None:
    """Bring ``scheduler`` to what ``save`` gave on ranks of another layout, all of them alike.

    Raises:
        MismatchError: they are not; see ``load``.
    """
    for other in saved[1:]:
        if differing := list(_differences({"": saved[0]}, {"": other}, "")):
            raise MismatchError(
                f"pipeline stages of the snapshot have different schedulers ({', '.join(differing)}), so no other "
                "layout can take them: start with the layout it was taken in"
            )
    load(scheduler, saved[0])


def _differences(saved: Any, now: Any, where: str) -> Iterator[str]:
    if isinstance(saved, Mapping) and isinstance(now, Mapping):
        # By name, not in order: attributes may have been set in another order.
        for key in {**saved, **now}:
            name = f"{where}.{key}" if where else str(key)
            if key in saved and key in now:
                yield from _differences(saved[key], now[key], name)
            else:
                yield f"{name} is {'missing' if key in saved else 'new'}"
    elif encode(saved) != encode(now):
        yield f"{where} is {now!r:.60}, it was {saved!r:.60}"
