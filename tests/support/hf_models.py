"""Runs with transformers: ``make FOLDER`` saves a tiny model of each family there, ``load FOLDER`` loads what is in
``FOLDER/NAME/out``; both write the logits of the same tokens."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ftckpt.frameworks.model_config import model_config
from tests.support.hf_names import FAMILIES, VOCABULARY

TOKENS = np.random.default_rng(5).integers(0, VOCABULARY, (2, 12))
"""Of every test that compares logits."""


def logits(model: Any) -> np.ndarray:
    """The logits of TOKENS."""
    with torch.no_grad():
        found: np.ndarray = model.eval()(torch.from_numpy(TOKENS)).logits.float().numpy()
    return found


def make(folder: Path) -> None:
    """Models with random weights, norms and biases too, saved by transformers; and what a snapshot has of them."""
    for name, tiny in FAMILIES.items():
        torch.manual_seed(3)
        config = AutoConfig.for_model(**tiny.json(name), bos_token_id=0, eos_token_id=0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, mean=0.1, std=0.3)
        model.save_pretrained(folder / name / "hf")
        (folder / name / "recorded.json").write_text(model_config([model]))
        np.save(folder / name / "made.npy", logits(model))


def load(folder: Path) -> None:
    """Each model's logits; fails if a weight is missing or is not used."""
    for path in sorted(folder.iterdir()):
        model, told = AutoModelForCausalLM.from_pretrained(path / "out", output_loading_info=True)
        assert not any(told[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys")), told
        np.save(path / "loaded.npy", logits(model))
        (path / "class.json").write_text(json.dumps([type(model).__name__, str(model.dtype)]))


if __name__ == "__main__":
    {"make": make, "load": load}[sys.argv[1]](Path(sys.argv[2]))
