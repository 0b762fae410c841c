"""Megatron's optimizers as pieces: weights, masters, moments and step counts."""

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
"""Dtypes that Transformer Engine's precision-aware optimizer may reduce, with scales outside of its state."""

_MASTER = "master_param"
"""State key of a master weight that Transformer Engine's FusedAdam owns."""

_STEP = "step"
"""Key of FusedAdam's step count in a group that has parameters on this rank."""

_EXPERTS = "is_expert_parallel"
_KIND = (
    "wd_mult", "lr_mult", "is_decoupled_lr", "default_config", "max_lr", "min_lr", "start_wd", "end_wd", _EXPERTS,
)  # fmt: skip
"""Keys that define Megatron's parameter groups."""


def leaf_optimizers(optimizer: Any) -> list[Any]:
    """The optimizers of a chain that have parameters, in order.

    Raises:
        UnsupportedError: an optimizer or one of its settings is not supported.
    """
    chain = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    # Megatron uses a stub if a rank has no parameters of a kind.
    leaves = [leaf for leaf in chain if not getattr(leaf, "is_stub_optimizer", False)]
    for leaf in leaves:
        if type(leaf) not in _READERS:
            known = ", ".join(kind.__name__ for kind in _READERS)
            raise UnsupportedError(f"optimizer {type(leaf).__name__} is not known; known are {known}")
        if getattr(getattr(leaf, "ddp_config", None), "use_megatron_fsdp", False):
            raise UnsupportedError("Megatron-FSDP is not supported: use the distributed optimizer instead")
        for name in _SCALED:
            if getattr(leaf.config, name, torch.float32) != torch.float32:
                raise UnsupportedError(f"{name} {getattr(leaf.config, name)}: its scales cannot be saved; use fp32")
        if getattr(leaf.config, "optimizer_cuda_graph", False):  # since 0.18
            raise UnsupportedError(
                "an optimizer step replayed by a CUDA graph cannot be fenced; leave out --optimizer-cuda-graph"
            )
    return leaves


def is_distributed(optimizer: Any) -> bool:
    """Whether the optimizer's state is sharded over data-parallel ranks."""
    return any(leaf.config.use_distributed_optimizer for leaf in leaf_optimizers(optimizer))


def pieces(leaf: Any, boxes: ParameterBoxes) -> Iterator[Piece]:
    """Every tensor that one optimizer steps, including weights.

    Raises:
        UnsupportedError: state is neither per element nor a single number; names the parameter.
    """
    live.materialise(leaf.optimizer)
    return stepped_pieces(boxes, _READERS[type(leaf)](leaf), lambda part: _state(leaf.optimizer, part))


def _state(inner: Any, part: ParameterRange) -> Mapping[str, Any]:
    """The inner optimizer's state for a range, without its master."""
    return {name: value for name, value in inner.state[part.owner].items() if value is not part.master}


def stepped_parameters(leaf: Any) -> set[torch.nn.Parameter]:
    """Parameters that the optimizer steps on any rank, not only those that this rank owns."""
    if isinstance(leaf, DistributedOptimizer):
        return {parameter for buffer in leaf.buffers for parameter in buffer.params}
    return {part.parameter for part in _READERS[type(leaf)](leaf)}


def _read_distributed(leaf: DistributedOptimizer) -> Iterator[ParameterRange]:
    """Ranges that this rank owns; with overlapped gathers the rest of a parameter is stale and must not be read."""
    for models, shards, masters in zip(
        leaf.model_float16_groups, leaf.shard_float16_groups, leaf.shard_fp32_from_float16_groups, strict=True
    ):
        for parameter, shard, master in zip(models, shards, masters, strict=True):
            if shard is None:
                raise UnsupportedError(
                    "FP8 parameters under the distributed optimizer are not supported; switch off --fp8-param-gather"
                )
            # The start of the owned range in the flattened parameter.
            first = leaf._get_model_param_range_map(parameter)["param"].start
            # Without a master, the inner optimizer steps the shard itself and may have its own master for it.
            owner = shard if master is None else master
            yield ParameterRange(parameter, first, shard, owner, master=_inner_master(leaf.optimizer, owner))
    for models, shards in zip(leaf.model_fp32_groups, leaf.shard_fp32_groups, strict=True):
        for parameter, shard in zip(models, shards, strict=True):
            first = leaf._get_model_param_range_map(parameter)["param"].start
            # TE creates a master for these as well but never steps it: it is saved as other state.
            yield ParameterRange(parameter, first, shard, shard)


def _inner_master(inner: Any, owner: torch.Tensor) -> torch.Tensor | None:
    """The complete fp32 master in the inner optimizer's state; None if it only stores the low 16 bits of it."""
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
    """The settings of parameter groups, a fused optimizer's ``step``, and the loss scaler."""
    scaler = getattr(leaf, "grad_scaler", None)
    groups = live.save_groups(leaf.optimizer)
    for group, live_group in zip(groups, leaf.optimizer.param_groups, strict=True):
        # FusedAdam does not count steps of a group that is empty on this rank: a count there is stale.
        if not live_group["params"]:
            group.pop(_STEP, None)
    kind = live.kind_of(leaf.optimizer)
    return {"kind": kind, "groups": groups, "scaler": scaler.state_dict() if scaler else None}


def load_hyperparameters(leaf: Any, saved: Mapping[str, Any]) -> None:
    """Restores the result of ``save_hyperparameters``; raises MismatchError if it belongs to another optimizer."""
    live.check_kind(leaf.optimizer, saved["kind"])
    live.load_groups(leaf.optimizer, saved["groups"])
    _load_scaler(leaf, saved["scaler"])


def _load_scaler(leaf: Any, saved: Mapping[str, Any] | None) -> None:
    """Restores the loss scaler if both jobs have the same kind; it depends on the precision, as in Megatron."""
    scaler: Any = getattr(leaf, "grad_scaler", None)
    own = scaler.state_dict() if scaler else {}
    if own.keys() == (saved or {}).keys():
        if own:
            scaler.load_state_dict(saved)
        return
    if saved:
        log_once("the loss scaler of the snapshot is not used: this job has %s", "another" if own else "none")
    if own:
        log_once("the loss scaler starts at %g: the snapshot has none of its kind", float(scaler.scale))


def load_reshaped(leaves: Sequence[Any], saved: Sequence[Mapping[str, Any]]) -> None:
    """Restores the results of ``save_hyperparameters`` for all optimizers of another layout.

    Layouts differ in the number of optimizers and the order of their groups, so each group gets the values of one for
    the same kind of parameters.

    Raises:
        MismatchError: there is no such group, or the step counts of groups differ.
    """
    groups = [group for optimizer in saved for group in optimizer["groups"]]
    steps = {group[_STEP] for group in groups if _STEP in group}
    if len(steps) > 1:
        raise MismatchError(
            f"step counts of parameter groups differ ({listed(sorted(map(str, steps)))}), so no other layout can "
            "load them: start with the layout of the snapshot"
        )
    scalers = [optimizer["scaler"] for optimizer in saved if optimizer["scaler"] is not None]
    for leaf in leaves:
        for kind in {optimizer["kind"] for optimizer in saved}:
            live.check_kind(leaf.optimizer, kind)
        for group in leaf.optimizer.param_groups:
            values = _same_kind(group, groups)
            # The keys that define a group depend on the layout and are not restored.
            live.load_group(group, {name: value for name, value in values.items() if name not in (*_KIND, _STEP)})
            if steps and group["params"]:
                group[_STEP] = max(steps)
        _load_scaler(leaf, scalers[0] if scalers else None)


def _same_kind(group: Mapping[str, Any], saved: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    # Megatron creates separate groups for experts only with expert parallelism. Without it a layout has no such
    # group, and any group with equal other keys has the same values.
    for names in (_KIND, [name for name in _KIND if name != _EXPERTS]):
        for values in saved:
            if all(values.get(name) == group.get(name) for name in names):
                return values
    kind = ", ".join(f"{name} {group[name]}" for name in _KIND if name in group)
    raise MismatchError(
        f"the snapshot has no parameter group with {kind}: use the optimizer settings of the job that took it, or "
        "remove it with 'ftckpt clean JOB'"
    )
