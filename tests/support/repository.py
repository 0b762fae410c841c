"""The files of the repository. Beside them others lie that no test may take for its own: pip leaves ``build/``."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@cache
def repository_files(root: Path = ROOT) -> tuple[Path, ...]:
    """All that git tracks, or would add, as it is in the working tree; without git all that is there."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    found = [root / name for name in listed.stdout.split("\0") if name] or root.rglob("*")
    return tuple(sorted(path for path in found if path.is_file() and "__pycache__" not in path.parts))


def files_in(folder: str, suffix: str = "") -> list[Path]:
    """Those below a folder of the repository."""
    return [path for path in repository_files() if path.is_relative_to(ROOT / folder) and path.name.endswith(suffix)]
