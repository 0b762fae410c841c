"""Chooses between a directory and an object store."""

from __future__ import annotations

from ftckpt.errors import StorageError
from ftckpt.persist.files import FileStorage
from ftckpt.persist.objects import ObjectStorage
from ftckpt.persist.storage import Storage


def open_storage(where: str, setting: str = "") -> Storage:
    """The storage at a path, or at a URL such as ``s3://bucket/folder``.

    Args:
        setting: names it in errors, by its flag.

    Raises:
        StorageError: an unknown kind of URL, a directory that is not there or cannot be written, a bucket that is
            not there or refuses the credentials.
    """
    try:
        if "://" not in where:
            return FileStorage(where)
        return ObjectStorage(where)
    except StorageError as error:
        raise StorageError(f"{setting}: {error}" if setting else str(error), lasting=error.lasting) from None
