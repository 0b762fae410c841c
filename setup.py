"""What pyproject.toml cannot say: the wheel carries launch scripts and configurations inside the package."""

from __future__ import annotations

import os
import re
import shutil
from functools import partial
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SHIPPED = ("launch", "configs")
LEFT_OUT = ("__pycache__", "demo*", "test.sh", "environment.sh", "constraints.txt", "Containerfile")
"""What only a checkout can run."""


_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)#:\s]+)(#[^)\s]*)?\)")
"""Of a page to a file beside it: its text, the file, a place in that."""


def mend_links(package: Path) -> None:
    """Pages of the package name files by where they lie in the repository: here they lie elsewhere, or nowhere."""
    for page in package.rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        page.write_text(_LINK.sub(partial(_mended, package, page), text), encoding="utf-8")


def _mended(package: Path, page: Path, link: re.Match[str]) -> str:
    inside = page.relative_to(package)
    folder = (inside.relative_to("shipped") if inside.parts[0] == "shipped" else "ftckpt" / inside).parent
    to = _place_of(package, os.path.normpath(folder / link[2]))
    return f"[{link[1]}]({os.path.relpath(to, page.parent)}{link[3] or ''})" if to is not None else link[1]


def _place_of(package: Path, name: str) -> Path | None:
    """Where a file of the repository lies; None: not in the package."""
    first, _, rest = name.partition("/")
    to = package / "shipped" / name if first in SHIPPED else package / rest
    return to if first in (*SHIPPED, "ftckpt") and to.exists() else None


class BuildWithScripts(build_py):
    """Puts them into ``ftckpt/shipped``; an editable installation finds them beside the package."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for name in SHIPPED:
            to = Path(self.build_lib) / "ftckpt" / "shipped" / name
            shutil.rmtree(to, ignore_errors=True)
            shutil.copytree(name, to, ignore=shutil.ignore_patterns(*LEFT_OUT))
        mend_links(Path(self.build_lib) / "ftckpt")


setup(cmdclass={"build_py": BuildWithScripts})
