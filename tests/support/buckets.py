"""Object stores that are real servers of this machine, by what they do about conditions. Each starts when asked."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from ftckpt.persist.objects import ObjectStorage
from tests.support.radosgw import radosgw
from tests.support.s3_server import BUCKET, S3Server
from tests.support.swift import swift

REFUSES, TAKES, KEEPS = "refuses conditions", "takes conditions", "keeps to conditions"
"""Swift as it is; Swift as a store that says that it knows conditions and does not always; Ceph's gateway."""
SERVERS = (REFUSES, TAKES, KEEPS)


@contextmanager
def servers(folders: pytest.TempPathFactory) -> Iterator[Callable[[str], S3Server]]:
    """Gives the server of a kind; a test is skipped where its programs are not installed."""
    with ExitStack() as stack:

        @functools.cache
        def start(kind: str) -> S3Server:
            folder: Path = folders.mktemp("server")
            return stack.enter_context(radosgw(folder) if kind == KEEPS else swift(folder, kind == TAKES))

        yield start


def in_bucket(server: S3Server, **more: Any) -> ObjectStorage:
    """A new place on it."""
    return ObjectStorage(f"s3://{BUCKET}/{uuid.uuid4().hex}", **server.options(**more))
