"""A layer that is tied over pipeline stages: what is not tied in it belongs to each stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import jobs
from tests.support.ds_jobs import SMALL
from tests.support.pool import run_ranks

pytestmark = pytest.mark.multiproc
pytest.importorskip("deepspeed")

WIDTH = 4
JSON = {**SMALL, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 1}}


def trained(rank: int, world_size: int, section: Any, until: int) -> tuple[list[float], dict[str, list[float]], Any]:
    """Losses, the stage's parameters at the end, and what the places of these are called."""
    from tests.standin import deepspeed as standin

    standin.install()
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    import ftckpt.deepspeed
    from ftckpt.deepspeed.geometry import place_parameters

    deepspeed.init_distributed()
    torch.manual_seed(5)
    layers = [
        TiedLayerSpec("ends", torch.nn.Linear, WIDTH, WIDTH),  # DeepSpeed's default: ``weight`` is tied
        LayerSpec(torch.nn.Linear, WIDTH, WIDTH),
        LayerSpec(torch.nn.Tanh),
        TiedLayerSpec("ends", torch.nn.Linear, WIDTH, WIDTH),
    ]
    net = PipelineModule(layers, num_stages=2, loss_fn=torch.nn.MSELoss(), partition_method="uniform")
    config = JSON if section is None else {**JSON, "ftckpt": section}
    engine, *_ = deepspeed.initialize(model=net, config=config)
    places = {
        name: places[0].key
        for (name, _), places in zip(net.named_parameters(), place_parameters(engine).values(), strict=True)
    }
    samples = [(torch.full((2, WIDTH), 0.1 * n), torch.ones(2, WIDTH)) for n in range(2 * until)]
    batches, losses = iter(samples), []
    while engine.global_steps < until:
        losses.append(float(engine.train_batch(batches)))
    values = {name: parameter.float().flatten().tolist() for name, parameter in net.named_parameters()}
    ftckpt.deepspeed.remove()  # the last snapshot is finished
    return losses, values, places


def results(*args: Any) -> list[Any]:
    return [result.value for result in run_ranks(trained, 2, *args, stand_in=False)]


def test_only_what_is_tied_is_one_tensor_on_all_stages(arena_root: Path, tmp_path: Path) -> None:
    section = {
        "enabled": True, "job": "tied", "node": "node", "arena": str(arena_root), "protect": "none",
        "events": str(tmp_path / "events"),
    }  # fmt: skip
    unbroken = results(None, 6)
    (_, first, places), (_, last, last_places) = unbroken
    weight, bias = "tied_modules.ends.weight", "tied_modules.ends.bias"
    assert first[weight] == last[weight] and first[bias] != last[bias]
    assert places == {name: name for name in (weight, bias, "1.weight", "1.bias")}
    assert last_places == {weight: weight, bias: "3.bias"}
    results(section, 3)
    for (losses, *rest), (all_losses, *all_rest) in zip(results(section, 6), unbroken, strict=True):
        assert (losses, rest) == (all_losses[3:], all_rest)
    assert jobs.events({"events": tmp_path / "events"}, "restored")
    assert not jobs.events({"events": tmp_path / "events"}, "replicas_differ")
