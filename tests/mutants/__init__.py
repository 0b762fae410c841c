"""Guarantees as mutants: small breakages, each of which must turn a test red.

Every ``*.toml`` beside this file lists those of one promise of the architecture page. ``python -m tests.mutants``
applies each to a copy of the repository, runs its test, and names those that survive.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class Mutant:
    """In ``file`` the text ``old``, which occurs once, becomes ``new``; then the pytest selection ``test`` goes red.

    ``promise`` is the name of the file that lists it; ``why`` is what a user would see.
    """

    name: str
    file: str
    old: str
    new: str
    test: str
    why: str
    promise: str

    def apply(self, root: Path) -> str:
        """Break the file below ``root``; returns its text as it was.

        Raises:
            ValueError: ``old`` does not occur exactly once.
        """
        path = root / self.file
        text = path.read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: the old text occurs {text.count(self.old)} times in {self.file}")
        path.write_text(text.replace(self.old, self.new))
        return text


def read_mutants(folder: Path = FOLDER) -> list[Mutant]:
    """All mutants, in the order of the files."""
    return [
        Mutant(**fields, promise=path.stem)
        for path in sorted(folder.glob("*.toml"))
        for fields in tomllib.loads(path.read_text()).get("mutant", [])
    ]
