"""What pyproject.toml cannot say: the wheel carries launch scripts, configurations and patches inside the package."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SHIPPED = ("launch", "configs", "patches")
LEFT_OUT = ("__pycache__", "demo*", "test.sh", "environment.sh", "constraints.txt", "Containerfile")
"""What only a checkout can run."""


_LINK = re.compile(r"\[([^\]]*)\]\(([^)#:\s]+)(#[^)\s]*)?\)")
"""Of a page to a file beside it: its text, the file, a place in that."""


def mend_links(package: Path) -> None:
    """Pages of the package name files by where they lie in the repository: here they lie elsewhere, or nowhere."""

    def place_of(name: str) -> Path:
        """Where a file of the repository lies."""
        first, _, rest = name.partition("/")
        return package / "shipped" / name if first in SHIPPED else package / rest if first == "ftckpt" else Path()

    for page in package.rglob("*.md"):
        inside = page.relative_to(package)
        folder = (inside.relative_to("shipped") if inside.parts[0] == "shipped" else "ftckpt" / inside).parent

        def mended(found: re.Match[str], page: Path = page, folder: Path = folder) -> str:
            to = place_of(os.path.normpath(folder / found[2]))
            there = to != Path() and to.exists()
            return f"[{found[1]}]({os.path.relpath(to, page.parent)}{found[3] or ''})" if there else found[1]

        page.write_text(_LINK.sub(mended, page.read_text()))


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
