"""One setting of the configuration: its kind, its text, the values that it takes."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import Field, field
from typing import Any

from ftckpt.errors import ConfigError
from ftckpt.units import sized

_MAX_SECS = 1e9  # what timers of the operating system and of torch.distributed can hold


def declare(
    default: Any,
    text: str,
    *,
    choices: tuple[str, ...] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    auto: bool = False,
    unit_bytes: int = 0,
) -> Any:
    """``auto``: a whole number that may also be ``auto``. ``unit_bytes``: of a size, which may also be a text such as
    ``4GiB``."""
    rules = {"help": text, "choices": choices, "minimum": minimum, "maximum": maximum, "auto": auto}
    return field(default=default, metadata={**rules, "unit_bytes": unit_bytes})


def flag_of(name: str) -> str:
    """The flag of a setting."""
    return "--ftckpt" if name == "enabled" else f"--ftckpt-{name.replace('_', '-')}"


def reader_of(setting: Field[Any]) -> Callable[[str], Any]:
    """What reads the text of a setting's value; it raises ValueError."""
    kind, unit_bytes = kind_of(setting), setting.metadata["unit_bytes"]

    def read(text: str) -> Any:
        if setting.metadata["auto"] and text == "auto":
            return text
        if not unit_bytes:
            return kind(text)
        size = sized(text, unit_bytes)
        if kind(size) != size:
            raise ValueError(f"{text!r} is no whole number of units")
        return kind(size)

    read.__name__ = kind.__name__  # argparse says "invalid int value"
    return read


def kind_of(setting: Field[Any]) -> type:
    """Of its values, other than ``auto``."""
    return int if setting.metadata["auto"] else type(setting.default)


def convert(flag: str, text: str, setting: Field[Any]) -> Any:
    """The value that ``text`` means; ConfigError, which names the ``flag``, where it means none."""
    try:
        return reader_of(setting)(text)
    except ValueError:
        raise ConfigError(f"{flag}: {text!r} is not {_described(setting)}") from None


def read_size(setting: Field[Any], value: Any) -> Any:
    """The value, or the size that it is where it is a text such as ``4GiB``; ConfigError where it is none."""
    is_text = setting.metadata["unit_bytes"] and isinstance(value, str)
    return convert(flag_of(setting.name), value, setting) if is_text else value


def check_value(setting: Field[Any], value: Any) -> None:
    """Raises ConfigError where the setting does not take it."""
    name, kind, rule = flag_of(setting.name), kind_of(setting), setting.metadata
    if rule["auto"] and value == "auto":
        return
    accepted = (int, float) if kind is float else (kind,)
    # To Python a truth value is an int.
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(f"{name}: {value!r} is not {_described(setting)}")
    if rule["choices"] and value not in rule["choices"]:
        raise ConfigError(f"{name}: {value!r} is not one of {', '.join(rule['choices'])}")
    # Not ``value < minimum``, which is false of nan.
    if rule["minimum"] is not None and not value >= rule["minimum"]:
        raise ConfigError(f"{name}: {value} is too small; the least is {rule['minimum']}")
    most = rule["maximum"] or (_MAX_SECS if kind is float else None)
    if isinstance(value, int | float) and most is not None and value > most:
        raise ConfigError(f"{name}: {value} is too large; the most is {most:g}")


def _described(setting: Field[Any]) -> str:
    kinds = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    size = ", or a size such as 4GiB" if setting.metadata["unit_bytes"] else ""
    return kinds[kind_of(setting)] + (" or auto" if setting.metadata["auto"] else size)


def closest(name: str, known: Sequence[str]) -> str:
    """What may have been meant by a name that is not among those that are ``known``."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
