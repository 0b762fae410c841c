"""What the suite must be told of a framework: how a job is built, trained and looked into."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ftckpt.config import Config
from ftckpt.model.training_state import TrainingState

if TYPE_CHECKING:
    import torch

    from ftckpt.session.checkpointer import Checkpointer


class Job(Protocol):
    """One rank's job, built and ready to train."""

    @property
    def iteration(self) -> int:
        """Iterations that are done, those before a restore among them."""

    def attach(self, config: Config) -> Checkpointer:
        """Attach ftckpt and restore; from then on iterations end with a snapshot. Collective."""

    def train_iteration(self) -> Sequence[float | None]:
        """One iteration, up to the boundary and with it; returns loss and what else must be the same again."""

    def hashes(self) -> Mapping[str, str]:
        """Of every tensor this rank holds: weights, buffers, masters, moments, RNG."""

    def state(self) -> TrainingState:
        """The state as ``attach`` describes it."""

    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """Those of torch's kind that step this rank's shard."""

    def listen(self, trainer: Any) -> Sequence[Callable[[], object]]:
        """Install the hooks of a session without one: they tell ``trainer``. Returns what takes each of two fences
        away, where there are two."""

    def remove_hooks(self) -> None:
        """Remove those hooks."""

    def evaluate(self) -> None:
        """A forward that trains nothing."""

    def add_parameter(self) -> None:
        """Give the model one more, ``extra.weight``, that needs gradients and that no optimizer steps."""


@dataclass(frozen=True)
class Adapter:
    """One framework in one configuration, such as ``tp2pp2``, unique within the framework. It is sent to every rank.

    ``masters`` says whether weights are casts of masters. ``build`` makes the job on a rank, where torch.distributed
    is ready. ``pool`` are options of ``pool.spawn_ranks``.
    """

    framework: str
    configuration: str
    ranks: int
    masters: bool
    build: Callable[[], Job] = field(compare=False)
    pool: Mapping[str, Any] = field(default_factory=dict, compare=False)
