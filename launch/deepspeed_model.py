"""The model of train_deepspeed.py: a causal transformer, as one module or as the layers of a PipelineModule.

With tensor parallelism attention heads and the hidden layer of each feed-forward block are divided over a group of
ranks. Weights that are divided carry the marks that megatron-core's layers carry: ``tensor_model_parallel`` and
``partition_dim``. Each layer draws its weights from a seed of its own: they are the same under every layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn


@dataclass(frozen=True)
class Shape:
    """Sizes of the model, and the ranks that share its layers (None: each has all of them)."""

    tokens: int
    seq: int
    hidden: int
    heads: int
    layers: int
    dropout: float
    experts: int = 0
    ep: int = 1
    tp_group: Any = None


class _Copy(torch.autograd.Function):
    """Identity, whose gradient is summed over the group."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Sum(torch.autograd.Function):
    """The sum over the group, whose gradient is the identity."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: Any) -> torch.Tensor:
        value = value.clone()
        dist.all_reduce(value, group=group)
        return value

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class DividedLinear(nn.Module):
    """A linear layer without bias, of which each rank of a group has some rows (dim 0) or columns (dim 1)."""

    def __init__(self, inputs: int, outputs: int, dim: int, group: Any) -> None:
        super().__init__()
        self._dim, self._group = dim, group
        weight = torch.empty(outputs, inputs).normal_(std=0.02)
        if group is not None:
            weight = weight.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)].contiguous()
        self.weight = nn.Parameter(weight)
        self.weight.tensor_model_parallel = group is not None  # type: ignore[attr-defined]
        self.weight.partition_dim = dim  # type: ignore[attr-defined]

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        if self._group is None:
            return F.linear(value, self.weight)
        if self._dim == 0:
            return F.linear(_Copy.apply(value, self._group), self.weight)
        summed: torch.Tensor = _Sum.apply(F.linear(value, self.weight), self._group)
        return summed


class Attention(nn.Module):
    """Causal self-attention; query, key and value each have a weight of their own."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self._width = shape.hidden // shape.heads
        self.query, self.key, self.value = (
            DividedLinear(shape.hidden, shape.hidden, 0, shape.tp_group) for _ in range(3)
        )
        self.output = DividedLinear(shape.hidden, shape.hidden, 1, shape.tp_group)
        self.register_buffer("mask", torch.ones(shape.seq, shape.seq, dtype=torch.bool).triu(1))
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        batch, seq, _ = value.shape
        query, key, content = (
            layer(value).view(batch, seq, -1, self._width).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        scores = (query @ key.transpose(2, 3)) * self._width**-0.5
        weights = self.dropout(scores.masked_fill(self.mask[:seq, :seq], float("-inf")).softmax(-1))
        merged: torch.Tensor = self.output((weights @ content).transpose(1, 2).reshape(batch, seq, -1))
        return merged


class FeedForward(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up = DividedLinear(shape.hidden, 4 * shape.hidden, 0, shape.tp_group)
        self.down = DividedLinear(4 * shape.hidden, shape.hidden, 1, shape.tp_group)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        lowered: torch.Tensor = self.down(F.gelu(self.up(value)))
        return lowered


class Block(nn.Module):
    """Attention and feed-forward layer, or experts in place of the latter in every second block."""

    def __init__(self, shape: Shape, index: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1000 + index)
            self.attention = Attention(shape)
            self.norm1, self.norm2 = nn.LayerNorm(shape.hidden), nn.LayerNorm(shape.hidden)
            self.dropout = nn.Dropout(shape.dropout)
            self.feed = experts(shape, index) if shape.experts and index % 2 else FeedForward(shape)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = value + self.dropout(self.attention(self.norm1(value)))
        fed = self.feed(self.norm2(value))
        if isinstance(fed, tuple):
            fed, self.balance, _ = fed
        return value + self.dropout(fed)


def experts(shape: Shape, index: int) -> MoE:
    """Experts with different weights: DeepSpeed would give all the same."""
    layer = MoE(shape.hidden, FeedForward(shape), num_experts=shape.experts, ep_size=shape.ep)
    local = layer.deepspeed_moe.experts.deepspeed_experts
    for place, expert in enumerate(local):
        torch.manual_seed(1000 * (1 + index) + dist.get_rank() % shape.ep * len(local) + place)
        for parameter in expert.parameters():
            nn.init.normal_(parameter, std=0.02)
    return layer


class Tokens(nn.Module):
    """Embedding of tokens; ``weight`` may serve as the output layer too."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.weight = nn.Parameter(torch.empty(shape.tokens, shape.hidden).normal_(std=0.02))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.embedding(tokens, self.weight)

    def logits(self, value: torch.Tensor) -> torch.Tensor:
        return F.linear(value, self.weight)


class Positions(nn.Module):
    """Adds an embedding of positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.positions = nn.Parameter(torch.empty(shape.seq, shape.hidden).normal_(std=0.02))
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.dropout(value + self.positions[: value.shape[1]])
        return added


class Output(nn.Module):
    """Logits."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.weight = nn.Parameter(torch.empty(shape.tokens, shape.hidden).normal_(std=0.02))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return F.linear(value, self.weight)


class LanguageModel(nn.Module):
    """The model as one module; its forward gives the loss."""

    def __init__(self, shape: Shape, tie: bool) -> None:
        super().__init__()
        self.tokens, self.positions = Tokens(shape), Positions(shape)
        self.blocks = nn.ModuleList(Block(shape, index) for index in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden)
        self.output = None if tie else Output(shape)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        value = self.positions(self.tokens(tokens))
        for block in self.blocks:
            value = block(value)
        value = self.norm(value)
        loss = loss_function(self.tokens.logits(value) if self.output is None else self.output(value), labels)
        for block in self.blocks:
            loss = loss + 0.01 * getattr(block, "balance", 0.0)
        return loss


def pipeline_layers(shape: Shape, tie: bool) -> list[LayerSpec]:
    """The layers of a PipelineModule."""
    first = TiedLayerSpec("tokens", Tokens, shape) if tie else LayerSpec(Tokens, shape)
    last = TiedLayerSpec("tokens", Tokens, shape, forward_fn=Tokens.logits) if tie else LayerSpec(Output, shape)
    blocks = [LayerSpec(Block, shape, index) for index in range(shape.layers)]
    return [first, LayerSpec(Positions, shape), *blocks, LayerSpec(nn.LayerNorm, shape.hidden), last]


def tensor_group(topology: Any) -> Any:
    """The group of this rank along the topology's axis ``model``; None where that has one rank."""
    mine = None
    for ranks in topology.get_axis_comm_lists("model"):
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            mine = group
    return mine


def loss_function(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def expert_groups(parameters: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    """Parameter groups as DeepSpeed wants them where there are experts."""
    groups: list[dict[str, Any]] = split_params_into_different_moe_groups_for_optimizer(
        {"params": list(parameters), "name": "parameters"}
    )
    return groups


def freeze_positions(model: nn.Module) -> None:
    """Do not train the embedding of positions."""
    for name, parameter in model.named_parameters():
        if name.endswith("positions"):
            parameter.requires_grad_(False)
