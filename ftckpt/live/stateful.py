"""What a user may hand over to be saved beside the model and the optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ftckpt.errors import MismatchError


class Stateful(Protocol):
    """A user's own object, a data loader for example: state as numbers, texts, lists, dicts, tensors."""

    def state_dict(self) -> Mapping[str, Any]:
        """The state."""

    def load_state_dict(self, state: Any) -> Any:
        """Take the state."""


def load_all(objects: Mapping[str, Stateful], saved: Mapping[str, Any]) -> None:
    """Give each object the state that was saved under its name.

    Raises:
        MismatchError: the snapshot has no such object.
    """
    for name, value in objects.items():
        if name not in saved:
            raise MismatchError(
                f"the snapshot has no object {name!r}, it has {', '.join(sorted(saved)) or 'none'}: register the "
                "same objects as the job that took it, or remove it with 'ftckpt clean JOB'"
            )
        value.load_state_dict(saved[name])


def load_all_reshaped(objects: Mapping[str, Stateful], saved: Sequence[Mapping[str, Any]]) -> None:
    """Give each object what was saved under its name on ranks of another layout, the firsts of its stages in order.

    An object with a method ``load_reshaped`` gets the list of its states, any other the first of them.

    Raises:
        MismatchError: the snapshot has no such object.
    """
    for name, value in objects.items():
        states = [of_rank[name] for of_rank in saved if name in of_rank]
        if not states:
            load_all({name: value}, saved[0])
        elif hasattr(value, "load_reshaped"):
            value.load_reshaped(states)
        else:
            value.load_state_dict(states[0])
