"""The description of a program: how its pretrain_gpt.py is started, and what it logs and saves."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.probe.lines import Lines, resumed
from tests.probe.scenes import Scene
from tests.support.repository import ROOT


@dataclass(frozen=True)
class Program:
    """A program and its scenes.

    ``about`` is the help text. ``runner`` is ftckpt's; ``common`` are flags of all scenes, and ``path`` goes in front
    of PYTHONPATH. In logs ``row`` matches the lines that are compared, ``times`` their parts that are not, and
    ``end`` the last line. ``checkpoint`` is the name of a checkpoint by its iteration, and ``newest`` the file that
    names the one to load, with its contents.
    """

    name: str
    about: str
    checkout: str
    runner: str
    common: str
    scenes: Mapping[str, Scene]
    row: re.Pattern[str]
    times: re.Pattern[str]
    end: str
    checkpoint: str
    newest: tuple[str, str]
    data: Callable[[Path], list[str]]
    """Flags for data that is, or may come, in this folder."""
    switched_on: Callable[[Path, Scene, Sequence[str]], Sequence[str]] = lambda folder, scene, flags: flags
    """The flags of a run in this folder as the program is given them; ``--ftckpt`` is among those under ftckpt."""
    after: Callable[[Lines, int], Lines] = resumed
    """The lines that the program logs where it starts after an iteration, given the lines of all."""
    make_data: Callable[[Path, Path], None] = lambda checkout, cache: None
    """Make the data once, given the checkout and the folder."""
    env: Mapping[str, str] = field(default_factory=dict)
    path: Sequence[Path] = ()


def in_front(checkout: Path, path: Sequence[Path]) -> dict[str, str]:
    """Environment in which Python, and make when it asks for Python, find what the checkout needs."""
    return {
        "PYTHONPATH": os.pathsep.join(map(str, [ROOT, *path, checkout])),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        # Make asks python3-config whether it fits; a checkout pins another Python.
        "PYENV_VERSION": platform.python_version(),
    }
