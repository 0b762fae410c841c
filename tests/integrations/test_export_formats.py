"""The exports of a real job: in each format the full contents of its snapshot."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ftckpt.memory.directory import clean_job
from ftckpt.persist_setting import PERSIST_FORMATS
from ftckpt.universal.catalog import Reader
from ftckpt.universal.consolidation import Consolidator
from ftckpt.universal.formats import ReadOptions, format_of, open_reader
from tests.support import jobs

pytestmark = pytest.mark.multiproc

SECS = 300.0
NEWEST = {
    "universal": ("latest", "iter_0000003\n", "iter_0000003"),
    "megatron-dist": ("latest_checkpointed_iteration.txt", "3", "iter_0000003"),
    "deepspeed-universal": ("latest_universal", "global_step3", "global_step3"),
    "safetensors": ("latest", "iter_0000003\n", "iter_0000003"),
    "huggingface": ("latest", "iter_0000003\n", "iter_0000003"),
}


@pytest.fixture
def persisting(settings: dict[str, Any], arena_root: Path, tmp_path: Path) -> Iterator[dict[str, Any]]:
    (tmp_path / "storage").mkdir()
    settings |= {"objects_size": "1MiB", "on_error": "raise", "persist": str(tmp_path / "storage")}
    yield settings
    clean_job(arena_root, "test")


def cast(master: Any) -> Any:
    """The bytes of the weight whose master has these."""
    weight = torch.from_numpy(master).view(torch.float32).to(torch.bfloat16)
    return weight.view(torch.uint8).numpy()


def wholes(reader: Reader, roles: tuple[str, ...] = ("master", "exp_avg", "exp_avg_sq")) -> dict[str, Any]:
    """Every full tensor of these roles."""
    consolidator = Consolidator(reader)
    wanted = [tensor for tensor in consolidator.tensors if tensor.role in roles]
    return {tensor.key: consolidator.get(tensor, 0, tensor.rows).copy() for tensor in wanted}


@pytest.mark.slow
@pytest.mark.parametrize("form", PERSIST_FORMATS[1:])
def test_what_a_job_leaves_others_load(form: str, persisting: dict[str, Any]) -> None:
    where = Path(persisting["persist"])
    run = jobs.Run(("--tp", "2"), 3, {**persisting, "persist_format": form})
    jobs.outcomes(2, run, timeout_secs=SECS)
    pointer, text, name = NEWEST[form]
    assert {path.name for path in where.iterdir()} == {"ftckpt", pointer, name}
    assert (where / pointer).read_text() == text
    weights_alone = form in ("safetensors", "huggingface")
    assert format_of(where / name) == ("safetensors" if weights_alone else form)
    made, snapshot = open_reader([where / name], ReadOptions()), open_reader([where], ReadOptions())
    right = wholes(snapshot)
    found = wholes(made)
    if weights_alone:
        right = {key: cast(data) for key, data in right.items() if key.startswith("master/")}
        found = {key.replace("weight/", "master/"): data for key, data in wholes(made, ("weight",)).items()}
    if form == "huggingface":  # under other names, some of them cut: the embedding stands for all
        right = {"master/transformer.wte.weight": right["master/embedding.word_embeddings.weight"]}
        assert len(found) == 28 and json.loads((where / name / "config.json").read_text())["n_head"] == 4
        found = {key: found[key] for key in right}
    assert snapshot.catalog.iteration == 3 and found.keys() == right.keys() and right
    assert made.catalog.iteration == (0 if weights_alone else 3)
    for key, whole in right.items():
        assert np.array_equal(np.ravel(found[key]), np.ravel(whole)), key
