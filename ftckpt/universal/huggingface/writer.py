"""A writer of weights and ``config.json`` as ``from_pretrained`` of Hugging Face transformers loads them.

Models of Megatron-core are renamed; all others must have Hugging Face's names already.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ftckpt.array_types import Bytes
from ftckpt.errors import ConvertError
from ftckpt.universal.catalog import WEIGHTS_ALONE, Catalog, Get, Rows, Tensor, Unit
from ftckpt.universal.consolidation import require_weights, with_derived
from ftckpt.universal.huggingface.model import MegatronModel, SourceUnits
from ftckpt.universal.megatron.common import arguments_of, recorded_model
from ftckpt.universal.safetensors import MAX_FILE_BYTES, WeightsWriter, strip_memory
from ftckpt.universal.storage import explained

CONFIG = "config.json"
_MEGATRON = ("embedding.", "decoder.")
_NOT_WEIGHTS = ("inv_freq", "local_tokens_per_expert")
"""Ends of the names of buffers that transformers computes, or that do not change the model's output."""


class HuggingFaceWriter(WeightsWriter):
    """Writes weights under Hugging Face's names and ``config.json``; ``given``: keys of it that come first."""

    def __init__(
        self, path: Path, max_file_bytes: int = MAX_FILE_BYTES, given: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(path, max_file_bytes)
        self._given = dict(given or {})
        self._config: dict[str, Any] = {}
        self._units: dict[str, SourceUnits] = {}

    def rename(self, catalog: Catalog, tensors: Sequence[Tensor], get: Get) -> tuple[Sequence[Tensor], Get]:
        stored = with_derived(catalog, tensors)
        require_weights(stored)
        weights = [each for each in stored if each.role in WEIGHTS_ALONE and not each.name.endswith(_NOT_WEIGHTS)]
        if not any(tensor.name.startswith(_MEGATRON) for tensor in weights):
            self._config = {**recorded_model(catalog.objects), **self._given}
            if "model_type" not in self._config:
                raise ConvertError(
                    f"the source has neither names of Megatron-core nor the {CONFIG} of a Hugging Face model: give "
                    "--hf-config if the model has Hugging Face's names, or write its own with --to safetensors"
                )
            return weights, get
        model = MegatronModel(weights, recorded_model(catalog.objects) | arguments_of(catalog.objects), self._given)
        self._config = model.config()
        renamed = list(model.renamed())
        self._units = {tensor.key: units for tensor, units in renamed}

        def get_units(tensor: Tensor, first: int, last: int) -> Bytes:
            return self._units[tensor.key].rows(get, first, last)

        return [tensor for tensor, _ in renamed], get_units

    def memory(self, unit: Unit) -> int:
        # A row of the source may be larger than one of the unit: stacked experts have one for each expert.
        sources = [Rows.whole(self._units[p.tensor.key].source) for p in unit.parts if p.tensor.key in self._units]
        row_bytes = max((rows.tensor.row_bytes for rows in sources), default=0)
        return strip_memory(replace(unit, parts=(*unit.parts, *sources), nbytes=unit.nbytes + row_bytes))

    def finish(self, catalog: Catalog, units: Sequence[Unit]) -> None:
        with self.destination.file(CONFIG) as file:
            file.write((json.dumps(self._config, indent=2, sort_keys=True) + "\n").encode())
        super().finish(catalog, units)


def load_config(path: Path) -> dict[str, Any]:
    """The keys in a ``config.json``, or in that of the directory ``path``. Raises ConvertError."""
    path = path / CONFIG if path.is_dir() else path
    try:
        with explained(path):
            return dict(json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise ConvertError(f"{path}: not a {CONFIG} of Hugging Face: {error}") from None
