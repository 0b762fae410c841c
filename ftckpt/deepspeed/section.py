"""The ``"ftckpt"`` section of a DeepSpeed configuration, merged with the runner's flags.

A setting may be in the JSON, on the runner's command line, or in both, with the same value.
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
    """Sets settings from outside of the JSON, by the names of ``Config``; replaces those of an earlier call.

    Raises:
        ConfigError: an unknown name or an invalid value.
    """
    if settings:
        launcher.follow_uncaught()
    settings_are_written(SettingSyntax.JSON)
    Config.from_mapping(settings)
    _given.clear()
    _given.update(settings)


def from_flags(argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Splits ``argv`` into the settings of its ``--ftckpt*`` flags and all other arguments.

    Raises:
        ConfigError: see ``Config.from_flags``; ``--ftckpt`` itself may be in the JSON instead.
    """
    flags = [word.partition("=")[0] for word in argv if word.startswith("--ftckpt")]
    # ``Config`` accepts settings only together with --ftckpt, which may be in the JSON instead.
    alone = bool(flags) and "--ftckpt" not in flags
    config, rest = Config.from_flags(["--ftckpt", *argv] if alone else argv)
    names = [flag.removeprefix("--ftckpt-").replace("-", "_") for flag in flags if flag != "--ftckpt"]
    settings = {name: getattr(config, name) for name in names}
    return (settings if alone or not flags else {"enabled": True, **settings}), rest


def merged(section: Any) -> Config:
    """The configuration from ``section`` (None if the JSON has none) merged with the settings of ``configure``.

    Raises:
        ConfigError: not a mapping; an unknown name or an invalid value; a setting that differs between the two;
            settings without ``enabled``; ``layouts``, because a DeepSpeed script chooses its own.
    """
    if section is None:
        section = {}
    if section or _given:
        launcher.follow_uncaught()
    settings_are_written(SettingSyntax.JSON)
    # Parsed values are compared: 4GiB and 4 are equal, and so are a relative path and its absolute one.
    in_section, outside = Config.from_mapping(section), Config.from_mapping(_given)
    if leaves_out(section):
        return in_section
    for name, value in _given.items():
        if name in section and not _same(getattr(in_section, name), getattr(outside, name)):
            raise ConfigError(
                f"{flag_of(name)}: {value!r} for the runner but {section[name]!r} in the DeepSpeed configuration; "
                "set it in one place, or to the same value in both"
            )
    settings = {**section, **_given}
    if settings and "enabled" not in settings:
        raise ConfigError(
            '"enabled" is missing, without which the other settings have no effect: set "enabled": true in the '
            f'section "{NAME}" of the DeepSpeed configuration, or pass the runner its flag'
        )
    config = Config.from_mapping(settings)
    if config.layouts:
        raise ConfigError(
            "--ftckpt-layouts: not for DeepSpeed, whose scripts build their own layout and restart in any; remove it"
        )
    return config


def leaves_out(section: Any) -> bool:
    """Whether the section excludes its engine from snapshots, regardless of other settings."""
    return isinstance(section, dict) and section.get("enabled") is False


def _same(one: Any, other: Any) -> bool:
    return one == other or str(one) == str(other)  # a setting that may be a number or a word is parsed as either


def find(initialize: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The section in the arguments of ``deepspeed.initialize``, found as DeepSpeed finds its configuration.

    None if there is none, or if the arguments are invalid, which DeepSpeed itself reports.
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
    """The likely configuration of a script with this command line: the JSON of ``--deepspeed_config``, merged with
    the settings of ``configure``. Off if there is none or it is invalid, which ``merged`` reports later."""
    try:
        path = launcher.option("--deepspeed_config", words)
        config = json.loads(Path(path).read_bytes()) if path else {}
        return merged(config.get(NAME) if isinstance(config, dict) else None)
    except (OSError, ValueError, FtckptError):
        return Config()


def of(config: Any) -> Any:
    """The section of a DeepSpeed configuration, which is a mapping, a path, or base64 of JSON."""
    if not isinstance(config, dict):
        try:
            config = _read(config)
        except (ValueError, OSError):
            return None
    return config.get(NAME) if isinstance(config, dict) else None


def _read(config: Any) -> Any:
    """Reads a configuration; DeepSpeed's own function moves between releases, and some have none."""
    hjson = importlib.import_module("hjson")  # a dependency of DeepSpeed, without types

    if not isinstance(config, str):
        raise ValueError(f"a {type(config).__name__} is not a configuration")
    if os.path.exists(config):
        return hjson.loads(Path(config).read_text())
    return hjson.loads(base64.urlsafe_b64decode(config).decode())
