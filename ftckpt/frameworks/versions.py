"""Which releases of a framework ftckpt was tested with, and what becomes of a job that has another one."""

from __future__ import annotations

from ftckpt.config import Config
from ftckpt.errors import UnsupportedError
from ftckpt.frameworks.launcher import log_once

# Lists, not ranges: hooks rest on names, orders and fields that no release promises.
TESTED = {
    "megatron-core": (
        "0.14.0", "0.15.0", "0.15.1", "0.15.2", "0.15.3", "0.16.0", "0.16.1", "0.17.1", "0.18.2", "0.19.0", "0.19.1",
    ),
    "DeepSpeed": ("0.19.0", "0.19.1", "0.19.2", "0.19.3", "0.19.4", "0.19.5", "0.19.6", "0.19.7", "0.19.8"),
}  # fmt: skip


def admit(program: str, version: str, config: Config) -> str:
    """What is to be examined in the first iterations, as ``program`` and its version; empty: nothing.

    Raises:
        UnsupportedError: the release was not tested, and only those are wanted.
    """
    tested = ", ".join(TESTED[program])
    # What follows ``+`` names a build, or a commit of whatever the program lies in.
    if version.partition("+")[0] in TESTED[program]:
        if config.versions != "always":
            return ""
        log_once("%s %s is examined in the first iterations, as --ftckpt-versions always says", program, version)
        return f"{program} {version}"
    if config.versions == "tested":
        raise UnsupportedError(
            f"{program} {version} was not tested with ftckpt; tested are {tested}: install one of these, or have it "
            "examined with --ftckpt-versions examine"
        )
    log_once(
        "ftckpt was not tested with %s %s (but with %s): its hooks and what snapshots hold are examined in the first "
        "iterations, not that a restart trains on with the same bits", program, version, tested,
    )  # fmt: skip
    return f"{program} {version}"
