"""The texts of ``persist``: a directory, a URL, or a program in whose place snapshots are saved."""

from __future__ import annotations

import os

from ftckpt.errors import ConfigError

_SCHEMES = ("s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss", "http", "https", "memory", "file")
"""Of URLs of storage, as obstore knows them; it need not be installed where a job is planned."""

PERSIST_FORMATS = ("snapshot", "universal", "megatron-dist", "deepspeed-universal")
"""What lies on storage: the first as it was in memory, the others as ``ftckpt convert --to`` names them."""

MEGATRON, DEEPSPEED = "megatron", "deepspeed"
"""``persist`` so: in place of its own saving; ``deepspeed:DIR``, ``megatron:DIR`` once that is known."""


def program_of(persist: str) -> str:
    """In whose place ``persist`` says to save: ``MEGATRON``, ``DEEPSPEED``, or nobody's."""
    name = persist.partition(":")[0]
    return name if name in (MEGATRON, DEEPSPEED) else ""


def taken_over(persist: str) -> str:
    """The directory of another program's checkpoints that ``persist`` names; empty where it names another place."""
    return persist.partition(":")[2] if program_of(persist) else ""


def _here() -> str:
    try:
        return os.getcwd()
    except OSError:  # somebody has deleted it
        return ""


_STARTED_IN = _here()
"""As ftckpt is imported: before a script goes to another directory, as those do that have one for each run."""


def absolute(place: str) -> str:
    """A path, also behind the name of a program, from where the job was started; what is none stays."""
    program = program_of(place)
    if not place or "://" in place or (program and not taken_over(place)):
        return place
    path = os.path.normpath(os.path.join(_STARTED_IN, taken_over(place) if program else place))
    if not os.path.isabs(path):
        raise ConfigError(f"{place}: the directory that the job was started in is gone; give the whole path")
    return f"{program}:{path}" if program else path


def check_scheme(persist: str) -> None:
    """Refuse what looks like a place other than a directory and is none; ``persist`` as the user wrote it."""
    begin = persist.partition("/")[0]
    if ":" not in begin or program_of(persist) or persist.partition("://")[0] in _SCHEMES:
        return
    raise ConfigError(
        f"--ftckpt-persist: {persist!r} begins with no store or program that is known; write s3://, gs:// or az:// "
        "with bucket and folder, megatron, deepspeed:DIR, or a directory"
        + ("" if "://" in persist else f", such as ./{persist}")
    )


def check_persist(persist: str, persist_format: str) -> None:
    """Refuse a program without its directory, and a format that cannot lie there."""
    program, is_url = program_of(persist), "://" in persist
    if program == DEEPSPEED and (is_url or not taken_over(persist)):
        raise ConfigError(
            f"--ftckpt-persist: {persist!r} names no directory: write deepspeed:DIR with the one that the script "
            "gives to save_checkpoint"
        )
    if persist_format == PERSIST_FORMATS[0]:
        return
    if not persist:
        raise ConfigError(
            f"--ftckpt-persist-format: {persist_format} lies nowhere: name a directory with --ftckpt-persist"
        )
    if is_url:
        raise ConfigError(
            f"--ftckpt-persist-format: {persist_format} is written into directories only, and --ftckpt-persist is "
            f"{persist}: name "
            "a directory that all nodes share, or leave --ftckpt-persist-format and use ftckpt convert"
        )
    if program:
        raise ConfigError(
            f"--ftckpt-persist-format: {persist_format} beside --ftckpt-persist {program}, which writes what "
            f"{program} itself does"
        )
