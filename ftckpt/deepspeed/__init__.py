"""ftckpt for DeepSpeed: ``import ftckpt.deepspeed`` in your own script, or one of these for an unmodified one.

ftckpt run ... SCRIPT ARGS...
torchrun ... -m ftckpt.deepspeed SCRIPT ARGS...

Either way ``"ftckpt": {"enabled": true}`` in DeepSpeed's JSON switches it on. ``deepspeed.initialize`` then returns
an engine whose state is the newest snapshot's: a script that trains ``while engine.global_steps < N`` resumes
there. The snapshot of an iteration is taken when ``engine.step`` or ``train_batch`` returns.
Megatron-DeepSpeed's own train loop counts otherwise, and is known.

With the runner snapshots are removed when the script has ended well. Without it ``engine.destroy()`` or ``close()``
shows that training is done; a script that calls neither leaves its snapshots in memory, because nothing else tells a
good end from ``sys.exit`` after an error. What ftckpt logs goes to the logger ``ftckpt``, which the runner shows on
stderr. Under torchrun the runner also keeps each attempt's rendezvous apart from earlier ones; without it
that is done only where ``deepspeed.initialize`` itself starts torch.distributed, and a script that does so earlier
needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment of torchrun.
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
    """Save ``value``, a loader, a sampler, counters or a generator of the script, with each snapshot.

    Call it before ``deepspeed.initialize``, which gives the object its state back. The object must have advanced
    when ``engine.step`` or ``train_batch`` returns. An object named ``data`` knows the position of the iterators that
    the script makes; where there is none, what was drawn from an iterator given to ``train_batch`` is skipped.

    Raises:
        ConfigError: the name is taken, the object has no ``state_dict`` or ``load_state_dict``, or it is too late.
    """
    if not name or name.startswith("ftckpt.") or name in active_engine.objects:
        raise ConfigError(f"register: the name {name!r} is taken or empty; names that begin with ftckpt. are ours")
    from ftckpt.frameworks.generators import as_object

    value = as_object(value)
    for method in ("state_dict", "load_state_dict"):
        if not callable(getattr(value, method, None)):
            raise ConfigError(f"register: {name!r} is {with_article(type(value).__name__)} and has no {method}()")
    if active() is not None:
        raise ConfigError(f"register: too late for {name!r}; register objects before deepspeed.initialize")
    active_engine.objects[name] = value


def attach(engine: Any, objects: Mapping[str, Stateful] | None = None, config: Config | None = None) -> Any:
    """Follow an engine whose JSON has no section ``"ftckpt"``; for objects that exist only when the engine does.

    Collective. Call it after ``deepspeed.initialize`` and any ``load_checkpoint``. It restores what is newer than
    the engine's state; ``engine.global_steps`` is right when it returns.

    Args:
        engine: the result of ``deepspeed.initialize``.
        objects: objects of the script, by name, in addition to registered ones.
        config: default is the section of the engine's JSON with what ``configure`` was given.

    Returns:
        The Checkpointer, or None if ftckpt is off.

    Raises:
        ConfigError: an engine is followed already, or no job name can be found.
        UnsupportedError: a version, a JSON field or state that ftckpt does not know.
    """
    from ftckpt.deepspeed import section

    config = config or section.merged(section.of(engine.config))
    if not config.enabled:
        return None
    from ftckpt.deepspeed.data import EpochBegins
    from ftckpt.deepspeed.session import EngineSession
    from ftckpt.frameworks.generators import as_object

    own = {name: as_object(value) for name, value in (objects or {}).items()}
    EngineSession(engine, {**active_engine.objects, **own}, config, EpochBegins())
    return active()


def active() -> Checkpointer | None:
    """The checkpointer of the engine that is followed, or None."""
    return active_engine.door.checkpointer


initialize.install()
