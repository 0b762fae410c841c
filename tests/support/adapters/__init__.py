"""The frameworks as the conformance suite sees them: each adapter builds its example job of ``launch/``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class ScriptJob:
    """A job of one of the example scripts, for ``tests.support.conformance.adapter.Job``.

    Args:
        script: the module, with ``train_step`` and ``final_hashes``.
        job: what its ``build`` made.
    """

    def __init__(self, script: Any, job: Any) -> None:
        self._script = script
        self._job = job

    def train_iteration(self) -> list[float | None]:
        metrics = self._script.train_step(self._job)
        if getattr(self._job, "checkpointer", None):  # DeepSpeed's engine steps by itself
            self._job.checkpointer.step(self.iteration)  # type: ignore[attr-defined]
        return [metrics["loss"], metrics["grad_norm"], metrics["lr"], metrics["loss_scale"]]

    def hashes(self) -> Mapping[str, str]:
        hashes: Mapping[str, str] = self._script.final_hashes(self._job)
        return hashes
