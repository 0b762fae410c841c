"""Separate keys for each attempt of a torchrun job, in the store that torchrun shares among attempts.

Since torch 2.5 the agent of group rank 0 keeps one TCPStore for all attempts (so does ``static``), and
``init_process_group`` of a restarted worker reads the addresses that dead workers wrote to it:
https://github.com/pytorch/pytorch/issues/135712. With ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`` in the agent's
environment rank 0 opens a new store each time, but a worker cannot set the agent's environment.

A worker has no name of the attempt either. Each agent has its own TORCHELASTIC_RESTART_COUNT, which does not count
restarts requested by other agents, and the rendezvous rounds are in another store, whose address the worker does not
get. So the workers agree on a name through the shared store, despite keys left by dead workers. The keys, with prefix
``ftckpt.attempts/``:

=====================  ==================================================================================
``leader``             written by rank 0: ``<its nonce>.<world size>``; the last write counts
``join/<leader>/<r>``  written by rank r: its own nonce, for each leader it reads
``go/<leader>/<n>``    written by rank 0, once all ranks have joined, for the nonce n of each of them
=====================  ==================================================================================

The name is the leader's nonce. Every process generates its own: a dead leader never acknowledges a later nonce, so a
worker that reads a stale ``leader`` waits until rank 0 of its own attempt overwrites it.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ftckpt.errors import LaunchError
from ftckpt.frameworks.launcher import is_static, log_once, log_to_stderr

if TYPE_CHECKING:  # torch.distributed has them too, but not for a type checker
    from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
else:
    from torch.distributed import PrefixStore, Store, TCPStore

REMEDY = "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment of torchrun"

_HOOK = "_create_c10d_store"  # the only function with which env:// and tcp:// open a store
_POLL_SECS, _LOOK_SECS = 0.1, 0.01
# Rank 0 may still import. After that torch's own retries go on, and report the error.
_LISTEN_SECS = 10.0


_isolation = ""
"""Description of how this attempt is isolated; empty before it is."""


def _is_shared() -> bool:
    """Whether torchrun shares one store among attempts; otherwise each attempt opens a new one."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # what torch itself compares with


def agree(store: Store, rank: int, world_size: int, timeout_secs: float) -> str:
    """Agrees on a new name with all ``world_size`` processes that call this concurrently; also a barrier.

    ``store`` may contain keys of earlier calls, completed or not, whose processes must have exited.

    Raises:
        LaunchError: not all processes called it within ``timeout_secs``.
    """
    deadline = time.monotonic() + timeout_secs
    nonce = secrets.token_hex(8)
    if rank == 0:
        return _lead(store, nonce, world_size, deadline)
    return _follow(store, nonce, rank, world_size, deadline)


def _lead(store: Store, nonce: str, world_size: int, deadline: float) -> str:
    joins = [f"join/{nonce}/{rank}" for rank in range(1, world_size)]
    store.set("leader", f"{nonce}.{world_size}")
    if joins and not _wait(store, joins, deadline - time.monotonic()):
        missing = [rank for rank, key in enumerate(joins, start=1) if not store.check([key])]
        raise LaunchError(
            f"ranks {missing[:16]} ({len(missing)} of {world_size}) did not reach torchrun's shared store; "
            f"if they are running, torchrun has given them another address than rank 0: {REMEDY}"
        )
    if joins:
        for follower in store.multi_get(joins):
            store.set(f"go/{nonce}/{follower.decode()}", "1")
    return nonce


def _follow(store: Store, nonce: str, rank: int, world_size: int, deadline: float) -> str:
    joined = ""
    while (left_secs := deadline - time.monotonic()) > 0:
        if not _wait(store, ["leader"], left_secs):
            break
        leader, _, size = bytes(store.get("leader")).decode().partition(".")
        if size != str(world_size):  # of an earlier attempt with another size
            time.sleep(min(_POLL_SECS, left_secs))
            continue
        if leader != joined:
            store.set(f"join/{leader}/{rank}", nonce)
            joined = leader
        if _comes(store, f"go/{leader}/{nonce}", min(_POLL_SECS, left_secs)):
            return leader
    raise LaunchError(
        f"rank {rank} of {world_size} found no rank 0 in torchrun's shared store, or not all ranks joined; "
        f"if they are running, torchrun has given them another address than this rank: {REMEDY}"
    )


def _wait(store: Store, keys: list[str], timeout_secs: float) -> bool:
    """Waits for all ``keys``; False after ``timeout_secs``."""
    try:
        # The store uses whole milliseconds, and 0 means its default timeout.
        store.wait(keys, timedelta(milliseconds=max(1, int(timeout_secs * 1000))))
    except dist.DistStoreError:  # the timeout; a lost connection is a DistNetworkError
        return False
    return True


def _comes(store: Store, key: str, secs: float) -> bool:
    """Waits for ``key``; False after ``secs``. Polls, because torch logs a warning for each wait that times out."""
    deadline = time.monotonic() + secs
    while not store.check([key]):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_LOOK_SECS)
    return True


def isolate() -> None:
    """Isolates this attempt's rendezvous from earlier ones, and logs how.

    Raises:
        LaunchError: attempts share torchrun's store and it cannot be divided.
    """
    log_to_stderr()  # before the wait for the other ranks, which may fail
    log_once("rendezvous: %s", isolate_attempts())


def isolate_attempts(timeout_secs: float = 300.0) -> str:
    """Makes ``init_process_group`` of this attempt ignore the keys of earlier attempts; returns a description.

    Every worker calls it before ``init_process_group`` (with ``env://``, ``tcp://`` on torchrun's port, or no
    address). If the store is shared, it waits for all workers of the attempt, at most ``timeout_secs``; otherwise it
    does nothing. It does not cover a store that the user's script opens itself. A second call has no effect.

    Raises:
        LaunchError: the store is shared and cannot be divided; the text has the remedy.
    """
    global _isolation
    if _isolation:
        return _isolation
    if not _is_shared():
        connect_promptly()
        return "torchrun shares no store among attempts: nothing to isolate"
    module = _checked_module()
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    name = _agree_through(host, port, rank, world_size, timeout_secs)
    # Agents keep the address of the first store. If another node becomes the first of the rendezvous, it opens a new
    # store, but older agents still give their ranks the old address.
    if rank == 0 and os.environ.get("GROUP_WORLD_SIZE", "1") != "1" and not is_static(os.environ):
        logging.getLogger("ftckpt").warning(
            "ftckpt: torchrun shares one store among all attempts, so a replacement node cannot join the job; use "
            "ftckpt run, or %s on each node", REMEDY,
        )  # fmt: skip
    original: Callable[..., Store] = getattr(module, _HOOK)
    setattr(module, _HOOK, _isolated(original, port, f"ftckpt.attempt.{name}"))
    _isolation = f"attempt {name}: own keys in the store torchrun shares at {host}:{port}"
    return _isolation


def connect_promptly() -> None:
    """Makes ranks connect to the store of rank 0 as soon as it listens. A second call has no effect.

    torch waits at least half a second after a failed first try, which is the usual case for forked ranks.
    """
    module = importlib.import_module("torch.distributed.rendezvous")
    original: Callable[..., Store] | None = getattr(module, _HOOK, None)
    if original is None or hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def create_store(hostname: str, port: int, rank: int, *args: Any, **kwargs: Any) -> Store:
        if rank:
            _await_listener(hostname, port)
        return original(hostname, port, rank, *args, **kwargs)

    setattr(module, _HOOK, create_store)


def _await_listener(host: str, port: int) -> None:
    """Waits until the address accepts connections; after the deadline torch reports the error itself."""
    begin = time.monotonic()
    while (waited_secs := time.monotonic() - begin) < _LISTEN_SECS:
        try:
            socket.create_connection((host, port), _LISTEN_SECS).close()
            return
        except OSError:
            # With growing pauses: thousands of ranks may wait for one that is still importing.
            time.sleep(0.005 + waited_secs / 20)


def check_isolated(remedy: str = "start the script with ftckpt's runner") -> None:
    """Checks that a restarted attempt can create the process groups.

    Raises:
        LaunchError: torchrun shares its store among attempts, and process groups were created without isolation.
    """
    if not _isolation and _is_shared():
        raise LaunchError(
            "torch.distributed was initialised before ftckpt could isolate the attempts of torchrun, so a restart "
            f"would wait for dead processes: {remedy}, or {REMEDY}"
        )


def _isolated(original: Callable[..., Store], port: int, prefix: str) -> Callable[..., Store]:
    def create_store(hostname: str, store_port: int, *args: Any, **kwargs: Any) -> Store:
        store = original(hostname, store_port, *args, **kwargs)
        # Checked at each call: torch's own helper processes switch to a private store with this variable.
        # The host is not compared, because a machine has several names and all ranks must decide alike.
        shared = _is_shared() and store_port == port
        return PrefixStore(prefix, store) if shared else store

    return create_store


def _agree_through(host: str, port: int, rank: int, world_size: int, timeout_secs: float) -> str:
    start = time.monotonic()
    try:
        client = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_secs))
        store = PrefixStore("ftckpt.attempts", client)
        return agree(store, rank, world_size, timeout_secs - (time.monotonic() - start))
    except dist.DistError as exc:
        reason = str(exc).splitlines()[0]
        raise LaunchError(f"torchrun's shared store at {host}:{port} does not respond ({reason}): {REMEDY}") from exc


def _checked_module() -> ModuleType:
    """The torch module to patch, after checking that it has the expected structure.

    The names are private to torch, so the code itself is checked instead of the version.
    """
    # The attribute torch.distributed.rendezvous is the function of that name.
    module = importlib.import_module("torch.distributed.rendezvous")
    handlers = getattr(module, "_rendezvous_handlers", {})
    hook_code = getattr(getattr(module, _HOOK, None), "__code__", None)
    # A torch that divides the store by this count itself would separate the workers of several agents.
    fits = hook_code is not None and "TORCHELASTIC_RESTART_COUNT" not in hook_code.co_consts
    for scheme in ("env", "tcp"):
        opener = handlers.get(scheme)
        calls = getattr(getattr(opener, "__code__", None), "co_names", ())
        fits = fits and _HOOK in calls and getattr(opener, "__globals__", None) is vars(module)
    if not fits:
        raise LaunchError(
            f"torchrun shares one store among attempts, and torch {torch.__version__} opens it in an "
            f"unknown way: {REMEDY}"
        )
    if dist.is_initialized():
        raise LaunchError("isolate_attempts was called too late: call it before init_process_group")
    return module
