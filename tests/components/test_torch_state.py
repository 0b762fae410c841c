"""Generators on a rank of another layout: seeded from their name, what the job's set-up left, and the iteration."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from ftckpt.frameworks import torch_state as rng


def seeded(seed: int) -> dict[str, Any]:
    """The state after the set-up of a job that seeds everything alike."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return rng.save_generators()


def drawn(state: dict[str, Any]) -> tuple[list[float], ...]:
    """The next numbers of every generator of the host."""
    rng.load_generators(state)
    normal = random.gauss(0, 1)  # leaves half of a pair for later
    return [random.random(), normal], np.random.rand(3).tolist(), torch.rand(3).tolist()


@pytest.fixture(autouse=True)
def _left_as_it_was() -> Any:
    before = rng.save_generators()
    yield
    rng.load_generators(before)


def test_alike_stays_alike_and_the_same_restart_draws_the_same() -> None:
    first, second = rng.derive_generators(seeded(1), 7), rng.derive_generators(seeded(1), 7)
    assert drawn(first) == drawn(second)
    assert drawn(first) == drawn(first)  # once more, after loaders drew


@pytest.mark.parametrize("seed, iteration", [(2, 7), (1, 8)])
def test_other_seeds_and_other_iterations_draw_others(seed: int, iteration: int) -> None:
    one, other = drawn(rng.derive_generators(seeded(1), 7)), drawn(rng.derive_generators(seeded(seed), iteration))
    assert all(a != b for a, b in zip(one, other, strict=True))


def test_each_name_has_its_own_seed() -> None:
    state = torch.Generator().manual_seed(1).get_state()
    names = ("torch", "device", "tracker/model-parallel-rng", "tracker/expert-parallel-rng")
    assert len({rng.derived_seed(name, state, 7) for name in names}) == len(names)
    assert rng.derived_seed("torch", state.clone(), 7) == rng.derived_seed("torch", state, 7) < 2**64


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a device")
def test_generators_of_a_tracker_are_the_hosts_where_there_is_no_device() -> None:
    """DeepSpeed's trackers have states of its accelerator, and its CPU has the host's."""
    built = {"model-parallel-rng": torch.Generator().manual_seed(1).get_state()}
    (state,) = rng.derive_tracker("tracker/megatron", built, 7).values()
    seed = rng.derived_seed("tracker/megatron/model-parallel-rng", built["model-parallel-rng"], 7)
    assert torch.equal(state, torch.Generator().manual_seed(seed).get_state())


def test_a_seed_is_known_for_good() -> None:
    """Numbers after a reshape must not depend on the version of ftckpt."""
    assert rng.derived_seed("numpy", {"words": np.arange(4, dtype=np.uint32)}, 3) == 10693449236378811701
