"""The trainer's side of memory that the SMP holds (``memory: memfd``)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from ftckpt.arena import memfd
from ftckpt.config import Config
from ftckpt.errors import FtckptError
from ftckpt.smp.client import SmpClient, Watch, find_or_start

_ASK_SECS = 10.0
_PATIENCE_SECS = 5.0
"""A new SMP is there within about a second."""


class Keeper:
    """From now on what this process creates in the node's directory is held by its SMP.

    A thread hands the memory to the next SMP where that one died: every trainer needs a keeper, and one of them a
    ``Watch``. After ``stop`` plain files are created; the memory of arenas stays with the SMP.

    Args:
        client: of the node's SMP, which runs.
        told: called with an event's name and fields: ``memory_handed_over``, ``smp_error``.

    Raises:
        UnsupportedError: this host cannot do it.
    """

    def __init__(self, client: SmpClient, told: Callable[..., None], every_secs: float = 0.5) -> None:
        self._node_dir, self._told, self._every_secs = client.node_dir, told, every_secs
        memfd.use_memfds(client.node_dir, lambda request: client.call(request, _ASK_SECS))
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ftckpt-memory", daemon=True)
        self._thread.start()

    def stop(self, timeout_secs: float = 2 * _ASK_SECS) -> None:
        """Keep nothing any more: arenas are closed, or removed. A second call does nothing."""
        self._stopped.set()
        self._thread.join(timeout_secs)
        memfd.stop_memfds(self._node_dir)

    def _run(self) -> None:
        since: float | None = None
        while not self._stopped.wait(self._every_secs):
            try:
                handed = memfd.keep(self._node_dir)
                since = None
                if handed:
                    self._told("memory_handed_over", files=handed)
            except (FtckptError, OSError) as error:
                since = time.monotonic() if since is None else since
                if time.monotonic() - since > _PATIENCE_SECS:
                    self._told("smp_error", error=f"no SMP holds the snapshots of this process: {error}")
                    since = float("inf")  # once for each time that it is gone


def hold_memory(config: Config, node_dir: Path, watches: bool, told: Callable[..., None]) -> Callable[[], None]:
    """Where ``memory`` is ``memfd``: have an SMP, which from now on holds what this process creates in ``node_dir``.

    Args:
        watches: whether this process starts a new SMP when the node's dies; one of a node must.
        told: called with an event's name and fields.

    Returns:
        What ends it: call it when the arenas of this process are closed.

    Raises:
        SmpError: there is no SMP, and none can be started.
        UnsupportedError: this host cannot do it.
    """
    if config.memory != "memfd":
        return lambda: None
    client = find_or_start(node_dir, Path(config.arena), config.job, config.node, asdict(config))
    keeper = Keeper(client, told)
    watch = Watch(client, told) if watches else None

    def end() -> None:
        if watch is not None:
            watch.stop()
        keeper.stop()

    return end
