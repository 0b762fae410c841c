"""Checks of settings that a range or a choice cannot express."""

from __future__ import annotations

import re

from ftckpt.errors import ConfigError

MODES = ("node", "replica", "copy", "peer")
"""Protection modes; ``parity.modes`` defines them."""

NAME_RULE = "use 1 to 64 of A-Z a-z 0-9 . _ -, the first a letter or digit"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LAYOUT = re.compile(r"((tp|pp|vpp|cp|ep|etp|dp)[1-9][0-9]{0,8})+")
_FUNCTION = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_]*")


def is_name(text: str) -> bool:
    """Whether ``text`` is a valid name of a job, node or rack: names become parts of paths and socket addresses."""
    return bool(_NAME.fullmatch(text))


def check_protect(protect: str) -> tuple[str, ...]:
    """The modes listed in ``protect``; () for none.

    Raises:
        ConfigError: an unknown or repeated mode, replica with copy, or auto or none with others.
    """
    modes = tuple(mode.strip() for mode in protect.split(","))
    known = ("auto", "none", *MODES)
    for mode in modes:
        if mode not in known:
            raise ConfigError(f"--ftckpt-protect: {mode!r} is not one of {', '.join(known)}")
    if len(set(modes)) < len(modes):
        raise ConfigError(f"--ftckpt-protect: {protect!r} names a mode twice")
    if len(modes) > 1 and {"auto", "none"} & set(modes):
        raise ConfigError(f"--ftckpt-protect: {protect!r}: auto and none cannot be combined with other modes")
    if {"replica", "copy"} <= set(modes):
        raise ConfigError(f"--ftckpt-protect: {protect!r}: replica and copy protect the same bytes; choose one")
    return () if modes == ("none",) else modes


def check_layouts(layouts: str) -> None:
    """Raises ConfigError if ``layouts`` is neither a list of layouts nor ``module:function``."""
    if not layouts or _FUNCTION.fullmatch(layouts):
        return
    for name in layouts.split(","):
        axes = re.findall("[a-z]+", name)
        if not _LAYOUT.fullmatch(name.strip()) or len(set(axes)) < len(axes):
            raise ConfigError(
                f"--ftckpt-layouts: {name!r} is not a layout; write axes (tp, pp, vpp, cp, ep, etp, dp), each at "
                "most once, and sizes, such as tp2pp2 or tp2pp1ep2, with commas between layouts; or module:function"
            )
