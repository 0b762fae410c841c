"""``engine.save_checkpoint`` taken over: what DeepSpeed would write while training waits SMPs write beside it.

A call returns when DeepSpeed has written its files without their elements, see ``ftckpt.persist.outlines``, as long
as the snapshot of the iteration is under way on all ranks and what was left out before has come. Otherwise DeepSpeed
saves by itself.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ftckpt.config import Config
from ftckpt.deepspeed.hooks import EngineHooks
from ftckpt.deepspeed.outline import OutlineEngine, parts_of
from ftckpt.errors import StorageError
from ftckpt.frameworks.launcher import log_once
from ftckpt.job.checkpointer import Checkpointer
from ftckpt.job.takeover import Takeover
from ftckpt.model.snapshot import SnapshotId
from ftckpt.persist import outlines
from ftckpt.persist.outlines import Outline, SaveMark
from ftckpt.persist.place import Place
from ftckpt.persist_setting import taken_over

_ENGINE = "TorchCheckpointEngine"
"""Of DeepSpeed's engines for checkpoints: all others write otherwise, or in the background themselves."""


class Saves:
    """What this rank knows of the script's saves; the same on all ranks.

    Args:
        hooks: of the engine; its checkpointer may be replaced.
        config: with ``persist`` in DeepSpeed's place.
    """

    def __init__(self, hooks: EngineHooks, config: Config) -> None:
        self._hooks = hooks
        self._engine = hooks.engine
        self._directory = taken_over(config.persist)
        self._snapshots = Place.of(config.persist, config.persist_format).snapshots
        self._takeover = Takeover(self._engine.device, self._has_come, one_at_a_time=True)
        self._left: SnapshotId | None = None
        self._given: dict[str, Any] = {}
        self._is_called = False

    @property
    def _checkpointer(self) -> Checkpointer:
        return self._hooks.checkpointer

    def save(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Around ``engine.save_checkpoint``, which all ranks call."""
        call = inspect.signature(original).bind(*args, **kwargs)
        call.apply_defaults()
        given, iteration = dict(call.arguments), int(self._engine.global_steps)
        if given["tag"] is None:
            given["tag"] = f"global_step{iteration}"  # as DeepSpeed
        self._is_called = True
        leaves = self._takeover.leaves(self._checkpointer, iteration, self._unfit(given))
        if not leaves or not self._outline(original, given, iteration):
            return self._by_deepspeed(original, given)
        return True

    def end(self) -> bool:
        """Behind the end of training: what was left and has not come DeepSpeed saves, if it still can; whether it
        has, just now. Collective."""
        if not self._is_called:
            log_once(
                "--ftckpt-persist: deepspeed: save_checkpoint was never called: no checkpoint of DeepSpeed's lies "
                "in %s",
                self._directory,
            )
        if self._takeover.left < 0 or not torch.distributed.is_initialized():
            self._tell(self._takeover.left)
            return False
        left, engine = self._takeover.left, self._engine
        lacks = torch.tensor(
            [engine.global_rank == 0 and self._takeover.lacks()], dtype=torch.int, device=engine.device
        )
        torch.distributed.all_reduce(lacks, op=torch.distributed.ReduceOp.MAX)
        saves = bool(lacks.item()) and engine.global_steps == left
        if saves:
            self._by_deepspeed(engine.save_checkpoint, self._given)
        self._tell(left)
        return saves

    def _tell(self, left: int) -> None:
        if left >= 0 and self._takeover.lacks():
            log_once("save_checkpoint: what was to be in %s of iteration %d is not there", self._directory, left)

    def _unfit(self, given: dict[str, Any]) -> str:
        """Why this call cannot be left to SMPs, whatever is under way."""
        engine, tag = self._engine, str(given["tag"])
        kind = type(engine.checkpoint_engine).__name__
        for wrong, text in (
            (
                os.path.realpath(str(given["save_dir"])) != os.path.realpath(self._directory),
                f"save_checkpoint({str(given['save_dir'])!r}) is not the directory of persist, {self._directory}",
            ),
            (
                os.sep in tag or tag in ("", ".", "..", "ftckpt"),
                f"the tag {tag!r} is not the name of a directory there",
            ),
            (kind != _ENGINE, f"the checkpoint engine {kind} writes otherwise than {_ENGINE}"),
            (
                engine.use_node_local_storage(),
                "checkpoint.use_node_local_storage: not all nodes reach what is written",
            ),
        ):
            if wrong:
                return text
        return ""

    def _outline(self, original: Callable[..., Any], given: dict[str, Any], iteration: int) -> bool:
        """Let DeepSpeed write all but what the snapshot has; False where any rank could not. Collective."""
        checkpointer, engine = self._checkpointer, self._engine
        self._left = SnapshotId(checkpointer.lineage, iteration)
        outline = Outline(self._snapshots, self._left)
        problem = _tried(lambda: self._clear(outline)) if engine.global_rank == 0 else ""
        if self._takeover.refused(checkpointer, iteration, problem):
            return False
        writer = OutlineEngine(engine.checkpoint_engine, outline.files, parts_of(engine))
        engine.checkpoint_engine = writer
        try:
            original(**{**given, "save_dir": str(outline.files)})
        finally:
            engine.checkpoint_engine = writer.wrapped
        problem = writer.problem or _tried(lambda: outline.write_table(engine.global_rank, writer.table))
        if not self._takeover.refused(checkpointer, iteration, problem):
            # Behind the tables of all ranks: with the mark it is complete.
            mark = SaveMark(str(given["tag"]), torch.distributed.get_world_size())
            problem = _tried(lambda: outline.complete(mark)) if engine.global_rank == 0 else ""
            if not self._takeover.refused(checkpointer, iteration, problem):
                self._given = given
                checkpointer.bring(iteration)
                return True
        if engine.global_rank == 0:
            _tried(outline.remove)
        return False

    def _clear(self, outline: Outline) -> None:
        outlines.remove_all(self._snapshots)
        outline.files.mkdir(parents=True)

    def _by_deepspeed(self, original: Callable[..., Any], given: dict[str, Any]) -> Any:
        is_ours = os.path.realpath(str(given["save_dir"])) == os.path.realpath(self._directory)
        if is_ours and self._engine.global_rank == 0:
            _tried(lambda: outlines.supersede(self._snapshots, str(given["tag"])))
        result = original(**given)
        if is_ours and given["save_latest"]:
            self._takeover.saved(self._checkpointer, int(self._engine.global_steps))
        return result

    def _has_come(self, iteration: int) -> bool:
        """Whether nothing is left to be done for what was left at ``iteration``."""
        try:
            return self._left is None or Outline(self._snapshots, self._left).mark is None
        except (OSError, StorageError):
            return False


def prepare(config: Config) -> None:
    """Make the directory, as DeepSpeed does with its first checkpoint. Raises OSError."""
    Path(taken_over(config.persist)).mkdir(parents=True, exist_ok=True)


def _tried(function: Callable[[], object]) -> str:
    """What went wrong, in words: empty where nothing did."""
    try:
        function()
    except (OSError, StorageError) as error:
        return str(error)
    return ""
