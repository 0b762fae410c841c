"""Adds the repository's pages, and the files that they link to, to the site at the paths that they have here.

Links therefore need no rewriting, and ``mkdocs build`` checks the ones that readers of the repository follow.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path, PurePosixPath
from posixpath import normpath

import mkdocs_gen_files

ROOT = Path(__file__).resolve().parent.parent
_LINK = re.compile(r"\]\(([^)#:\s]+)")


def copy_pages() -> None:
    """Copies each tracked page outside ``docs`` and what it links to."""
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    pages = [page for page in listed.stdout.split() if not page.startswith("docs/")]
    linked = {
        normpath(str(PurePosixPath(page).parent / link))
        for page in pages
        for link in _LINK.findall((ROOT / page).read_text())
    }
    for path in {*pages, *(path for path in linked if (ROOT / path).is_file())}:
        with mkdocs_gen_files.open(path, "wb") as file:
            file.write((ROOT / path).read_bytes())


copy_pages()
