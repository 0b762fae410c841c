"""Validation of ``persist``, a directory or a URL, and of its format."""

from __future__ import annotations

import os

from ftckpt.errors import ConfigError

_SCHEMES = ("s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss", "http", "https", "memory", "file")
"""URL schemes that obstore supports; a list, because obstore need not be installed to plan a job."""

PERSIST_FORMATS = ("snapshot", "universal", "megatron-dist", "deepspeed-universal", "safetensors", "huggingface")
"""Formats on storage: ftckpt's own first, then the formats of ``ftckpt convert --to``."""


def _here() -> str:
    try:
        return os.getcwd()
    except OSError:  # the directory was deleted
        return ""


_STARTED_IN = _here()
"""The working directory at import, before a script changes it."""


def absolute(place: str) -> str:
    """Makes a path absolute, relative to the directory in which the job was started; returns URLs unchanged."""
    if not place or "://" in place:
        return place
    path = os.path.normpath(os.path.join(_STARTED_IN, place))
    if not os.path.isabs(path):
        raise ConfigError(f"{place}: the directory in which the job was started was deleted; use an absolute path")
    return path


def check_scheme(persist: str) -> None:
    """Raises ConfigError for a URL with an unknown scheme; ``persist`` as the user wrote it."""
    begin = persist.partition("/")[0]
    if ":" not in begin or persist.partition("://")[0] in _SCHEMES:
        return
    raise ConfigError(
        f"--ftckpt-persist: {persist!r} has an unknown scheme; use s3://, gs:// or az:// with bucket and folder, or "
        "a directory" + ("" if "://" in persist else f", such as ./{persist}")
    )


def check_persist(persist: str, persist_format: str) -> None:
    """Raises ConfigError if ``persist`` does not support the format."""
    if persist_format == PERSIST_FORMATS[0]:
        return
    if not persist:
        raise ConfigError(f"--ftckpt-persist-format: {persist_format} needs a directory: set --ftckpt-persist")
    if "://" in persist:
        raise ConfigError(
            f"--ftckpt-persist-format: {persist_format} is written into directories only, but --ftckpt-persist is "
            f"{persist}: use a directory that all nodes share, or omit --ftckpt-persist-format and use ftckpt convert"
        )
