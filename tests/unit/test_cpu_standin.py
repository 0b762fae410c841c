"""Each test runs in a process of its own: the stand-in replaces CUDA for good."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.pool import run_ranks
from tests.support.waiting import until

pytestmark = pytest.mark.multiproc


def devices(rank: int, world_size: int) -> None:
    import torch

    cpu = torch.device("cpu")
    assert torch.cuda.is_available()
    current = torch.cuda.current_device()
    for device in ("cuda", "cuda:3", 0, torch.device("cuda", 1), current, "cpu", cpu):
        assert torch.zeros(2, device=device).device == cpu
        assert torch.ones(2).to(device).device == cpu
        assert torch.empty_like(torch.ones(2), device=device).device == cpu
        assert torch.ones(2).new_zeros(2, device=device).device == cpu
        assert torch.nn.Linear(2, 2, device=device).weight.device == cpu
    assert torch.empty(2, device="meta").device.type == "meta"
    assert torch.ones(2).to(torch.float64).dtype == torch.float64
    tensor = torch.ones(2)
    assert tensor.cuda() is tensor
    assert tensor.pin_memory() is tensor
    assert torch.nn.Linear(2, 2).to("cuda").cuda(current).weight.device == cpu


def type_names(rank: int, world_size: int) -> None:
    import torch

    assert torch.ones(1).type() == "torch.cuda.FloatTensor"
    assert torch.nn.Parameter(torch.ones(1).bfloat16()).type() == "torch.cuda.BFloat16Tensor"
    assert torch.ones(1).type(torch.float16).dtype == torch.float16
    assert torch.ones(1).type("torch.cuda.HalfTensor").dtype == torch.float16


def generators(rank: int, world_size: int) -> None:
    import torch
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    torch.cuda.manual_seed(7)
    state = torch.cuda.get_rng_state()
    drawn = torch.rand(4, device="cuda")
    torch.cuda.set_rng_state(state, device="cuda")
    assert torch.equal(torch.rand(4), drawn)
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    tracker = CudaRNGStatesTracker()
    tracker.add("own", 11)
    with tracker.fork("own"):
        first = torch.rand(3, device="cuda")
    with tracker.fork("own"):
        second = torch.rand(3, device="cuda")
    assert not torch.equal(first, second)
    assert torch.equal(torch.rand(1), expected)


def streams_and_events(rank: int, world_size: int) -> None:
    import torch

    outer = torch.cuda.current_stream()
    side = torch.cuda.Stream()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    side.wait_stream(outer)
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() is side
        with torch.cuda.stream(None):
            assert torch.cuda.current_stream() is side
        end.record(side)
    assert torch.cuda.current_stream() is outer is torch.cuda.default_stream()
    end.synchronize()
    assert end.query()
    assert start.elapsed_time(end) >= 0


def pinned_loader(rank: int, world_size: int) -> None:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    loader = DataLoader(TensorDataset(torch.arange(6)), batch_size=2, num_workers=0, pin_memory=True)
    assert [batch[0].cuda(non_blocking=True).tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]


def twice(rank: int, world_size: int) -> None:
    import torch

    from tests.support import standin

    before = (torch.zeros, torch.Tensor.to, torch.distributed.new_group)
    standin.install()
    assert before == (torch.zeros, torch.Tensor.to, torch.distributed.new_group)


def sequence_parallel_norms(rank: int, world_size: int) -> None:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    for parallel in (True, False):
        config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, normalization="RMSNorm")
        config.sequence_parallel = parallel
        assert WrappedTorchNorm(config, 8).weight.sequence_parallel is parallel
        assert config.sequence_parallel is parallel


@pytest.mark.parametrize(
    "check", [devices, type_names, generators, streams_and_events, pinned_loader, twice, sequence_parallel_norms]
)
def test_one_process(check: Any) -> None:
    run_ranks(check, 1, init_process_group=False)


def in_a_bad_fork(rank: int, world_size: int) -> None:
    import torch

    from tests.support import standin

    torch.cuda._is_in_bad_fork = lambda: True
    standin.install()
    called: list[bool] = []
    torch.cuda._lazy_call(lambda: called.append(torch.cuda.is_initialized()))
    assert called == [True]


def test_calls_are_not_put_off_where_torch_is_built_for_cuda() -> None:
    """Its children of a process that has counted devices count as bad forks: generators would keep their states."""
    run_ranks(in_a_bad_fork, 1, stand_in=False, init_process_group=False)


def groups(rank: int, world_size: int) -> None:
    import torch
    import torch.distributed as dist

    group = dist.new_group([0, 1, 2], backend="nccl", pg_options=object())
    assert dist.get_backend(group) == "gloo"
    dist.barrier(group, device_ids=[0])
    mean = torch.full((2,), float(rank))
    dist.all_reduce(mean, op=dist.ReduceOp.AVG, group=group)
    assert mean.tolist() == [1.0, 1.0]


def uneven_collectives(rank: int, world_size: int) -> None:
    import torch
    import torch.distributed as dist

    group = dist.new_group([2, 0, 1], use_local_synchronization=False)
    me = dist.get_rank(group)
    parts = [torch.empty(size) for size in (1, 2, 3)]
    dist.all_gather(parts, torch.full((me + 1,), float(me)), group=group)
    assert [part.tolist() for part in parts] == [[0.0], [1.0] * 2, [2.0] * 3]
    output = torch.empty(me + 1)
    dist.reduce_scatter(output, [torch.ones(size) for size in (1, 2, 3)], group=group)
    assert output.tolist() == [3.0] * (me + 1)
    sizes = torch.tensor([1, 2, 3])
    received = torch.empty(3 * (rank + 1))
    dist.all_to_all_single(received, torch.arange(6.0), torch.full((3,), rank + 1), sizes)
    assert received.reshape(3, -1).tolist() == [torch.arange(6.0).split([1, 2, 3])[rank].tolist()] * 3


def coalesced(rank: int, world_size: int) -> None:
    import torch
    import torch.distributed as dist

    ones = [torch.ones(6), torch.ones(3)]
    with dist._coalescing_manager(async_ops=True) as work:
        for tensor in ones:
            dist.all_reduce(tensor, async_op=True)
    work.wait()
    assert ones[0].tolist() == [3.0] * 6
    shards = [torch.empty(2), torch.empty(1)]
    with dist._coalescing_manager(async_ops=True) as work:
        for shard, tensor in zip(shards, ones, strict=True):
            dist.reduce_scatter_tensor(shard, tensor, async_op=True)
    work.wait()
    assert shards[0].tolist() == [9.0] * 2
    gathered = [torch.empty(6), torch.empty(3)]
    with dist._coalescing_manager(async_ops=True) as work:
        for shard, tensor in zip(shards, gathered, strict=True):
            dist.all_gather_into_tensor(tensor, shard + rank, async_op=True)
    work.wait()
    assert gathered[0].tolist() == [9.0, 9.0, 10.0, 10.0, 11.0, 11.0]


@pytest.mark.parametrize("check", [groups, uneven_collectives, coalesced])
def test_three_processes(check: Any) -> None:
    run_ranks(check, 3)


def freed_sends(rank: int, world_size: int) -> None:

    import torch
    import torch.distributed as dist

    # More than socket buffers hold, so that the first send is under way when its storage is gone.
    numel, count = 2**22, 3
    if rank == 0:
        for number in range(count):
            tensor = torch.full((numel,), float(number))
            dist.isend(tensor, 1)
            tensor.data = torch.empty(1)
            del tensor
            torch.full((numel,), -1.0)
    else:
        time.sleep(0.3)  # it receives late
        received = [torch.empty(numel) for _ in range(count)]
        for tensor in received:
            dist.recv(tensor, 0)
        assert [float(tensor.min()) for tensor in received] == [0.0, 1.0, 2.0]
        assert [float(tensor.max()) for tensor in received] == [0.0, 1.0, 2.0]
    dist.barrier()


def test_a_send_outlives_its_tensor() -> None:
    run_ranks(freed_sends, 2)


def adam_loads(rank: int, world_size: int) -> None:
    import train_gpt

    argv = ["--layers", "1", "--hidden", "32", "--seq", "32", "--global-batch", "2", "--micro-batch", "2"]
    job = train_gpt.build(train_gpt.parse_args([*argv, "--iterations", "1"]))
    model = job.model[0].sharded_state_dict()
    leaf = getattr(job.optimizer, "chained_optimizers", [job.optimizer])[0]
    leaf.sharded_state_dict(model, is_loading=True, metadata={"distrib_optim_sharding_type": "dp_reshardable"})
    state = leaf.state_dict()
    for group in state["optimizer"]["param_groups"]:
        group["step"] = 6.0
    leaf.load_state_dict(state)
    steps = [state["step"] for state in leaf.optimizer.state.values()]
    assert {float(step) for step in steps} == {6.0}
    assert len({step.data_ptr() for step in steps}) == len(steps) > 1


def test_a_distributed_optimizer_without_fused_adam_loads() -> None:
    run_ranks(adam_loads, 1)


IMPORT_ORDER = """
import sys
from tests.support import standin
import torch
assert not torch.cuda.is_available(), "importing must change nothing"
standin.install()
assert not any(name.startswith("megatron") for name in sys.modules)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed, _set_cuda_rng_state
from megatron.core.transformer.moe import moe_utils
assert moe_utils.te_general_gemm is None
_set_cuda_rng_state(torch.cuda.get_rng_state())
import megatron.core.transformer.custom_layers.batch_invariant_kernels as kernels
assert not kernels.is_batch_invariant_mode_enabled()
"""


def run_script(path: Path, text: str) -> str:
    root = str(Path(__file__).resolve().parents[2])
    path.write_text(text)
    search = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": search}
    run = subprocess.run([sys.executable, path], env=env, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    return run.stdout


def test_installed_before_megatron_is_imported(tmp_path: Path) -> None:
    run_script(tmp_path / "script.py", IMPORT_ORDER)


SPAWNS = """
import multiprocessing
import sys
import torch
if __name__ == "__main__":
    from tests.support import standin
    standin.install()
    # As Megatron's checkpoint writers do: the manager's process imports this file again.
    multiprocessing.get_context("spawn").Manager().Queue().put(1)
else:
    assert torch.cuda.is_available() and torch.ones(1, device="cuda").cuda() is not None
"""


@pytest.mark.slow
def test_a_spawned_process_has_it_too(tmp_path: Path) -> None:
    run_script(tmp_path / "script.py", SPAWNS)


LEAVES = """
import multiprocessing
import os
import sys
if __name__ == "__main__":
    from tests.support import standin
    standin.install()
    manager = multiprocessing.get_context("spawn").Manager()
    print(manager._process.pid, flush=True)
    os._exit(0)  # as ranks of the pool do: nothing is cleaned up
"""


@pytest.mark.slow
def test_a_spawned_process_ends_with_its_parent(tmp_path: Path) -> None:
    pid = int(run_script(tmp_path / "script.py", LEAVES))
    until(lambda: not Path(f"/proc/{pid}").exists(), "it ends", secs=20)
