"""What a user may hand over to be saved beside the model and the optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Stateful(Protocol):
    """A user's own object, a data loader for example: state as numbers, texts, lists, dicts, tensors."""

    def state_dict(self) -> Mapping[str, Any]:
        """The state."""

    def load_state_dict(self, state: Any) -> Any:
        """Take the state."""
