"""Errors that another process makes anew: the class that tells what to do, and what it knows."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from ftckpt import errors
from ftckpt.errors import FtckptError, SmpError, StorageError, error_from_json
from ftckpt.smp.channel import PeerError, RefusedError


def kinds(base: type[FtckptError] = FtckptError) -> Iterator[type[FtckptError]]:
    yield base
    for kind in base.__subclasses__():
        yield from kinds(kind)


def sent(error: FtckptError) -> FtckptError:
    return error_from_json(json.loads(json.dumps(error.to_json())), "rank 1: ")


@pytest.mark.parametrize(
    "kind", [one for one in kinds() if one.__module__ == errors.__name__], ids=lambda kind: kind.__name__
)
def test_a_class_arrives_as_it_was(kind: type[FtckptError]) -> None:
    arrived = sent(kind("--ftckpt-slots: 3"))
    assert type(arrived) is kind and str(arrived) == f"rank 1: {kind('--ftckpt-slots: 3')}"


@pytest.mark.parametrize("kind", list(kinds()), ids=lambda kind: kind.__name__)
def test_a_class_of_elsewhere_arrives_as_its_nearest_base(kind: type[FtckptError]) -> None:
    arrived = sent(kind("why"))
    assert issubclass(kind, type(arrived)) and type(arrived).__module__ == errors.__name__
    assert issubclass(PeerError, SmpError) and type(sent(RefusedError("why"))) is SmpError


@pytest.mark.parametrize("lasting", [False, True])
def test_what_storage_knows_of_its_failure_arrives(lasting: bool) -> None:
    arrived = sent(StorageError("full", lasting=lasting))
    assert isinstance(arrived, StorageError) and arrived.lasting == lasting


@pytest.mark.parametrize("kind", ["Writing", "written", "Any", "", "os", None, 3])
def test_what_names_no_error_is_a_plain_one(kind: object) -> None:
    assert type(error_from_json({"kind": kind, "error": "why"})) is FtckptError
