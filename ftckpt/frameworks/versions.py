"""Tested releases of each framework, and the treatment of a job with another one."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from ftckpt.config import Config
from ftckpt.errors import UnsupportedError

# Lists, not ranges: hooks rest on names, orders and fields that no release promises.
_TESTED = """
megatron-core 0.14.0 0.15.0 0.15.1 0.15.2 0.15.3 0.16.0 0.16.1 0.17.1 0.18.2 0.19.0 0.19.1
DeepSpeed 0.19.0 0.19.1 0.19.2 0.19.3 0.19.4 0.19.5 0.19.6 0.19.7 0.19.8
"""
TESTED = {program: releases for program, *releases in map(str.split, _TESTED.strip().splitlines())}


def admit(program: str, version: str, config: Config) -> str:
    """``program`` and its version where that was not tested, which is logged; empty where it was.

    Raises:
        UnsupportedError: the release was not tested, and the settings ask for a tested one.
    """
    tested = ", ".join(TESTED[program])
    # What follows ``+`` names a build, or a commit of whatever the program lies in.
    if version.partition("+")[0] in TESTED[program]:
        return ""
    if config.versions == "tested":
        raise UnsupportedError(
            f"{program} {version} was not tested with ftckpt; tested are {tested}: install one of these, or leave "
            "out --ftckpt-versions tested"
        )
    if os.environ.get("RANK", "0") == "0":
        logging.getLogger("ftckpt").warning(
            "ftckpt: %s %s was not tested: it has the hooks and fields that ftckpt needs, but nobody has compared "
            "what it trains after a restart; tested are %s", program, version, tested,
        )  # fmt: skip
    return f"{program} {version}"


def require(
    release: str, owner: Any, functions: Mapping[str, Sequence[str]], fields: Mapping[str, type] | None = None
) -> None:
    """Refuse a ``release`` in which a module or object of the framework does not look as ftckpt expects.

    Args:
        functions: by name, the arguments that ftckpt gives or reads by their names.
        fields: by name, their types.

    Raises:
        UnsupportedError: what is missing, or is something else.
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
        f"{release} does not fit this ftckpt: {problem}; install a tested release, or switch ftckpt off"
    )
