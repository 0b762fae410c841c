"""Errors that another process recreates: the class, which determines the reaction, and its fields."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftckpt import errors
from ftckpt.errors import FtckptError, error_from_json


def kinds(base: type[FtckptError] = FtckptError) -> Iterator[type[FtckptError]]:
    yield base
    for kind in base.__subclasses__():
        yield from kinds(kind)


def sent(error: FtckptError) -> FtckptError:
    return error_from_json(json.loads(json.dumps(error.to_json())), "rank 1: ")


@pytest.mark.parametrize("kind", list(kinds()), ids=lambda kind: kind.__name__)
def test_a_class_arrives_as_it_was(kind: type[FtckptError]) -> None:
    arrived = sent(kind("--ftckpt-slots: 3"))
    assert type(arrived) is kind and str(arrived) == f"rank 1: {kind('--ftckpt-slots: 3')}"


def test_all_classes_are_in_one_module() -> None:
    """Another process, whatever it has imported, must find the class."""
    package = Path(errors.__file__).parent
    known = {kind.__name__ for kind in kinds()}
    elsewhere = [
        f"{path.relative_to(package)}: {node.name}"
        for path in package.rglob("*.py")
        if path.name != "errors.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and known & {ast.unparse(base).split(".")[-1] for base in node.bases}
    ]
    assert not elsewhere


@pytest.mark.parametrize("kind", ["Writing", "written", "Any", "", "os", None, 3])
def test_what_names_no_error_is_a_plain_one(kind: object) -> None:
    assert type(error_from_json({"kind": kind, "error": "why"})) is FtckptError
