"""A process of the pool, from its fork to its exit."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any

from ftckpt import errors
from tests.support import constants

_PR_SET_PDEATHSIG = 1
_LEAVE_TIMEOUT_SECS = 5.0


@dataclass(frozen=True)
class Settings:
    """Options of all ranks of one run.

    A rank has `env` in its environment; the CPU stand-in for CUDA unless `stand_in` is False, or with `on_device` a
    part in the first real device; and, unless `init_process_group` is False, a default process group of `backend`.
    """

    world_size: int
    store_path: str
    env: dict[str, str] = field(default_factory=dict)
    stand_in: bool = True
    on_device: bool = False
    init_process_group: bool = True
    backend: str = "gloo"
    pg_timeout_secs: float = 60.0


def run(fn: Callable[..., Any], rank: int, args: tuple[Any, ...], settings: Settings, pipe: Connection) -> None:
    """Sends ("value", result) or ("error", traceback) through `pipe`, then exits without cleaning up.

    Library destructors can wait for peers that have died; a test must not.
    """
    _die_with_parent()
    faulthandler.enable()
    code = 0
    try:
        _prepare(rank, settings)
        errors.settings_are_written(errors.SettingSyntax.FLAG)
        message = ("value", fn(rank, settings.world_size, *args))
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        message = ("value", None) if code == 0 else ("error", traceback.format_exc())
    except BaseException:  # noqa: BLE001 - the caller gets it, whatever it is
        message, code = ("error", traceback.format_exc()), 1
    try:
        pipe.send(message)
    except Exception:  # noqa: BLE001 - such as a value that cannot be pickled
        pipe.send(("error", traceback.format_exc()))
        code = 1
    if code == 0 and settings.init_process_group:
        _leave_together()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError, OSError):
            stream.flush()
    os._exit(code)


def _die_with_parent() -> None:
    """A killed test run takes the fork server with it, and the server its ranks."""
    # The server lives while anyone holds this end of a pipe, and its children inherit it.
    server: Any = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prepare(rank: int, settings: Settings) -> None:
    os.environ.update(
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(settings.world_size),
            "LOCAL_WORLD_SIZE": str(settings.world_size),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "TORCHDYNAMO_DISABLE": "1",
            **settings.env,
        }
    )
    # What a rank starts itself, workers of a loader, is started as in any other process, not through our server.
    multiprocessing.set_start_method("fork", force=True)
    import torch

    from tests.support import smps

    smps.spare_smps()
    torch.set_num_threads(1)
    constants.from_environment()
    if settings.stand_in and not settings.on_device:
        from tests import standin

        standin.install()
    if settings.on_device:
        from tests.gpu import real_device

        real_device.share_device(settings.world_size)
    if settings.init_process_group:
        _init_process_group(rank, settings)


def _init_process_group(rank: int, settings: Settings) -> None:
    from datetime import timedelta

    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    timeout = timedelta(seconds=settings.pg_timeout_secs)
    store = FileStore(settings.store_path, settings.world_size)
    dist.init_process_group(settings.backend, store=store, rank=rank, world_size=settings.world_size, timeout=timeout)
    # Nobody starts before all are connected: a rank may begin by dying. Through the file, because a
    # barrier over sockets could still be under way elsewhere when the first one leaves it.
    if store.add("connected", 1) == settings.world_size:
        store.set("all-connected", "yes")
    store.wait(["all-connected"], timeout)


def _leave_together() -> None:
    """A rank that is done early must not close sockets its peers still read from."""
    from datetime import timedelta

    import torch.distributed as dist

    if dist.is_initialized() and dist.get_world_size() > 1:
        with contextlib.suppress(Exception):
            dist.monitored_barrier(timeout=timedelta(seconds=_LEAVE_TIMEOUT_SECS))
