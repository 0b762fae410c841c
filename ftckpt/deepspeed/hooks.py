"""Where ftckpt touches a DeepSpeed engine: it listens to its steps and fences its optimizer.

All hooks are attributes of the one engine and of its optimizer, in front of the methods of their classes; ``remove``
deletes them. Places of an engine without a pipeline, in the kinds of ``ftckpt.capture.iteration``:

| place | from | to |
|---|---|---|
| forward | ``engine.forward`` | its return |
| backward | that | the end of ``engine.backward``, or of the reduction-free part of it |
| window | a micro-batch's reduction of gradients or its end | the next forward |
| tail | the same of the last micro-batch: reduction, norm, overflow | the fence |

The gathers and reductions that ZeRO runs beside the computation belong to forward and backward: nobody is idle then.

The fence stands before the first write to stepped state, after the norm of the gradients has been agreed: around
``_optimizer_step`` of the ZeRO optimizers, and around ``step`` of the inner optimizer of all others. Once more, as a
guard that holds alone, it is a hook of torch before each step of the inner optimizer. A step that is skipped writes
nothing, and needs none.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from ftckpt.checkpointer import Checkpointer
from ftckpt.errors import UnsupportedError


class Hooks:
    """What ftckpt hears of one engine.

    Args:
        engine: a DeepSpeedEngine or a PipelineEngine.
        checkpointer: who is told; may be replaced later.
        begin: called once, before the first training batch is used.
    """

    def __init__(self, engine: Any, checkpointer: Checkpointer, begin: Callable[[], None]) -> None:
        self.engine = engine
        self.checkpointer = checkpointer
        self.begin = begin
        self.trained = False
        """Whether a boundary was reached."""
        self._begun = self._scheduled = False
        self._removed = False
        self._thread = threading.get_ident()
        self._undo: list[Callable[[], None]] = []

    def wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Let ``around(original, *args, **kwargs)`` stand before a method of the one object ``owner``."""
        original = getattr(owner, name)
        before = vars(owner).get(name)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if self._removed:  # another wrapper may have kept this one
                return original(*args, **kwargs)
            return around(original, *args, **kwargs)

        def undo() -> None:
            if vars(owner).get(name) is not wrapped:
                return
            if before is None:
                delattr(owner, name)  # the class's method shows again
            else:
                setattr(owner, name, before)

        setattr(owner, name, wrapped)
        self._undo.append(undo)

    def shadow(self, name: str, value: Any) -> None:
        """Set an attribute of the engine, in front of its class's."""
        setattr(self.engine, name, value)
        self._undo.append(lambda: delattr(self.engine, name))

    def remove(self) -> None:
        """Take all hooks away, the last one first."""
        self._removed = True
        while self._undo:
            self._undo.pop()()

    def phase(self, kind: str) -> None:
        """Training comes to a place. Autograd's own threads may come here too: they are not heard."""
        if threading.get_ident() == self._thread:
            self.checkpointer.phase(kind)

    def start(self) -> None:
        """The first training batch of this process is about to be used, or one that follows it."""
        if not self._begun:
            self._begun = True
            self.begin()

    def begin_again(self) -> None:
        """State was loaded once more before training began."""
        self._begun = False

    def boundary(self, steps_before: int) -> None:
        """An iteration is over if the engine has counted a step, whether it was applied or skipped."""
        self._scheduled = False
        if self.engine.global_steps != steps_before:
            self.trained = True
            self.checkpointer.step(self.engine.global_steps)

    def follow_micro_batches(self) -> None:
        """Listen to an engine without a pipeline."""
        self._undo.append(self.engine.module.register_forward_pre_hook(self._before_module).remove)
        self.wrap(self.engine, "forward", self._forward)
        self.wrap(self.engine, "backward", self._backward)
        self.wrap(self.engine, "allreduce_gradients", self._reduce)
        self.wrap(self.engine, "step", self._step)

    def fence_optimizer(self) -> None:
        """Put both fences up.

        Raises:
            UnsupportedError: the engine has no optimizer, or one that cannot be fenced twice.
        """
        inner = self.engine.basic_optimizer
        if inner is None or not hasattr(inner, "register_step_pre_hook"):
            raise UnsupportedError(
                f"optimizer: {type(inner).__name__} is no optimizer of torch's kind; name one in the DeepSpeed "
                "configuration or give one to deepspeed.initialize"
            )
        outer = self.engine.optimizer
        owner, name = (outer, "_optimizer_step") if hasattr(outer, "_optimizer_step") else (inner, "step")
        self.wrap(owner, name, self._fenced)
        others = [getattr(outer, "backup_optimizer", None)]
        for optimizer in [inner, *(other for other in others if other is not None)]:
            handle = optimizer.register_step_pre_hook(lambda *args: self.checkpointer.fence())
            self._undo.append(handle.remove)

    def _fenced(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.checkpointer.fence()
        return original(*args, **kwargs)

    def _before_module(self, module: torch.nn.Module, inputs: Any) -> None:
        """Some scripts call the module, and not the engine."""
        if module.training and torch.is_grad_enabled():
            self.start()

    def _forward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not (self.engine.module.training and torch.is_grad_enabled()):
            return original(*args, **kwargs)
        self.start()
        if not self._scheduled and self.engine.managed_gradient_accumulation():
            self.checkpointer.expect(*micro_batches_in_turn(self.engine.gradient_accumulation_steps()))
        self._scheduled = True
        self.phase("forward")
        output = original(*args, **kwargs)
        self.phase("backward")  # the loss may go backward by itself, without engine.backward
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
        before = self.engine.global_steps
        last = not self.engine.managed_gradient_accumulation()
        self.phase("tail" if last else self._after_backward())
        result = original(*args, **kwargs)
        if self.engine.global_steps != before:
            self.boundary(before)
        return result

    def _after_backward(self) -> str:
        return "tail" if self.engine.is_gradient_accumulation_boundary() else "window"


@functools.lru_cache(maxsize=16)
def micro_batches_in_turn(count: int) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """Kinds and relative lengths of the places of ``count`` micro-batches on an engine without a pipeline."""
    kinds = ("forward", "backward", "window") * (count - 1) + ("forward", "backward", "tail")
    return kinds, (1.0, 2.0, 0.0) * count
