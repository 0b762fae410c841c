"""The texts of ``persist``: a directory or a URL."""

from __future__ import annotations

import os

from ftckpt.errors import ConfigError

_SCHEMES = ("s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss", "http", "https", "memory", "file")
"""Of URLs of storage, as obstore knows them; it need not be installed where a job is planned."""

PERSIST_FORMATS = ("snapshot", "universal", "megatron-dist", "deepspeed-universal", "safetensors")
"""What lies on storage: the first as it was in memory, the others as ``ftckpt convert --to`` names them."""


def _here() -> str:
    try:
        return os.getcwd()
    except OSError:  # somebody has deleted it
        return ""


_STARTED_IN = _here()
"""As ftckpt is imported: before a script goes to another directory, as those do that have one for each run."""


def absolute(place: str) -> str:
    """A path, from where the job was started; what is none stays."""
    if not place or "://" in place:
        return place
    path = os.path.normpath(os.path.join(_STARTED_IN, place))
    if not os.path.isabs(path):
        raise ConfigError(f"{place}: the directory that the job was started in is gone; give the whole path")
    return path


def check_scheme(persist: str) -> None:
    """Refuse what looks like a place other than a directory and is none; ``persist`` as the user wrote it."""
    begin = persist.partition("/")[0]
    if ":" not in begin or persist.partition("://")[0] in _SCHEMES:
        return
    raise ConfigError(
        f"--ftckpt-persist: {persist!r} begins with no store that is known; write s3://, gs:// or az:// with "
        "bucket and folder, or a directory" + ("" if "://" in persist else f", such as ./{persist}")
    )


def check_persist(persist: str, persist_format: str) -> None:
    """Refuse a format that cannot lie there."""
    if persist_format == PERSIST_FORMATS[0]:
        return
    if not persist:
        raise ConfigError(
            f"--ftckpt-persist-format: {persist_format} lies nowhere: name a directory with --ftckpt-persist"
        )
    if "://" in persist:
        raise ConfigError(
            f"--ftckpt-persist-format: {persist_format} is written into directories only, and --ftckpt-persist is "
            f"{persist}: name "
            "a directory that all nodes share, or leave --ftckpt-persist-format and use ftckpt convert"
        )
