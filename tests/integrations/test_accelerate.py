"""Objects that accelerate has prepared, given to ``ftckpt.torch``: killed twice, the losses of an unbroken run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.test_transformers import RELEASES
from tests.support.trainers import install, train

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]

LINE = re.compile(r'^\{"epoch".*\}$', re.MULTILINE)


def train_prepared(folder: Path, arena: Path, kills: int) -> dict[str, Any]:
    """The result and the losses of a training, of which rank 1 is killed so many times."""
    packages = install("transformers", RELEASES)
    result, log = train(packages, folder, arena, kills, "tests/integrations/accelerate_job.py", str(folder))
    lines = [json.loads(line) for line in LINE.findall(log)]
    return {"losses": {(line["epoch"], line["batch"]): line for line in lines}, **result}


@pytest.mark.timeout(900)
def test_a_killed_training_is_the_unbroken_one(tmp_path: Path, arena_root: Path) -> None:
    whole = train_prepared(tmp_path / "whole", arena_root, 0)
    killed = train_prepared(tmp_path / "killed", arena_root, 2)
    assert len(whole["losses"]) == 300 and whole["step"] == 120
    assert killed == whole
