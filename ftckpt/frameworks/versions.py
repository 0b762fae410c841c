"""The tested releases of each framework, and the check of the release in use."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from ftckpt.config import Config
from ftckpt.errors import UnsupportedError

# Lists, not ranges: hooks depend on names, call orders and fields that no release guarantees.
_TESTED = """
megatron-core 0.14.0 0.15.0 0.15.1 0.15.2 0.15.3 0.16.0 0.16.1 0.17.1 0.18.2 0.19.0 0.19.1
DeepSpeed 0.19.0 0.19.1 0.19.2 0.19.3 0.19.4 0.19.5 0.19.6 0.19.7 0.19.8
"""
# Other releases of these need no warning: ftckpt uses what they document, or finds a missing method.
_TRIED = """
torch 2.6.0 2.7.1 2.8.0 2.9.1 2.10.0 2.11.0 2.12.1 2.13.0 2.14.1
transformers 5.24.0
lightning 2.6.6
accelerate 1.15.0
torchtitan 0.3.0
ray 2.60.0
"""


TESTED, TRIED = (
    {program: releases for program, *releases in map(str.split, text.strip().splitlines())}
    for text in (_TESTED, _TRIED)
)


def admit(program: str, version: str, config: Config) -> str:
    """Checks the release of ``program``; returns its name and version if it was not tested, else an empty text.

    Raises:
        UnsupportedError: the release was not tested, and the settings require a tested one.
    """
    tested = ", ".join(TESTED[program])
    # The part after ``+`` names a build, or a commit of the repository that contains the program.
    if version.partition("+")[0] in TESTED[program]:
        return ""
    if config.versions == "tested":
        raise UnsupportedError(
            f"{program} {version} was not tested with ftckpt; tested releases are {tested}: install one of these, or "
            "remove --ftckpt-versions tested"
        )
    if os.environ.get("RANK", "0") == "0":
        logging.getLogger("ftckpt").warning(
            "ftckpt: %s %s was not tested: it has the hooks and fields that ftckpt needs, but bit-exact restarts are "
            "not verified; tested releases are %s", program, version, tested,
        )  # fmt: skip
    return f"{program} {version}"


def require(
    release: str, owner: Any, functions: Mapping[str, Sequence[str]], fields: Mapping[str, type] | None = None
) -> None:
    """Checks that a module or object of the framework has the functions and fields that ftckpt needs.

    Args:
        release: the framework and its version, for the error text.
        functions: by name, the names of arguments that ftckpt passes or reads.
        fields: by name, their types.

    Raises:
        UnsupportedError: one is missing or has another type.
    """
    where = getattr(owner, "__name__", type(owner).__name__)
    for name, arguments in functions.items():
        if not callable(function := getattr(owner, name, None)):
            raise _misfit(release, f"{where} has no function {name}")
        taken = inspect.signature(function).parameters
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
            continue
        if missing := [argument for argument in arguments if argument not in taken]:
            raise _misfit(release, f"{where}.{name} takes no argument {missing[0]}")
    for name, kind in (fields or {}).items():
        if not hasattr(owner, name):
            raise _misfit(release, f"{where} has no field {name}")
        if not isinstance(value := getattr(owner, name), kind):
            raise _misfit(release, f"{where}.{name} is of type {type(value).__name__}, not {kind.__name__}")


def _misfit(release: str, problem: str) -> UnsupportedError:
    return UnsupportedError(
        f"{release} is not compatible with ftckpt: {problem}; install a tested release, or switch ftckpt off"
    )
