"""Mutants still apply: what they break is there, and so is the test that must see it."""

from __future__ import annotations

import ast
import functools
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import yaml

from tests.mutants import ROOT, Mutant, read_mutants

MUTANTS = read_mutants()


@functools.cache
def defined(file: str) -> frozenset[str]:
    """Functions and classes of a file, which many mutants name."""
    nodes = ast.walk(ast.parse((ROOT / file).read_text()))
    return frozenset(node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_applies(mutant: Mutant, tmp_path: Path) -> None:
    copy = tmp_path / mutant.file
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_text((ROOT / mutant.file).read_text())
    before = mutant.apply(tmp_path)
    assert copy.read_text() != before
    if copy.suffix == ".sh":
        subprocess.run(["bash", "-n", str(copy)], check=True)
    elif copy.suffix == ".yaml":
        yaml.safe_load(copy.read_text())
    else:
        ast.parse(copy.read_text())
    assert mutant.why
    file, _, name = mutant.test.partition("::")
    assert not name or name.partition("[")[0].split("::")[-1] in defined(file)


def test_names_are_unique() -> None:
    assert [name for name, times in Counter(mutant.name for mutant in MUTANTS).items() if times > 1] == []
