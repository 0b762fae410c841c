"""The startup of every integration, its patches of the framework, and its state in this process.

A framework's folder defines its state, the boxes of its tensors, its phases and how a user switches ftckpt on;
everything else is here. Importing this module loads neither torch nor a framework, because a patched Megatron-LM
imports it before torch.
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
    """Reversible wrappers of framework functions and methods, and registered torch hooks.

    ``undo`` has one function for each, oldest first.
    """

    def __init__(self) -> None:
        self.undo: list[Callable[[], Any]] = []
        self._wrapped: list[tuple[Any, str, Callable[..., Any]]] = []

    def has(self, owner: Any, name: str) -> bool:
        """True if a wrapper of ``owner.name`` is in force, possibly inside a wrapper of other code.

        False if the module was reloaded and has redefined the function.
        """
        ours = [wrapped for other, of_other, wrapped in self._wrapped if other is owner and of_other == name]
        now: Any = getattr(owner, name, None)
        while now not in ours and hasattr(now, "__wrapped__"):
            now = now.__wrapped__
        # A wrapper of other code may lack ``__wrapped__``; a function that the module defines wraps nothing.
        is_own = isinstance(owner, ModuleType) and getattr(now, "__module__", None) == owner.__name__
        return now in ours or (bool(ours) and not is_own)

    def wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Replaces a module's function, or a method of one object, by ``around(original, *args, **kwargs)``."""
        original = getattr(owner, name, None)
        if original is None:
            raise UnsupportedError(
                f"{getattr(owner, '__name__', type(owner).__name__)} has no {name}, which ftckpt must wrap: "
                "install a tested release"
            )
        before, is_in_force = vars(owner).get(name), True  # None if the attribute is the class's
        is_method = isinstance(original, MethodType) and original.__self__ is owner

        @functools.wraps(original.__func__ if is_method else original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if is_method:
                self, *args = args  # type: ignore[assignment]
                if self is not owner:  # a copy of it
                    return getattr(type(self), name)(self, *args, **kwargs)
            # A wrapper of other code around this one may still call it after ``remove``.
            return around(original, *args, **kwargs) if is_in_force else original(*args, **kwargs)

        wrapped.__name__ = name  # pickle stores a method by name only and resolves it in the class
        ours = MethodType(wrapped, owner) if is_method else wrapped

        def undo() -> None:
            nonlocal is_in_force
            is_in_force = False
            self._wrapped.remove(entry)
            # Other code has wrapped ours: leave its wrapper in place.
            if vars(owner).get(name) is not ours:
                return
            if before is None:
                delattr(owner, name)  # uncovers the method of the class
            else:
                setattr(owner, name, before)

        entry = owner, name, ours
        setattr(owner, name, ours)
        self._wrapped.append(entry)
        self.undo.append(undo)

    def shadow(self, owner: Any, name: str, value: Any) -> None:
        """Sets an attribute of one object that shadows its class's."""
        setattr(owner, name, value)
        self.undo.append(lambda: vars(owner).pop(name, None))

    def remove(self) -> None:
        """Undoes all patches, newest first, because a later patch may wrap an earlier one.

        An error in one does not stop the others; it is raised at the end.
        """
        with ExitStack() as stack:
            # ExitStack calls them in reverse order, and all of them even if one raises.
            for undo in self.undo:
                stack.callback(undo)
            self.undo.clear()


class Proxy:
    """Proxy of a framework's object; forwards attributes that a subclass does not define to ``wrapped``."""

    def __init__(self, wrapped: Any) -> None:
        self.wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        # During copy, ``wrapped`` is not set yet; looking it up would recurse forever.
        if name == "wrapped" or name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.wrapped, name)


class Integration:
    """The state of one framework's integration in this process.

    ``config`` is the default of ``attach``. ``patches`` apply to the framework's modules; ``hooks`` to the model,
    optimizer and engine that ``checkpointer`` follows. ``state`` is its training state, if a callback needs it.
    """

    def __init__(self) -> None:
        self.config = Config()
        self.patches = Patches()
        self.hooks = Patches()
        self._checkpointer: Checkpointer | None = None
        self.was_used = False
        """True once a checkpointer has followed training."""
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
        """Stops following training; snapshots stay in memory."""
        try:
            self.hooks.remove()
        finally:
            self.checkpointer = self.state = None

    def remove(self) -> None:
        """Removes all hooks and patches."""
        try:
            self.leave()
        finally:
            self.patches.remove()


@dataclass(frozen=True)
class Start:
    """The job's configuration, process group and topology, known before any rank describes its state."""

    config: Config
    group: Group
    topology: Topology
    run: LauncherRun
    untested: str

    def build(self, state: Callable[[], Any]) -> Any:
        """Builds the training state. Collective: an error on one rank is raised on all."""
        from ftckpt.group import together

        def make() -> Any:
            with naming_what_is_missing(self.untested):
                return state()

        return together(self.group, make)

    def checkpointer(self, state: TrainingState) -> Checkpointer:
        """Creates a checkpointer for ``state``. Collective."""
        from ftckpt.session.checkpointer import Checkpointer

        return Checkpointer(self.config, state, self.topology, group=self.group, run=self.run)


@contextmanager
def naming_what_is_missing(untested: str) -> Iterator[None]:
    """Reports an AttributeError as a missing feature of the ``untested`` release, unless that is empty.

    Raises:
        UnsupportedError: instead of an AttributeError.
    """
    try:
        yield
    except AttributeError as error:
        if not untested:
            raise
        raise UnsupportedError(
            f"{untested} lacks a feature that ftckpt needs: {error}; install a tested release, or switch ftckpt off"
        ) from error


def prepare_storage(config: Config) -> None:
    """Checks the storage at start, and creates its directory if it is missing.

    Raises:
        ConfigError: the storage is unusable for every later attempt, too.
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
        return  # it may be reachable when it is needed
    if is_new:
        log_to_stderr().warning("ftckpt: --ftckpt-persist: created the missing directory %s", config.persist)


def start(
    config: Config, place: Callable[[], tuple[Mapping[str, int], Mapping[str, Any]]], untested: str = ""
) -> Start:
    """Names the job and the node, and gathers all ranks' coordinates. Collective; needs torch.distributed.

    Args:
        config: ``job`` and ``node`` may be unset.
        place: returns this rank's coordinates and the layout sizes; raises if they are unsupported.
        untested: the framework's release if ftckpt was not tested with it, else empty.

    Raises:
        ConfigError: a name is invalid, no job name is found, ranks have different ones, or two ranks have the
            same coordinates.
        FtckptError: raised on all ranks if ``place`` raises it on one.
        SystemExit: an earlier attempt of this launcher run ended the job.
    """
    if not logging.getLogger("ftckpt").hasHandlers():
        log_to_stderr()  # a script without logging set up would see no messages
    config = replace(config, job=job_name(config.job, os.environ), node=node_name(config.node, os.environ))
    tell_if_drawn(config.job, os.environ)
    prepare_storage(config)
    from ftckpt.group import Group
    from ftckpt.model.codec import gather

    group = Group(config.start_timeout_secs)
    follow_uncaught()
    code = code_if_over(config.job)
    # Collective: a new node has no record of earlier attempts.
    if codes := [one for one in gather(group, -1 if code is None else code, int) if one >= 0]:
        raise SystemExit(max(codes))
    topology = _gather_topology(group, config, place, untested)
    # One rank per launcher and machine writes the launch record.
    local = os.environ.get("LOCAL_RANK")
    speaks = topology.is_node_leader if local is None else local == "0"
    run = launcher_run(os.environ)
    return Start(config, group, topology, run if speaks else run.unheard(), untested)


def _gather_topology(
    group: Group, config: Config, place: Callable[[], tuple[Mapping[str, int], Mapping[str, Any]]], untested: str
) -> Topology:
    """Gathers all ranks' coordinates after checking that they share one job name. Collective."""
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
        f"the job is called {first!r} on rank 0 and {name!r} on rank {rank}: set the same --ftckpt-job or FTCKPT_JOB "
        "on all ranks"
    )
    error.of_all_ranks = True
    return error
