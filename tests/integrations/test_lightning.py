"""The Trainer of lightning, killed twice and restored: the weights and losses of an unbroken run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.trainers import install, train

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]

RELEASES = ("lightning==2.6.6", "lightning-utilities==0.15.3", "torchmetrics==1.9.0")
LINE = re.compile(r'^\{"epoch".*\}$', re.MULTILINE)


def train_autoencoder(folder: Path, arena: Path, kills: int, *options: str) -> dict[str, Any]:
    """The result and the losses of a training, of which rank 1 is killed so many times."""
    return train_script(folder, arena, kills, "launch/train_lightning.py", f"--out={folder}", *options)


def train_script(folder: Path, arena: Path, kills: int, *script: str) -> dict[str, Any]:
    result, log = train(install("lightning", RELEASES), folder, arena, kills, *script)
    lines = [json.loads(line) for line in LINE.findall(log)]
    return {"losses": {(line["epoch"], line["batch"]): line for line in lines}, **result}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("options", [[], ["--fsdp2"]], ids=["ddp", "fsdp2"])
def test_a_killed_training_is_the_unbroken_one(tmp_path: Path, arena_root: Path, options: list[str]) -> None:
    whole = train_autoencoder(tmp_path / "whole", arena_root, 0, *options)
    killed = train_autoencoder(tmp_path / "killed", arena_root, 2, *options)
    assert len(whole["losses"]) == 300 and whole["step"] == 120 and whole["epoch"] == 30
    assert whole["losses"][29, 9]["lr"] < whole["losses"][10, 0]["lr"]
    assert killed == whole


@pytest.mark.timeout(900)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_what_fabric_has_set_up_is_restored(tmp_path: Path, arena_root: Path, strategy: str) -> None:
    whole, killed = (
        train_script(folder, arena_root, kills, "tests/integrations/fabric_job.py", f"{folder}", strategy)
        for folder, kills in ((tmp_path / "whole", 0), (tmp_path / "killed", 2))
    )
    assert len(whole["losses"]) == 300 and whole["step"] == 120
    assert killed == whole
