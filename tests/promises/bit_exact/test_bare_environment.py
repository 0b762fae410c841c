"""A job trains where the machine gives it little: no entry in passwd, no home, no temporary directory, no list of
interfaces."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.multiproc

ROOT = Path(__file__).parents[3]
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
BARE = """
import pwd, runpy, socket, sys, tempfile

def gone(*_):
    raise FileNotFoundError("no usable temporary directory found")

def unknown(uid):
    raise KeyError(uid)

def denied():
    raise PermissionError("no interfaces")

pwd.getpwuid, tempfile.gettempdir, socket.if_nameindex = unknown, gone, denied
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_job_trains_without_a_home_a_name_a_temporary_directory_and_a_list_of_interfaces(
    tmp_path: Path, arena_root: Path
) -> None:
    env = {name: value for name, value in os.environ.items() if name not in ("HOME", "USER", "LOGNAME", "TMPDIR")}
    ended = subprocess.run(
        [
            *(sys.executable, "-c", BARE, str(ROOT / "launch" / "train_plain.py")),
            *("--layers", "1", "--hidden", "32", "--seq", "32", "--global-batch", "4", "--iterations", "3"),
            *("--ftckpt", "--ftckpt-job", "bare", "--ftckpt-arena", str(arena_root)),
        ],
        env={
            **env, **ALONE, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "FTCKPT_RUN": "bare",
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        },
        cwd=tmp_path, check=False, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
