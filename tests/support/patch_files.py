"""The source patches of ``patches/`` as data, and small trees that they fit."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from pathlib import Path

PATCHES = Path(__file__).parents[2] / "patches"
NAMES = sorted(path.stem for path in PATCHES.glob("core_v*.patch"))

BEFORE = (
    "",
    "class C:\n",
    "def f(\n",
    "def f():\n",
    "def f():\n    if x:\n",
    "def f():\n    if x:\n        if y:\n",
    "def f():\n    assert (\n        x\n",
    'def f():\n    """\n',
)
AFTER = ("", "    pass\n", "            pass\n", "        )\n", "    x,\n)\n", "except ImportError:\n    pass\n",
         "    pass\nexcept ImportError:\n    pass\n")  # fmt: skip
"""Lines that a hunk needs around it to be Python."""


@dataclass(frozen=True)
class Hunk:
    """Some lines of a file as they are without the patch and with it."""

    old: str
    new: str

    @property
    def added(self) -> list[str]:
        """The lines that are new."""
        old = iter(self.old.splitlines())
        expected = next(old, None)
        found = []
        for line in self.new.splitlines():
            if line == expected:
                expected = next(old, None)
            else:
                found.append(line)
        assert expected is None, f"a line is gone or changed: {expected}"
        return found


def versions(name: str) -> list[str]:
    """Versions that megatron/core/package_info.py of the patch's release may name."""
    found = re.search(r"^Versions: (.+)$", (PATCHES / f"{name}.patch").read_text(), re.MULTILINE)
    assert found is not None
    return found[1].split()


def hunks(name: str) -> dict[str, list[Hunk]]:
    """The hunks of a patch by file."""
    files: dict[str, list[Hunk]] = {}
    text = (PATCHES / f"{name}.patch").read_text()
    for part in re.split(r"^--- a/.*\n\+\+\+ b/", text, flags=re.MULTILINE)[1:]:
        path, _, body = part.partition("\n")
        for hunk in re.split(r"^@@ .* @@.*\n", body, flags=re.MULTILINE)[1:]:
            lines = hunk.splitlines(keepends=True)
            old, new = ("".join(line[1:] or "\n" for line in lines if line[0] in kinds) for kinds in (" -\n", " +\n"))
            files.setdefault(path, []).append(Hunk(old, new))
    return files


def compiles(text: str) -> bool:
    """Whether it is Python."""
    try:
        compile(text, "hunk", "exec")
    except SyntaxError:
        return False
    return True


def miniature(name: str, root: Path, version: str = "") -> Path:
    """A tree that the patch fits, with nothing in it but the patch's own context."""
    for path, parts in hunks(name).items():
        text = ""
        for part in parts:
            around = (
                (b, a)
                for b, a in itertools.product(BEFORE, AFTER)
                if compiles(b + part.old + a) and compiles(b + part.new + a)
            )
            before, after = next(around)
            text += f"{before}{part.old}{after}\n\n"
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    major, minor, patch = (version or versions(name)[0]).split(".")
    info = f"MAJOR = {major}\nMINOR = {minor}\nPATCH = {patch}\nPRE_RELEASE = ''\n\nVERSION = (MAJOR, MINOR)\n"
    (root / "megatron/core/package_info.py").write_text(info)
    return root
