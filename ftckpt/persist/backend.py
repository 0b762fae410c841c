"""Opens storage: a directory or an object store."""

from __future__ import annotations

from ftckpt.errors import StorageError
from ftckpt.persist.files import FileStorage
from ftckpt.persist.objects import ObjectStorage
from ftckpt.persist.storage import Storage


def open_storage(where: str, setting: str = "") -> Storage:
    """Opens the storage at a path, or at a URL such as ``s3://bucket/folder``. Errors begin with ``setting``.

    Raises:
        StorageError: an unknown kind of URL, a missing or read-only directory or bucket, or wrong credentials.
    """
    try:
        if "://" not in where:
            return FileStorage(where)
        return ObjectStorage(where)
    except StorageError as error:
        raise StorageError(f"{setting}: {error}" if setting else str(error), lasting=error.lasting) from None
