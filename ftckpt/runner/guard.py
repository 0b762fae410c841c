"""Imports for a process from which workers are forked; skips modules that are not fork-safe."""

from __future__ import annotations

import ctypes
import importlib
import importlib.abc
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from ftckpt.frameworks.imports import execute_with, find_behind

_FRAMEWORKS = ("ftckpt", "megatron", "deepspeed", "transformer_engine")
"""Preloaded even from the user's own directories; each worker imports all other modules there itself."""
_STANDARD = f"{os.path.dirname(os.__file__)}/"
_HARMLESS = ("/dev/null", "/dev/urandom", "/dev/random", "/dev/shm/", "/dev/nvidia")
"""Files that may be open during a fork. NVML opens /dev/nvidia*, and is fork-safe."""
# CUresult of cuda.h; dlfcn.h.
_CUDA_NOT_INITIALIZED = 3
_RTLD_NOLOAD = 4


class Guard(importlib.abc.MetaPathFinder):
    """Imports modules by name, unless that makes the process unsafe to fork.

    ``found`` maps modules that must not be imported to the reason, which is empty for those that import one of them.
    ``env`` has the environment variables that modules have set. ``left_out`` are modules to skip.
    """

    def __init__(self, left_out: Iterable[str]) -> None:
        self.found: dict[str, str] = {}
        self.env: dict[str, str] = {}
        self._origins: dict[str, str | None] = {}
        self._left_out = set(left_out)
        self._running: list[str] = []
        self._harms = harms()

    def preload(self, noted: Iterable[Any]) -> None:
        """Repeats the imports recorded in a worker: see ``notes.imports``."""
        places = list(sys.path)
        sys.meta_path.insert(0, self)
        try:
            for one in noted:
                if isinstance(one, list):
                    self._origins[one[0]] = one[1]
            for one in noted:
                if isinstance(one, dict):
                    os.environ.update(one.get("env", {}))
                    sys.path[:] = one.get("path", sys.path)
                elif one[0] not in sys.modules and one[0] not in self._left_out and is_preloaded(*one):
                    self._import(one[0])
        finally:
            sys.meta_path.remove(self)
            sys.path[:] = places

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = find_behind(self, fullname, path, target)
        if spec is None:
            return None
        if fullname in self._left_out or (self._origins.get(fullname) or spec.origin) != spec.origin:
            self._leave_out(fullname, "")
            raise ImportError(f"{fullname} is left out")
        execute_with(spec, self._execute)
        return spec

    def _import(self, name: str) -> None:
        env = dict(os.environ)
        with suppress(Exception, SystemExit):  # the module may be missing or left out
            importlib.import_module(name)
        self.env.update({name: value for name, value in os.environ.items() if env.get(name) != value})

    def _execute(self, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
        name = module.__name__
        self._running.append(name)
        try:
            execute(module)
            before, self._harms = self._harms, harms()
            if new := self._harms - before:
                self._leave_out(name, ", ".join(new))
                raise ImportError(f"{name} is left out")
        except (Exception, SystemExit) as error:  # modules may raise anything
            if name in self._origins and name not in self.found:  # it succeeded in a worker
                self._leave_out(name, f"raises {type(error).__name__}: {error}")
            raise
        finally:
            self._running.pop()

    def _leave_out(self, name: str, why: str) -> None:
        """Excludes a module, and the modules that are importing it, even if they handle the error."""
        self.found = {**dict.fromkeys(self._running, ""), **self.found}
        self.found[name] = self.found.get(name) or why
        self._left_out.update(self._running, (name,))


def is_preloaded(name: str, origin: str | None) -> bool:
    """Whether a module that a worker imported is preloaded for later workers.

    The user's own modules are not: they may read per-worker values, and change between attempts.
    """
    return name.partition(".")[0] in _FRAMEWORKS or (origin is not None and not _is_own(origin))


def own_files() -> dict[str, tuple[int, int]]:
    """The state of each imported file that is not part of an installed package."""
    paths = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    return {path: file_state(path) for path in paths if isinstance(path, str) and _is_own(path)}


def file_state(path: str) -> tuple[int, int]:
    """Modification time in ns and size of a file; zeros if it does not exist."""
    try:
        stat = os.stat(path)
    except OSError:
        return 0, 0
    return stat.st_mtime_ns, stat.st_size


def harms() -> Counter[str]:
    """The reasons why this process is not safe to fork; empty if it is."""
    if threads := _threads():
        # Fork-aware libraries, such as OpenBLAS, end their threads before a fork and restart them on demand.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns about threads, which are tested here
            pid = os.fork()
        if not pid:
            os._exit(0)
        os.waitpid(pid, 0)
        threads = _threads()
    found = Counter(f"starts a thread ({name})" for name in threads)
    with suppress(OSError):  # the driver is not loaded
        driver = ctypes.CDLL("libcuda.so.1", mode=_RTLD_NOLOAD)
        if driver.cuCtxGetCurrent(ctypes.byref(ctypes.c_void_p())) != _CUDA_NOT_INITIALIZED:
            found["initializes CUDA"] = 1
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            path = os.readlink(f"/proc/self/fd/{fd}")
            if path.startswith(("/dev/", "socket:")) and not path.startswith(_HARMLESS):
                found[f"opens {path.partition(':')[0]}"] += 1
    return found


def _threads() -> list[str]:
    """The names of this process's threads except the main one."""
    names = []
    for task in os.listdir("/proc/self/task"):
        with suppress(OSError):  # it has just ended
            if int(task) != os.getpid():
                names.append(Path(f"/proc/self/task/{task}/comm").read_text().strip())
    return names


def _is_own(path: str) -> bool:
    is_installed = path.startswith(_STANDARD) or "/site-packages/" in path or "/dist-packages/" in path
    return path.startswith("/") and not is_installed
