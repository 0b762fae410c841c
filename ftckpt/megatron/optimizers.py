"""Megatron's optimizers as pieces: masters, moments and steps, with the parameters they came from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer

from ftckpt.errors import MismatchError, UnsupportedError
from ftckpt.frameworks import optimizers as live
from ftckpt.frameworks.launcher import log_once
from ftckpt.frameworks.optimizers import ParameterRange, stepped_pieces
from ftckpt.frameworks.tensors import ParameterBoxes
from ftckpt.model.text import listed
from ftckpt.model.training_state import Piece

_SCALED = ("exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype")
"""Types that Transformer Engine's precision-aware optimizer may keep in fewer bits, with scales beside its state."""

_MASTER = "master_param"
"""State key under which Transformer Engine's FusedAdam stores a master weight that it owns."""

_STEP = "step"
"""Key of FusedAdam's step count, in a group that has parameters on this rank."""

_EXPERTS = "is_expert_parallel"
_KIND = (
    "wd_mult", "lr_mult", "is_decoupled_lr", "default_config", "max_lr", "min_lr", "start_wd", "end_wd", _EXPERTS,
)  # fmt: skip
"""Keys by which Megatron forms parameter groups."""


def leaf_optimizers(optimizer: Any) -> list[Any]:
    """The optimizers in a chain that step something, in order.

    Raises:
        UnsupportedError: an optimizer that ftckpt does not know.
    """
    chain = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    # Megatron puts a stub where a rank has no parameters of a kind, and it steps nothing.
    leaves = [leaf for leaf in chain if not getattr(leaf, "is_stub_optimizer", False)]
    for leaf in leaves:
        if type(leaf) not in _READERS:
            known = ", ".join(kind.__name__ for kind in _READERS)
            raise UnsupportedError(f"optimizer {type(leaf).__name__} is not known; known are {known}")
        if getattr(getattr(leaf, "ddp_config", None), "use_megatron_fsdp", False):
            raise UnsupportedError("Megatron-FSDP shards state in a way that ftckpt does not know yet")
        for name in _SCALED:
            if getattr(leaf.config, name, torch.float32) != torch.float32:
                raise UnsupportedError(f"{name} {getattr(leaf.config, name)}: its scales are not known yet; use fp32")
        if getattr(leaf.config, "optimizer_cuda_graph", False):  # since 0.18
            raise UnsupportedError(
                "a step that a CUDA graph replays calls no fence; leave out --optimizer-cuda-graph"
            )
    return leaves


def is_distributed(optimizer: Any) -> bool:
    """True if the optimizer's state is sharded over data-parallel ranks."""
    return any(leaf.config.use_distributed_optimizer for leaf in leaf_optimizers(optimizer))


def pieces(leaf: Any, boxes: ParameterBoxes) -> Iterator[Piece]:
    """Every tensor that one optimizer steps, weights included.

    Raises:
        UnsupportedError: state that is neither per element nor a single number, with its parameter.
    """
    live.materialise(leaf.optimizer)
    return stepped_pieces(boxes, _READERS[type(leaf)](leaf), lambda part: _state(leaf.optimizer, part))


def _state(inner: Any, part: ParameterRange) -> Mapping[str, Any]:
    """The inner optimizer's state for a range, without its master."""
    return {name: value for name, value in inner.state[part.owner].items() if value is not part.master}


def stepped_parameters(leaf: Any) -> set[torch.nn.Parameter]:
    """Parameters that the optimizer steps on some rank: under a distributed one, not only the owned."""
    if isinstance(leaf, DistributedOptimizer):
        return {parameter for buffer in leaf.buffers for parameter in buffer.params}
    return {part.parameter for part in _READERS[type(leaf)](leaf)}


def _read_distributed(leaf: DistributedOptimizer) -> Iterator[ParameterRange]:
    """Only the owned range of a parameter is read: with overlapped gathers the rest is stale."""
    for models, shards, masters in zip(
        leaf.model_float16_groups, leaf.shard_float16_groups, leaf.shard_fp32_from_float16_groups, strict=True
    ):
        for parameter, shard, master in zip(models, shards, masters, strict=True):
            if shard is None:
                raise UnsupportedError("FP8 parameters under the distributed optimizer are not known yet")
            # Where the owned range begins in the flattened parameter.
            first = leaf._get_model_param_range_map(parameter)["param"].start
            # Without a master beside it the inner optimizer was given the shard itself, and may keep one for it.
            owner = shard if master is None else master
            yield ParameterRange(parameter, first, shard, owner, master=_inner_master(leaf.optimizer, owner))
    for models, shards in zip(leaf.model_fp32_groups, leaf.shard_fp32_groups, strict=True):
        for parameter, shard in zip(models, shards, strict=True):
            first = leaf._get_model_param_range_map(parameter)["param"].start
            # TE makes a master for these too, and steps it never: it is state like any other.
            yield ParameterRange(parameter, first, shard, shard)


def _inner_master(inner: Any, owner: torch.Tensor) -> torch.Tensor | None:
    """All of a master that the inner optimizer keeps beside the moments: not the 16 bits that a bf16 weight lacks."""
    kept = inner.state.get(owner, {}).get(_MASTER)
    return kept if kept is not None and kept.dtype == torch.float32 else None


def _read_float16(leaf: Float16OptimizerWithFloat16Params) -> Iterator[ParameterRange]:
    for models, masters in zip(leaf.float16_groups, leaf.fp32_from_float16_groups, strict=True):
        for parameter, master in zip(models, masters, strict=True):
            yield ParameterRange(parameter, 0, parameter, master)
    for parameter in (parameter for group in leaf.fp32_from_fp32_groups for parameter in group):
        yield ParameterRange(parameter, 0, parameter, parameter)


def _read_fp32(leaf: FP32Optimizer) -> Iterator[ParameterRange]:
    for group in leaf.optimizer.param_groups:
        for parameter in group["params"]:
            yield ParameterRange(parameter, 0, parameter, parameter)


_READERS: dict[type, Callable[[Any], Iterator[ParameterRange]]] = {
    DistributedOptimizer: _read_distributed,
    Float16OptimizerWithFloat16Params: _read_float16,
    FP32Optimizer: _read_fp32,
}


def save_hyperparameters(leaf: Any) -> dict[str, Any]:
    """Learning rates, weight decays and a fused optimizer's ``step``, and the loss scaler."""
    scaler = getattr(leaf, "grad_scaler", None)
    groups = live.save_groups(leaf.optimizer)
    for group, live_group in zip(groups, leaf.optimizer.param_groups, strict=True):
        # Where this rank owns nothing of a group FusedAdam does not count: a number there was loaded, and has stayed.
        if not live_group["params"]:
            group.pop(_STEP, None)
    kind = live.kind_of(leaf.optimizer)
    return {"kind": kind, "groups": groups, "scaler": scaler.state_dict() if scaler else None}


def load_hyperparameters(leaf: Any, saved: Mapping[str, Any]) -> None:
    """Inverse of ``save_hyperparameters``, in place; raises MismatchError where that is of another optimizer."""
    live.check_kind(leaf.optimizer, saved["kind"])
    live.load_groups(leaf.optimizer, saved["groups"])
    _load_scaler(leaf, saved["scaler"])


def _load_scaler(leaf: Any, saved: Mapping[str, Any] | None) -> None:
    """A loss scaler belongs to a precision: in a job of another one weights and moments go on, and it does not.

    As Megatron's own checkpoints do.
    """
    scaler: Any = getattr(leaf, "grad_scaler", None)
    own = scaler.state_dict() if scaler else {}
    if own.keys() == (saved or {}).keys():
        if own:
            scaler.load_state_dict(saved)
        return
    if saved:
        log_once("the loss scaler in the snapshot is left out: this job has %s", "another" if own else "none")
    if own:
        log_once("the loss scaler begins anew, at %g: the snapshot has none like it", float(scaler.scale))


def load_reshaped(leaves: Sequence[Any], saved: Sequence[Mapping[str, Any]]) -> None:
    """Take what ``save_hyperparameters`` gave for all optimizers of another layout.

    Layouts differ in how many optimizers there are and in what order their groups stand, so each group takes the
    values of one that was made for the same kind of parameters.

    Raises:
        MismatchError: there is no such group, or groups were stepped a different number of times.
    """
    groups = [group for optimizer in saved for group in optimizer["groups"]]
    steps = {group[_STEP] for group in groups if _STEP in group}
    if len(steps) > 1:
        raise MismatchError(
            f"groups of parameters were stepped a different number of times ({listed(sorted(map(str, steps)))}), so "
            "no other layout can take them: start with the layout they were taken in"
        )
    scalers = [optimizer["scaler"] for optimizer in saved if optimizer["scaler"] is not None]
    for leaf in leaves:
        for kind in {optimizer["kind"] for optimizer in saved}:
            live.check_kind(leaf.optimizer, kind)
        for group in leaf.optimizer.param_groups:
            values = _same_kind(group, groups)
            # What a group is for follows from the layout that it was built in, and stays.
            live.load_group(group, {name: value for name, value in values.items() if name not in (*_KIND, _STEP)})
            if steps and group["params"]:
                group[_STEP] = max(steps)
        _load_scaler(leaf, scalers[0] if scalers else None)


def _same_kind(group: Mapping[str, Any], saved: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    # Megatron makes groups of their own for experts only where expert parallelism divides them: a layout that does
    # not has no such group to match, and any group of the same kind has the same values.
    for names in (_KIND, [name for name in _KIND if name != _EXPERTS]):
        for values in saved:
            if all(values.get(name) == group.get(name) for name in names):
                return values
    kind = ", ".join(f"{name} {group[name]}" for name in _KIND if name in group)
    raise MismatchError(
        f"the snapshot has no group of parameters with {kind}: start with the optimizer settings of the job that "
        "took it, or remove it with 'ftckpt clean JOB'"
    )
