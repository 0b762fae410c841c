"""One setting of the configuration: its type, its help text, and its valid values."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, field
from typing import Any

from ftckpt.errors import ConfigError

_MAX_SECS = 1e9  # the limit of timers of the operating system and of torch.distributed


def declare(
    default: Any,
    text: str,
    *,
    choices: tuple[str, ...] = (),
    minimum: float | str | None = None,
    maximum: float | str | None = None,
    auto: bool = False,
    quantity: Callable[[str], float] | None = None,
) -> Any:
    """Declares a setting. ``auto``: its value is an integer or a quantity, or ``auto``. ``quantity``: the function of
    ``units`` that parses its text; ``minimum`` and ``maximum`` are such texts as well."""
    rules = {"help": text, "choices": choices, "minimum": minimum, "maximum": maximum, "auto": auto}
    return field(default=default, metadata={**rules, "quantity": quantity})


def flag_of(name: str) -> str:
    """The flag of a setting."""
    return "--ftckpt" if name == "enabled" else f"--ftckpt-{name.replace('_', '-')}"


def reader_of(setting: Field[Any]) -> Callable[[str], Any]:
    """The function that parses the text of a setting's value; it raises ValueError."""
    kind = kind_of(setting)

    def read(text: str) -> Any:
        return text if setting.metadata["auto"] and text == "auto" else kind(text)

    read.__name__ = kind.__name__  # for argparse's message "invalid int value"
    return read


def kind_of(setting: Field[Any]) -> type:
    """The type of a setting's values other than ``auto``."""
    return int if setting.metadata["auto"] and setting.metadata["quantity"] is None else type(setting.default)


def convert(flag: str, text: str, setting: Field[Any]) -> Any:
    """Parses the value of a setting; raises ConfigError, which names the ``flag``, if it is invalid."""
    try:
        return reader_of(setting)(text)
    except ValueError:
        raise ConfigError(f"{flag}: {text!r} is not {_described(setting)}") from None


def check_value(setting: Field[Any], value: Any) -> None:
    """Raises ConfigError if ``value`` is invalid for the setting."""
    name, kind, rule = flag_of(setting.name), kind_of(setting), setting.metadata
    if rule["auto"] and value == "auto":
        return
    if rule["quantity"] is not None:
        _check_quantity(name, value, rule)
        return
    accepted = (int, float) if kind is float else (kind,)
    # In Python a bool is an int.
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(f"{name}: {value!r} is not {_described(setting)}")
    if rule["choices"] and value not in rule["choices"]:
        raise ConfigError(f"{name}: {value!r} is not one of {', '.join(rule['choices'])}")
    # Not ``value < minimum``, which is false for nan.
    if rule["minimum"] is not None and not value >= rule["minimum"]:
        raise ConfigError(f"{name}: {value} is too small; the least is {rule['minimum']}")
    most = rule["maximum"] or (_MAX_SECS if kind is float else None)
    if isinstance(value, int | float) and most is not None and value > most:
        raise ConfigError(f"{name}: {value} is too large; the most is {most:g}")


def _check_quantity(name: str, value: str, rule: Mapping[str, Any]) -> None:
    quantity, minimum, maximum = rule["quantity"], rule["minimum"], rule["maximum"]
    try:
        amount = quantity(value)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}" + (", or auto" if rule["auto"] else "")) from None
    if minimum is not None and amount < quantity(minimum):
        raise ConfigError(f"{name}: {value} is too small; the least is {minimum}")
    if maximum is not None and amount > quantity(maximum):
        raise ConfigError(f"{name}: {value} is too large; the most is {maximum}")


def _described(setting: Field[Any]) -> str:
    kinds = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    return kinds[kind_of(setting)] + (" or auto" if setting.metadata["auto"] else "")


def closest(name: str, known: Sequence[str]) -> str:
    """A suggestion for an unknown name."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
