"""Hooks of a DeepSpeed engine: they follow its steps and fence its optimizer.

All hooks are attributes of one engine and its optimizer that shadow methods of their classes. Phases of an
engine without a pipeline, in the kinds of ``ftckpt.schedule.iteration``:

| place | from | to |
|---|---|---|
| forward | ``engine.forward`` | its return |
| backward | the end of forward | the end of ``engine.backward``, or the start of gradient reduction in it |
| window | the end of a micro-batch's backward | the next forward |
| tail | the same of the last micro-batch: reduction, norm, overflow | the fence |

Gathers and reductions that ZeRO overlaps with computation belong to forward and backward: the link is not idle then.

The fence runs before the first write to optimizer-updated state, after the gradient norm has been reduced: around
``_optimizer_step`` of the ZeRO optimizers, and around ``step`` of the inner optimizer of all others. A second,
independent fence is a torch hook before each step of the inner optimizer. A skipped step writes nothing and needs
no fence.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import deepspeed
import torch
from packaging.version import Version

from ftckpt.deepspeed.active_engine import steps_of
from ftckpt.errors import UnsupportedError
from ftckpt.frameworks import charts, versions
from ftckpt.frameworks.entry import Patches
from ftckpt.frameworks.hooks import Hook, ModuleHook
from ftckpt.session.checkpointer import Checkpointer

_STEPS_PER_PRINT = 10
"""Default of most releases if the JSON does not set it."""


_FUNCTIONS = (
    "forward", "backward", "step", "allreduce_gradients", "gradient_accumulation_steps",
    "is_gradient_accumulation_boundary", "zero_optimization_stage",
)  # fmt: skip
"""Methods of an engine that are wrapped or called during training."""


class EngineHooks:
    """Reports one engine's phases, step boundaries and fences to its checkpointer.

    Args:
        patches: records the hooks, so that they can be removed.
        engine: a DeepSpeedEngine or a PipelineEngine.
        checkpointer: may be replaced later.
        begin: called before each training batch is used.
        check_counted: given if the script counts an iteration after the engine's step: the boundary is deferred until
            ``take_boundary``, and this raises if the script has not counted the iteration by then.
    """

    def __init__(
        self, patches: Patches, engine: Any, checkpointer: Checkpointer, begin: Callable[[], None],
        *, check_counted: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self.patches = patches
        self.engine = engine
        self.checkpointer = checkpointer
        self.begin = begin
        self.has_trained = False
        """Whether a step boundary was reached."""
        self.is_deferred = check_counted is not None
        """Whether step boundaries are deferred until ``take_boundary``."""
        self._check_counted = check_counted
        self._is_due = False
        self._counts_batches = _counts_batches(engine)
        self._draws = True
        self._thread = threading.get_ident()

    def phase(self, kind: str) -> None:
        """Reports the start of a phase."""
        # Gradients may also be reduced on autograd's threads, during a phase of the training thread.
        if threading.get_ident() == self._thread:
            self.checkpointer.phase(kind)

    def boundary(self, steps_before: int) -> None:
        """Marks a step boundary if the engine has counted a step, applied or skipped."""
        # An overflowed step counts too: it changes the loss scale and the number of skipped steps.
        if steps_of(self.engine) != steps_before:
            self.has_trained = self._is_due = True
            if not self.is_deferred:
                self.take_boundary()

    def take_boundary(self) -> None:
        """Takes the boundary of an iteration that has ended since the last call; all its counters have advanced."""
        if self._is_due:
            if self._check_counted is not None:
                self._check_counted()
            self._is_due = False
            self.checkpointer.step(steps_of(self.engine))
            self._draw()

    def _draw(self) -> None:
        """Writes scalars to the engine's monitor, as often as the engine prints."""
        engine, monitor = self.engine, getattr(self.engine, "monitor", None)
        if not self._draws or engine.global_rank != 0 or monitor is None or not monitor.enabled:
            return
        if steps_of(engine) % (engine.steps_per_print() or _STEPS_PER_PRINT) == 0:
            self._draws = charts.draw(
                self.checkpointer,
                lambda scalars: monitor.write_events(
                    [(*scalar, vars(engine)["global_samples"]) for scalar in scalars.items()]
                ),
            )

    def follow_micro_batches(self) -> None:
        """Hooks an engine without a pipeline."""
        module = self.engine.module
        before = module.register_forward_pre_hook(ModuleHook(module, self._before_module))
        self.patches.undo.append(before.remove)
        self.patches.wrap(self.engine, "forward", self._forward)
        self.patches.wrap(self.engine, "backward", self._backward)
        self.patches.wrap(self.engine, "allreduce_gradients", self._reduce)
        self.patches.wrap(self.engine, "step", self._step)

    def fence_optimizer(self) -> None:
        """Installs both fences, on an engine that ``check_optimizer`` has accepted."""
        inner = self.engine.basic_optimizer
        outer = self.engine.optimizer
        # ZeRO's optimizers write their flat tensors in this method; all others first write in the inner step.
        owner, name = (outer, "_optimizer_step") if hasattr(outer, "_optimizer_step") else (inner, "step")
        self.patches.wrap(owner, name, self._fenced)
        backup = getattr(outer, "backup_optimizer", None)  # the second optimizer of a partial offload
        for optimizer in (inner, backup) if backup is not None else (inner,):
            handle = optimizer.register_step_pre_hook(Hook(optimizer, lambda *_: self.checkpointer.fence()))
            self.patches.undo.append(handle.remove)

    def see_pauses(self) -> None:
        """Excludes the engine's evaluations and saves from the cost of snapshots; the session wraps
        ``load_checkpoint``."""
        for name in ("eval_batch", "save_checkpoint", "save_16bit_model"):
            if hasattr(self.engine, name):
                self.patches.wrap(self.engine, name, self._paused)

    def _paused(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.checkpointer.pause()
        return original(*args, **kwargs)

    def _fenced(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.checkpointer.fence()
        return original(*args, **kwargs)

    def _before_module(self, module: torch.nn.Module, *_: Any) -> None:
        # Some scripts call the module instead of the engine.
        if module.training and torch.is_grad_enabled():
            self.begin()
        else:
            self.checkpointer.pause()

    def _forward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not (self.engine.module.training and torch.is_grad_enabled()):
            return original(*args, **kwargs)
        self.begin()
        self.phase("forward")
        output = original(*args, **kwargs)
        self.phase("backward")  # the script may call loss.backward() instead of engine.backward
        return output

    def _backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.phase("backward")
        result = original(*args, **kwargs)
        self.phase(self._after_backward())
        return result

    def _reduce(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.phase(self._after_backward())
        return original(*args, **kwargs)

    def _step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before = steps_of(self.engine)
        # A script with its own gradient accumulation calls ``step`` only after its last micro-batch.
        self.phase(self._after_backward() if self._counts_batches else "tail")
        result = original(*args, **kwargs)
        if steps_of(self.engine) != before:
            self.boundary(before)
        return result

    def _after_backward(self) -> str:
        return "tail" if self.engine.is_gradient_accumulation_boundary() else "window"


def _counts_batches(engine: Any) -> bool:
    """Whether the engine, not the script, counts the micro-batches of an iteration.

    Raises:
        UnsupportedError: this release does not show it.
    """
    if hasattr(engine, "managed_gradient_accumulation"):
        return bool(engine.managed_gradient_accumulation())
    if Version(deepspeed.__version__) < Version("0.19.4"):  # these releases always count
        return True
    raise UnsupportedError(
        f"DeepSpeed {deepspeed.__version__} has no managed_gradient_accumulation, which shows whether the engine "
        "counts micro-batches: install a tested release"
    )


def check_engine(engine: Any) -> None:
    """Checks that an engine has the functions and fields that the hooks need.

    Raises:
        UnsupportedError: this release lacks one.
    """
    versions.require(
        f"DeepSpeed {deepspeed.__version__}", engine, dict.fromkeys(_FUNCTIONS, ()),
        {"global_steps": int, "module": torch.nn.Module},
    )  # fmt: skip


def check_optimizer(engine: Any) -> None:
    """Checks that an engine's optimizer can be fenced twice.

    Raises:
        UnsupportedError: the engine has no optimizer, or one without torch's step hooks.
    """
    inner = engine.basic_optimizer
    if inner is None or not hasattr(inner, "register_step_pre_hook"):
        raise UnsupportedError(
            f"optimizer: {type(inner).__name__} is not a torch optimizer; name one in the DeepSpeed configuration or "
            "pass one to deepspeed.initialize"
        )
