"""Storage for ``torch.distributed.checkpoint``: committed, verified, retained checkpoints in a directory or bucket.

::

    dcp.save(state, storage_writer=ftckpt.dcp.StorageWriter("s3://bucket/run", keep=3))
    if ftckpt.dcp.checkpoints("s3://bucket/run"):
        dcp.load(state, storage_reader=ftckpt.dcp.StorageReader("s3://bucket/run"))
"""

from __future__ import annotations

import os

from ftckpt.dcp.reader import StorageReader
from ftckpt.dcp.writer import StorageWriter
from ftckpt.persist.backend import open_storage
from ftckpt.persist.exports import prepare
from ftckpt.persist.paths import Place, locate
from ftckpt.persist.retention import usable

__all__ = ["StorageReader", "StorageWriter", "checkpoints"]


def checkpoints(where: str | os.PathLike[str]) -> list[str]:
    """The names of the checkpoints that a load may take, newest first; the directory is created if it is missing.

    Raises:
        StorageError: see ``StorageWriter``; or a manifest is damaged, so that abandoned checkpoints are unknown.
    """
    prepare(Place(os.fspath(where)))
    return [str(name) for name in usable(open_storage(locate(os.fspath(where)).where))]
