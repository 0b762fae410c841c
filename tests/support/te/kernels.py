"""What Transformer Engine and Apex compile for their optimizers (``transformer_engine_torch``, ``amp_C``), in torch.

Compiled, they write by address, which torch does not count; here they write so, too.
"""

from __future__ import annotations

from typing import Any

import torch

Lists = list[list[torch.Tensor]]


def multi_tensor_adam(_chunk: int, _overflow: torch.Tensor, lists: Lists, *settings: Any) -> None:
    """``lists``: gradients, parameters, first and second moments and, where the optimizer has them, fp32 masters."""
    for grad, param, first, second, *masters in _of_each(lists):
        master = masters[0] if masters else param
        stepped = _adam(grad.float(), master.float(), first, second, *settings)
        master.copy_(stepped)
        param.copy_(stepped)


def multi_tensor_adam_param_remainder(_chunk: int, _overflow: torch.Tensor, lists: Lists, *settings: Any) -> None:
    """The last list has the 16 bits of masters that bf16 parameters lack."""
    for grad, param, first, second, remainder in _of_each(lists):
        high, low = split(_adam(grad.float(), join(param, remainder), first, second, *settings))
        param.copy_(high)
        remainder.copy_(low)


def multi_tensor_scale(_chunk: int, _overflow: torch.Tensor, lists: Lists, scale: float) -> None:
    for source, destination in _of_each(lists):
        destination.copy_(source * scale)


def multi_tensor_l2norm(_chunk: int, _overflow: torch.Tensor, lists: Lists, *_per_tensor: Any) -> Any:
    norms = [torch.linalg.vector_norm(tensor.float()) for tensor in lists[0]]
    return torch.linalg.vector_norm(torch.stack(norms)).view(1), None


def te_general_grouped_gemm(*args: Any) -> list[torch.Tensor]:
    """A product for each expert, in one tensor of all experts' rows where the output is single."""
    left, left_turned, right, right_turned, out, _, rows, bias, _, is_single, _, grad, _, _, accumulates = args[:15]
    outs = out[0].split(rows) if is_single else out
    for first, second, into, added in zip(left, right, outs, bias, strict=True):
        product = (second.t() if right_turned else second) @ (first.t() if left_turned else first)
        if added.numel() and grad:
            added.copy_(second.sum(0))
        elif added.numel():
            product = product + added
        into.data.copy_(into.data + product if accumulates else product)
    return bias  # type: ignore[no-any-return]


def _of_each(lists: Lists) -> list[tuple[torch.Tensor, ...]]:
    return [tuple(tensor.data for tensor in tensors) for tensors in zip(*lists, strict=True)]


def _adam(
    grad: torch.Tensor, master: torch.Tensor, first: torch.Tensor, second: torch.Tensor, *settings: Any
) -> torch.Tensor:
    """The next master."""
    lr, beta1, beta2, eps, step, decoupled, bias_correction, weight_decay = settings
    if not decoupled:
        grad = grad + weight_decay * master
    first.mul_(beta1).add_(grad, alpha=1 - beta1)
    second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    corrections = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
    update = (first / corrections[0]) / ((second / corrections[1]).sqrt() + eps)
    if decoupled:
        update = update + weight_decay * master
    return master - lr * update


def join(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The fp32 master: a remainder below zero says that the weight was rounded up."""
    high = weight.view(torch.int16).to(torch.int32) - (remainder < 0).to(torch.int32)
    return ((high << 16) | (remainder.to(torch.int32) & 0xFFFF)).view(torch.float32)


def split(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    bits = master.view(torch.int32)
    low = (bits & 0xFFFF).to(torch.int16)
    high = (bits >> 16) + (low < 0).to(torch.int32)
    return high.to(torch.int16).view(torch.bfloat16), low
