"""What storage keeps of a job's failures: it is there yet where memory is gone, and that is a failure to be counted.

The record of an attempt lies in what claims the place for it (``commit.claim``). How long it has trained, and whether
it has ended as it was to, is an object of its own, written behind each commit: what claims the place is nobody's to
write but a start's.
"""

from __future__ import annotations

import json
from contextlib import suppress

from ftckpt.errors import StorageError
from ftckpt.model import codec
from ftckpt.model.failures import FailureRecord, LastAttempt
from ftckpt.persist.commit import OWNER_NAME, TRAINED_NAME
from ftckpt.persist.storage import Storage


def last_attempt(storage: Storage, job: str = "") -> LastAttempt | None:
    """The last attempt that has claimed the place; None where none has, or it is not of ``job`` where that is named.

    Raises:
        StorageError: what is there is damaged, or storage fails.
    """
    if storage.size(OWNER_NAME) is None:
        return None
    try:
        told = json.loads(storage.read(OWNER_NAME)).get("failures")
        record = codec.from_json(told, FailureRecord) if told is not None else None
    except (AttributeError, ValueError) as error:
        raise StorageError(f"{storage.where}/{OWNER_NAME}: is damaged: {error}", lasting=True) from None
    if record is None or job not in ("", record.job):
        return None
    trained, ended = _trained(storage, record.owner)
    return LastAttempt(record.as_ended() if ended else record, max(record.began, trained))


def tell_trained(storage: Storage, owner: str, trained: float, ended: bool = False) -> None:
    """The run ``owner`` has trained until the time of day ``trained``, at least, in seconds; ``ended``: it has ended
    as it was to, and what it had in memory is not lost. Raises StorageError."""
    storage.put(TRAINED_NAME, json.dumps({"owner": owner, "trained": trained, "ended": ended}).encode())


def _trained(storage: Storage, owner: str) -> tuple[float, bool]:
    """What ``tell_trained`` was told of ``owner``. What is damaged, or of another run, tells nothing."""
    with suppress(AttributeError, KeyError, TypeError, ValueError):
        if storage.size(TRAINED_NAME) is not None:
            told = json.loads(storage.read(TRAINED_NAME))
            if told["owner"] == owner:
                return float(told["trained"]), bool(told["ended"])
    return 0.0, False
