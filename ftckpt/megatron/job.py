"""Process-wide state of the integration: the followed job and its layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ftckpt.errors import LayoutError
from ftckpt.frameworks import entry
from ftckpt.frameworks.launcher import log_once
from ftckpt.model.layouts import Choice, layout_name

if TYPE_CHECKING:
    from ftckpt.session.checkpointer import Checkpointer

integration = entry.Integration()
# Process-wide, because the command line is rewritten long before a model is attached.
choice: Choice | None = None


def require_layout(chosen: Choice) -> Choice:
    """Logs a choice; from then on ``attach`` raises an error if the job was built in another layout."""
    global choice
    if chosen != choice:
        log_once("%s", chosen)
    choice = chosen
    return chosen


def check_layout(layout: Mapping[str, Any]) -> None:
    """Raises LayoutError if no layout was chosen, or the model was built in another one."""
    if choice is None:
        raise LayoutError(
            "layouts are listed but none was chosen: call ftckpt.megatron.choose_layout before building the model"
        )
    if any(layout[axis] != size for axis, size in choice.sizes.items()):
        raise LayoutError(
            f"layout {choice.name} was chosen, but the model was built as {layout_name(layout)}: "
            "build it with its sizes"
        )


def follower(forward_only: bool) -> Checkpointer | None:
    """The checkpointer for a schedule that starts to run; None if none is attached, or for an evaluation."""
    if integration.checkpointer is None:
        return None
    if forward_only:
        integration.checkpointer.pause()
        return None
    if integration.state is not None:
        integration.state.late_changes.begin()
    return integration.checkpointer
