"""The start path of every door, what it replaces in a framework, and what is active in this process.

A framework's own folder says what its state is, where its tensors lie in the layout, where its places are and how a
user switches ftckpt on. All else is here. Importing this loads neither torch nor a framework: the lines of a patched
Megatron-LM do so before they import torch.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import MethodType, ModuleType
from typing import TYPE_CHECKING, Any

from ftckpt.config import Config
from ftckpt.errors import ConfigError, StorageError, UnsupportedError
from ftckpt.forks import off_in_children
from ftckpt.frameworks.launcher import (
    code_if_over,
    follow_uncaught,
    job_name,
    log_to_stderr,
    node_name,
    tell_if_drawn,
)
from ftckpt.memory.launch_record import LauncherRun, launcher_run

if TYPE_CHECKING:
    from ftckpt.group import Group
    from ftckpt.model.topology import Topology
    from ftckpt.model.training_state import TrainingState
    from ftckpt.session.checkpointer import Checkpointer


class Patches:
    """What ftckpt has put before functions of a framework's modules and objects, and its hooks of torch's kind.

    ``undo`` has one function for each, the oldest first.
    """

    def __init__(self) -> None:
        self.undo: list[Callable[[], Any]] = []
        self._wrapped: list[tuple[Any, str, Callable[..., Any]]] = []

    def has(self, owner: Any, name: str) -> bool:
        """Whether ``wrap`` was called so, not undone, and is still in place, perhaps behind somebody else's wrapper.

        It is not where a module that was reloaded has defined its function anew.
        """
        ours = [wrapped for other, of_other, wrapped in self._wrapped if other is owner and of_other == name]
        now: Any = getattr(owner, name, None)
        while now not in ours and hasattr(now, "__wrapped__"):
            now = now.__wrapped__
        # Somebody else's wrapper need not say what is behind it; a module's own function has nothing behind it.
        is_own = isinstance(owner, ModuleType) and getattr(now, "__module__", None) == owner.__name__
        return now in ours or (bool(ours) and not is_own)

    def wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Let ``around(original, *args, **kwargs)`` stand before a module's function, or a method of one object."""
        original = getattr(owner, name, None)
        if original is None:
            raise UnsupportedError(
                f"{getattr(owner, '__name__', type(owner).__name__)} has no {name}, from where ftckpt is called: "
                "install a tested release"
            )
        # None where the attribute is the class's: it is taken off again, not set.
        before = vars(owner).get(name)
        is_in_force = True
        is_method = isinstance(original, MethodType) and original.__self__ is owner

        @functools.wraps(original.__func__ if is_method else original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if is_method:
                self, *args = args  # type: ignore[assignment]
                if self is not owner:  # a copy of it
                    return getattr(type(self), name)(self, *args, **kwargs)
            # A wrapper that somebody else has put around this one may go on calling it after ``remove``.
            return around(original, *args, **kwargs) if is_in_force else original(*args, **kwargs)

        wrapped.__name__ = name  # a pickle of a method has its name alone, and finds that of the class
        ours = MethodType(wrapped, owner) if is_method else wrapped

        def undo() -> None:
            nonlocal is_in_force
            is_in_force = False
            self._wrapped.remove(entry)
            # Somebody else's wrapper stands before ours now, and is not ours to take off.
            if vars(owner).get(name) is not ours:
                return
            if before is None:
                delattr(owner, name)  # the method of the class shows again
            else:
                setattr(owner, name, before)

        entry = owner, name, ours
        setattr(owner, name, ours)
        self._wrapped.append(entry)
        self.undo.append(undo)

    def shadow(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of one object, in front of that of its class."""
        setattr(owner, name, value)
        self.undo.append(lambda: vars(owner).pop(name, None))

    def remove(self) -> None:
        """Take all back, the last one first: a later patch may stand before an earlier one.

        What cannot be taken back keeps nothing else in force: its error is raised at the end.
        """
        with ExitStack() as stack:
            # Called from the last to the first, and all of them, whichever raises.
            for undo in self.undo:
                stack.callback(undo)
            self.undo.clear()


class Proxy:
    """Stands for an object of a framework; what a subclass does not define is ``wrapped``'s own."""

    def __init__(self, wrapped: Any) -> None:
        self.wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        # While a copy is being made nothing is wrapped yet, and asking for it would never end.
        if name == "wrapped" or name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.wrapped, name)


class Integration:
    """What is in force in this process for one framework.

    ``config`` is what ``attach`` uses where it is given none. ``patches`` are those of the framework's modules;
    ``hooks`` those of the model, the optimizer and the engine that ``checkpointer`` follows. ``state`` is what it
    saves, where a callback needs that. ``is_installed``: nothing of the framework goes without a hook or a line of
    ours.
    """

    def __init__(self) -> None:
        self.config = Config()
        self.is_installed = False
        self.patches = Patches()
        self.hooks = Patches()
        self._checkpointer: Checkpointer | None = None
        self.was_used = False
        """Whether a checkpointer has ever followed training."""
        self.state: Any = None
        off_in_children(self.leave)

    @property
    def checkpointer(self) -> Checkpointer | None:
        return self._checkpointer

    @checkpointer.setter
    def checkpointer(self, checkpointer: Checkpointer | None) -> None:
        self._checkpointer = checkpointer
        self.was_used = self.was_used or checkpointer is not None

    def leave(self) -> None:
        """Follow training no longer; snapshots stay where they are."""
        try:
            self.hooks.remove()
        finally:
            self.checkpointer = self.state = None

    def remove(self) -> None:
        """Put back all that was replaced."""
        try:
            self.leave()
        finally:
            self.is_installed = False
            self.patches.remove()


@dataclass(frozen=True)
class Start:
    """What the ranks of a job know of each other before any of them describes its state."""

    config: Config
    group: Group
    topology: Topology
    run: LauncherRun
    untested: str

    def build(self, state: Callable[[], Any]) -> Any:
        """The training state that ``state`` makes. Collective: one rank's refusal is raised on all."""
        from ftckpt.group import together

        def make() -> Any:
            with naming_what_is_missing(self.untested):
                return state()

        return together(self.group, make)

    def checkpointer(self, state: TrainingState) -> Checkpointer:
        """A checkpointer for ``state``. Collective."""
        from ftckpt.session.checkpointer import Checkpointer

        return Checkpointer(self.config, state, self.topology, group=self.group, run=self.run)


@contextmanager
def naming_what_is_missing(untested: str) -> Iterator[None]:
    """A field that the ``untested`` release does not have is no mistake of ours; nothing where that is empty.

    Raises:
        UnsupportedError: in place of an AttributeError.
    """
    try:
        yield
    except AttributeError as error:
        if not untested:
            raise
        raise UnsupportedError(
            f"{untested} has not what ftckpt looks for: {error}; install a tested release, or switch ftckpt off"
        ) from error


def prepare_storage(config: Config) -> None:
    """Refuse storage that a job cannot use, as soon as its settings are known, and make a directory that can be made.

    Raises:
        ConfigError: no later attempt could use it, either.
    """
    if not (config.enabled and config.persist):
        return
    from ftckpt.persist.exports import prepare
    from ftckpt.persist.paths import Place

    try:
        is_new = prepare(Place.of(config.persist, config.persist_format))
    except StorageError as error:
        if error.lasting:
            raise ConfigError(f"--ftckpt-persist: {error}") from None
        return  # it may be there when it is needed
    if is_new:
        log_to_stderr().warning("ftckpt: --ftckpt-persist: %s was not there, and has been made", config.persist)


def start(
    config: Config, place: Callable[[], tuple[Mapping[str, int], Mapping[str, Any]]], untested: str = ""
) -> Start:
    """Name the job and the node, and gather where every rank stands. Collective; torch.distributed is initialised.

    Args:
        config: ``job`` and ``node`` need not be given.
        place: gives this rank's coordinates and the sizes of the layout; refuses what the framework cannot do.
        untested: the release, where that was not tested.

    Raises:
        ConfigError: a name is none, or no job name can be found; ranks have different ones; two ranks claim the
            same coordinates.
        FtckptError: what ``place`` raises on any rank, on all.
        SystemExit: an earlier attempt of this launcher run ended the job.
    """
    if not logging.getLogger("ftckpt").hasHandlers():
        log_to_stderr()  # a script that has not configured logging would be told nothing
    config = replace(config, job=job_name(config.job, os.environ), node=node_name(config.node, os.environ))
    tell_if_drawn(config.job, os.environ)
    prepare_storage(config)
    from ftckpt.group import Group
    from ftckpt.model.codec import gather

    group = Group(config.start_timeout_secs)
    follow_uncaught()
    code = code_if_over(config.job)
    # Together: a node that is new knows of no earlier attempt.
    if codes := [one for one in gather(group, -1 if code is None else code, int) if one >= 0]:
        raise SystemExit(max(codes))
    topology = _gather_topology(group, config, place, untested)
    # One rank of those that a launcher started on a machine speaks for all of them.
    local = os.environ.get("LOCAL_RANK")
    speaks = topology.is_node_leader if local is None else local == "0"
    run = launcher_run(os.environ)
    return Start(config, group, topology, run if speaks else run.unheard(), untested)


def _gather_topology(
    group: Group, config: Config, place: Callable[[], tuple[Mapping[str, int], Mapping[str, Any]]], untested: str
) -> Topology:
    """Where every rank stands, once all have one name for the job. Collective."""
    from ftckpt.group import gather_all
    from ftckpt.model.topology import RankPlace, Topology

    layout: Mapping[str, Any] = {}

    def arrive() -> tuple[str, RankPlace]:
        nonlocal layout
        with naming_what_is_missing(untested):
            coords, layout = place()
        return config.job, RankPlace(coords, config.node)

    ranks = gather_all(group, arrive, tuple[str, RankPlace])
    first = ranks[0][0]
    if other := next((rank for rank, (job, _) in enumerate(ranks) if job != first), 0):
        raise _names_differ(first, other, ranks[other][0])
    return Topology(group.rank, tuple(member for _, member in ranks), layout)


def _names_differ(first: str, rank: int, name: str) -> ConfigError:
    error = ConfigError(
        f"the job is called {first!r} on rank 0 and {name!r} on rank {rank}: give all ranks one name, with "
        "--ftckpt-job or FTCKPT_JOB"
    )
    error.of_all_ranks = True
    return error
