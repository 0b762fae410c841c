"""The ``"ftckpt"`` section of a DeepSpeed configuration, and how it goes together with the runner's flags.

A setting may stand in the JSON, on the runner's command line, or in both. Settings given in one of them are
merged; a setting given in both must have the same value in both.
"""

from __future__ import annotations

import base64
import importlib
import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ftckpt.config import Config
from ftckpt.errors import ConfigError, FtckptError, SettingSyntax, settings_are_written
from ftckpt.frameworks import launcher
from ftckpt.setting import flag_of

NAME = "ftckpt"

_given: dict[str, Any] = {}


def configure(settings: Mapping[str, Any]) -> None:
    """Settings from outside of the JSON, by the names of ``Config``; replaces those of an earlier call.

    Raises:
        ConfigError: an unknown name or an impossible value.
    """
    if settings:
        launcher.follow_uncaught()
    settings_are_written(SettingSyntax.JSON)
    Config.from_mapping(settings)
    _given.clear()
    _given.update(settings)


def from_flags(argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Split ``argv`` into the settings that its ``--ftckpt*`` flags give and all the other arguments.

    Raises:
        ConfigError: see ``Config.from_flags``; ``--ftckpt`` itself may be left to the JSON.
    """
    flags = [word.partition("=")[0] for word in argv if word.startswith("--ftckpt")]
    # ``Config`` takes settings only beside --ftckpt, which may stand in the JSON here.
    alone = bool(flags) and "--ftckpt" not in flags
    config, rest = Config.from_flags(["--ftckpt", *argv] if alone else argv)
    names = [flag.removeprefix("--ftckpt-").replace("-", "_") for flag in flags if flag != "--ftckpt"]
    settings = {name: getattr(config, name) for name in names}
    return (settings if alone or not flags else {"enabled": True, **settings}), rest


def merged(section: Any) -> Config:
    """The configuration that ``section``, None where the JSON has none, and ``configure`` give together.

    Raises:
        ConfigError: not a mapping, an unknown name or an impossible value; a setting that differs between the two;
            settings, and nothing that says whether ftckpt is switched on; layouts, which a script chooses for itself.
    """
    if section is None:
        section = {}
    if section or _given:
        launcher.follow_uncaught()
    settings_are_written(SettingSyntax.JSON)
    # As they are read: 4GiB and 4 are one value, and so are a path and its whole name.
    in_section, outside = Config.from_mapping(section), Config.from_mapping(_given)
    if leaves_out(section):
        return in_section
    for name, value in _given.items():
        if name in section and not _same(getattr(in_section, name), getattr(outside, name)):
            raise ConfigError(
                f"{flag_of(name)}: {value!r} to the runner and {section[name]!r} in the DeepSpeed configuration; "
                "give it once, or the same in both"
            )
    settings = {**section, **_given}
    if settings and "enabled" not in settings:
        raise ConfigError(
            '"enabled" is missing, and the other settings mean nothing without it: say "enabled": true in the '
            f'section "{NAME}" of the DeepSpeed configuration, or give the runner its flag'
        )
    config = Config.from_mapping(settings)
    if config.layouts:
        raise ConfigError(
            "--ftckpt-layouts: a DeepSpeed script builds its own layout, and restarts in any; leave them out"
        )
    return config


def leaves_out(section: Any) -> bool:
    """Whether the section says of its engine that it is not saved, whatever is switched on for others."""
    return isinstance(section, dict) and section.get("enabled") is False


def _same(one: Any, other: Any) -> bool:
    return one == other or str(one) == str(other)  # what may be a number or a word is either


def find(initialize: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The section in what a call of ``deepspeed.initialize`` is given, read as DeepSpeed reads it.

    None where there is none, or where DeepSpeed itself has something to say about the call.
    """
    try:
        given = inspect.signature(initialize).bind(*args, **kwargs).arguments
    except TypeError:
        return None
    config = given.get("config")
    if config is None:
        config = given.get("config_params")
    for name in ("deepspeed_config", "deepscale_config"):
        if config is None:
            config = getattr(given.get("args"), name, None)
    return of(config)


def foreseen(words: Sequence[str]) -> Config:
    """What a script with this command line will most likely give ``deepspeed.initialize``: the JSON that DeepSpeed's
    own flag names, with what ``configure`` was given. Off where there is none, or it is wrong: ``merged`` raises that
    later."""
    try:
        path = launcher.option("--deepspeed_config", words)
        config = json.loads(Path(path).read_bytes()) if path else {}
        return merged(config.get(NAME) if isinstance(config, dict) else None)
    except (OSError, ValueError, FtckptError):
        return Config()


def of(config: Any) -> Any:
    """The section of a DeepSpeed configuration: a mapping, a path, or base64 of JSON."""
    if not isinstance(config, dict):
        try:
            config = _read(config)
        except (ValueError, OSError):
            return None
    return config.get(NAME) if isinstance(config, dict) else None


def _read(config: Any) -> Any:
    """Releases of DeepSpeed have this in different places, and some in none that could be called."""
    hjson = importlib.import_module("hjson")  # which DeepSpeed brings, and which has no types

    if not isinstance(config, str):
        raise ValueError(f"a {type(config).__name__} is no configuration")
    if os.path.exists(config):
        return hjson.loads(Path(config).read_text())
    return hjson.loads(base64.urlsafe_b64decode(config).decode())
