"""What pyproject.toml cannot say: the wheel carries launch scripts, configurations and patches inside the package."""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SHIPPED = ("launch", "configs", "patches")
LEFT_OUT = ("__pycache__", "demo*", "test.sh", "environment.sh", "constraints.txt", "Containerfile")
"""What only a checkout can run."""


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


setup(cmdclass={"build_py": BuildWithScripts})
