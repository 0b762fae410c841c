"""ftckpt for DeepSpeed: ``import ftckpt.deepspeed`` in your own script, or one of these for an unmodified one.

ftckpt run ... SCRIPT ARGS...
torchrun ... -m ftckpt.deepspeed SCRIPT ARGS...

``"ftckpt": {"enabled": true}`` in DeepSpeed's JSON switches it on. ``deepspeed.initialize`` then returns an engine
with the state of the newest snapshot: a script that trains ``while engine.global_steps < N`` resumes from it. The
snapshot of an iteration is taken when ``engine.step`` or ``train_batch`` returns. Megatron-DeepSpeed's own train
loop, which has its own counters, is supported.

The runner removes snapshots when the script has succeeded. Without the runner, ``engine.destroy()`` or ``close()``
signals success; a script that calls neither leaves its snapshots in memory, because its end cannot be distinguished
from ``sys.exit`` after an error. ftckpt logs to the logger ``ftckpt``, which the runner prints to stderr. Under
torchrun the runner also isolates each attempt's rendezvous from earlier ones. Without the runner this happens only if
``deepspeed.initialize`` starts torch.distributed; a script that starts it earlier needs
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment of torchrun.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ftckpt.config import Config
from ftckpt.deepspeed import active_engine, initialize
from ftckpt.deepspeed.active_engine import begin_iteration, close
from ftckpt.deepspeed.initialize import remove
from ftckpt.deepspeed.section import configure
from ftckpt.errors import ConfigError
from ftckpt.model.text import with_article

if TYPE_CHECKING:
    from ftckpt.frameworks.torch_state import Stateful
    from ftckpt.session.checkpointer import Checkpointer

__all__ = ["active", "attach", "begin_iteration", "close", "configure", "register", "remove"]


def register(name: str, value: Stateful) -> None:
    """Saves ``value`` (a loader, a sampler, counters or a generator of the script) with each snapshot.

    Call it before ``deepspeed.initialize``, which restores the object's state. The object must have advanced when
    ``engine.step`` or ``train_batch`` returns. An object named ``data`` restores the position of the script's
    iterators; without one, a restart skips the items already drawn from an iterator given to ``train_batch``.

    Raises:
        ConfigError: the name is taken, the object has no ``state_dict`` or ``load_state_dict``, or an engine is
            already followed.
    """
    if not name or name.startswith("ftckpt.") or name in active_engine.objects:
        raise ConfigError(f"register: the name {name!r} is taken, empty, or has the reserved prefix ftckpt.")
    from ftckpt.frameworks.torch_state import as_object

    value = as_object(value)
    for method in ("state_dict", "load_state_dict"):
        if not callable(getattr(value, method, None)):
            raise ConfigError(f"register: {name!r} is {with_article(type(value).__name__)} and has no {method}()")
    if active() is not None:
        raise ConfigError(f"register: too late for {name!r}; register objects before deepspeed.initialize")
    active_engine.objects[name] = value


def attach(engine: Any, objects: Mapping[str, Stateful] | None = None, config: Config | None = None) -> Any:
    """Follows an engine whose JSON has no section ``"ftckpt"``; needed for objects that are created after the engine.

    Collective. Call it after ``deepspeed.initialize`` and any ``load_checkpoint``. It restores a snapshot that is
    newer than the engine's state; ``engine.global_steps`` is correct when it returns.

    Args:
        engine: the result of ``deepspeed.initialize``.
        objects: objects of the script, by name, in addition to registered ones.
        config: default: the section of the engine's JSON merged with the settings of ``configure``.

    Returns:
        The Checkpointer, or None if ftckpt is off.

    Raises:
        ConfigError: an engine is already followed, or no job name can be found.
        UnsupportedError: a version, a JSON field or state that ftckpt does not support.
    """
    from ftckpt.deepspeed import section

    config = config or section.merged(section.of(engine.config))
    if not config.enabled:
        return None
    from ftckpt.deepspeed.data import EpochBegins
    from ftckpt.deepspeed.session import EngineSession
    from ftckpt.frameworks.torch_state import as_object

    own = {name: as_object(value) for name, value in (objects or {}).items()}
    EngineSession(engine, {**active_engine.objects, **own}, config, EpochBegins())
    return active()


def active() -> Checkpointer | None:
    """The checkpointer of the followed engine, or None."""
    return active_engine.integration.checkpointer


initialize.install()
