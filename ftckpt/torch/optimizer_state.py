"""State of any optimizer: tensors and numbers by parameter, or nested dicts, lists and tuples of them.

Snapshots copy tensors at addresses that are described before training. torch's optimizers create their state ahead
on request. Any other optimizer creates it in its first step, and may replace it in later ones: a trial forecasts it
(``optimizer_trial``), and after each step new tensors are copied into described memory, which takes their place.
Everything but tensors is an object of the snapshot.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ftckpt.errors import CaptureError, MismatchError, UnsupportedError
from ftckpt.frameworks import optimizers
from ftckpt.frameworks.tensors import ParameterBoxes, as_real, flat, fragments, whole_piece
from ftckpt.model.objects import encode
from ftckpt.model.text import listed
from ftckpt.model.training_state import Piece
from ftckpt.torch.geometry import local, place, place_rank
from ftckpt.torch.optimizer_attributes import Path, leaves, settings, watched
from ftckpt.torch.optimizer_trial import as_text, try_out

_TENSOR, _NUMBER = "\0tensor", "\0number"
"""Stand for tensors in a saved value, first in a tuple: a described one with its strides, none if it is row-major; a
single number for which no room is described, with its type of device."""
_OWN_REFERENCES = 4
"""References to a tensor of the state while it is compared: its container, a list, a variable, an argument."""


class OptimizerState:
    """The state of one optimizer of ``model`` on this rank, with its kind and the settings of its groups."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
        self._optimizer, self._model = optimizer, model
        is_known = optimizers.is_fused_adam(optimizer) or type(optimizer).__module__.startswith("torch.optim")
        # A subclass of torch's may have more state than that of torch's functions, such as in hooks on its steps.
        self.is_forecast = not (is_known and optimizers.creates_state_ahead(optimizer))
        """Whether the optimizer creates its state in its steps: ``settle`` must follow each of them."""
        self._has_values = self.is_forecast
        self._names: dict[Any, str] = {}
        self._described: dict[Any, dict[Path, torch.Tensor]] = {}
        self._live: dict[tuple[Any, Path], torch.Tensor] = {}  # views of described tensors, with other strides
        self._attributes = [watched(optimizer)]
        """Those of a fresh optimizer, and of one that has stepped: a snapshot holds no others."""
        self._bound: list[str] = []
        self.objects_bytes = 0
        """Room that the values need in addition to those of other objects."""

    def prepare(self, boxes: ParameterBoxes) -> None:
        """Creates or forecasts the state; ``boxes`` are those of all parameters.

        Raises:
            UnsupportedError: the optimizer has state that cannot be saved; names it.
        """
        self._names = {parameter: places[0].key for parameter, places in boxes.items()}
        settings(self._optimizer, optimizers.kind_of(self._optimizer))
        if self.is_forecast:
            state, attributes = try_out(self._optimizer, optimizers.kind_of(self._optimizer))
            self._attributes.append(attributes)
        else:
            optimizers.materialise(self._optimizer)
            state = dict(self._optimizer.state)
        found = {owner: dict(leaves(of_owner)) for owner, of_owner in state.items()}
        self._described = {
            owner: {
                path: torch.zeros_like(leaf, memory_format=torch.contiguous_format) if self.is_forecast else leaf
                for path, leaf in sorted(of_owner.items(), key=lambda item: as_text(item[0]))
                if isinstance(leaf, torch.Tensor)
            }
            for owner, of_owner in found.items()
        }
        self._refuse_ambiguous()
        self._has_values |= any(not isinstance(leaf, torch.Tensor) for of in found.values() for leaf in of.values())
        if self._has_values:
            values = {self._name(owner): self._saved(owner, of_owner) for owner, of_owner in state.items()}
            try:
                self.objects_bytes = 2 * len(encode(values))  # numbers become longer
            except UnsupportedError as error:
                kind = optimizers.kind_of(self._optimizer)
                raise UnsupportedError(f"optimizer {kind} is not supported: state of {error}") from None
        self._bound = [
            f"{as_text(path)} of {self._name(owner)}"
            for owner, path, tensor in self._odd()
            if isinstance(owner, DTensor) and not isinstance(tensor, DTensor)
        ]
        self.settle(is_loaded=True)

    def _refuse_ambiguous(self) -> None:
        """Raises UnsupportedError if two tensors, or two owners, have one name in a snapshot."""
        texts = [(owner, as_text(path)) for owner, of_owner in self._described.items() for path in of_owner]
        owners = [("", self._name(owner)) for owner in self._described if not isinstance(owner, torch.Tensor)]
        for (owner, text), count in Counter(texts + owners).items():
            if count > 1:
                where = f" of {self._name(owner)}" if isinstance(owner, torch.Tensor) else ""
                raise UnsupportedError(
                    f"optimizer {optimizers.kind_of(self._optimizer)} is not supported: two keys of its state{where} "
                    f"are written {text}"
                )

    def of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Described tensors of a parameter with a value per element, and single numbers, by name."""
        every = self._described.get(parameter, {}).items()
        return {as_text(path): as_real(local(one)) for path, one in every if _is_regular(parameter, one)}

    def pieces(self) -> Iterator[Piece]:
        """Described tensors of other shapes.

        Raises:
            UnsupportedError: a distributed tensor that is not one box, or a type that cannot be saved.
        """
        for owner, path, tensor in self._odd():
            role, name = as_text(path), self._name(owner)
            if not local(tensor).numel():
                continue
            if isinstance(tensor, DTensor):
                for fragment, view in fragments([place(name, tensor)], role, flat(as_real(local(tensor))), 0):
                    yield Piece(fragment, view, counted=local(tensor))
            elif isinstance(owner, DTensor):
                coords, _ = place_rank(self._model)  # it belongs to this rank's shard
                shard = "-".join(f"{axis}{at}" for axis, at in coords.items())
                yield whole_piece(f"local/{role}.{shard}/{name}", tensor)
            else:
                yield whole_piece(f"{role}/{name}", tensor)

    def settle(self, is_loaded: bool = False) -> None:
        """Copies tensors that a step has created into described memory, which takes their place.

        ``is_loaded``: the script may still refer to them, in a checkpoint that it has loaded.

        Raises:
            CaptureError: state that the trial has not seen, or that other code refers to; nothing is changed then.
        """
        if not self.is_forecast:
            return
        new: list[tuple[torch.Tensor, torch.Tensor]] = []
        ours = {id(one) for of_owner in self._described.values() for one in of_owner.values()}
        ours |= {id(one) for one in self._live.values()}
        for owner, state in self._optimizer.state.items():
            # A list: generators would hold more references.
            for path, leaf in list(leaves(state)):
                if isinstance(leaf, torch.Tensor) and leaf is not self._place(owner, path):
                    others = sys.getrefcount(leaf) - _OWN_REFERENCES - (0 if path else 2)  # ``state`` is the tensor
                    self._check(owner, path, leaf, others > 0 and id(leaf) not in ours and not is_loaded)
        for owner, state in self._optimizer.state.items():
            self._optimizer.state[owner] = self._settle_in(owner, state, (), ours, new)
        with torch.no_grad():
            for into, value in new:
                into.copy_(value)

    def _check(self, owner: Any, path: Path, leaf: torch.Tensor, is_shared: bool) -> None:
        described = self._described.get(owner, {}).get(path)
        what = f"optimizer {optimizers.kind_of(self._optimizer)}: state {as_text(path)} of {self._name(owner)}"
        if described is None and leaf.numel() == 1:
            return  # see ``_saved``
        if described is None or (described.shape, described.dtype) != (leaf.shape, leaf.dtype):
            raise CaptureError(
                f"{what} is a {leaf.dtype} of shape {tuple(leaf.shape)}, which its first steps do not create, so no "
                "room was reserved for it: use another optimizer, or leave ftckpt off"
            )
        if is_shared:
            raise CaptureError(f"{what} is also referred to from outside of its state, so it cannot be moved")

    def _settle_in(self, owner: Any, value: Any, path: Path, ours: set[int], new: list[Any]) -> Any:
        """The value with described tensors in place of others; containers are changed in place, except tuples."""
        if isinstance(value, (dict, list)):
            for key in list(value) if isinstance(value, dict) else range(len(value)):
                now = self._settle_in(owner, value[key], (*path, key), ours, new)
                if now is not value[key]:
                    value[key] = now
            return value
        if isinstance(value, tuple):
            items = [self._settle_in(owner, item, (*path, i), ours, new) for i, item in enumerate(value)]
            return value if all(a is b for a, b in zip(items, value, strict=True)) else tuple(items)
        place = self._place(owner, path)
        if not isinstance(value, torch.Tensor) or place is None or place is value:
            return value
        place = self._put(owner, path, _strides(value))
        # Described memory of another value: copied before it is overwritten.
        new.append((place, value.clone() if id(value) in ours else value))
        return place

    def _place(self, owner: Any, path: Path) -> torch.Tensor | None:
        """The tensor in the optimizer's state that has described memory."""
        return self._live.get((owner, path), self._described.get(owner, {}).get(path))

    def _put(self, owner: Any, path: Path, strides: Sequence[int]) -> torch.Tensor:
        """Described memory as a tensor of these strides, row-major without any."""
        memory = self._described[owner][path]
        self._live.pop((owner, path), None)
        if not strides or _is_regular(owner, memory):
            return memory
        view = self._live[owner, path] = memory.view(-1).as_strided(memory.shape, strides)
        return view

    def save(self) -> dict[str, Any]:
        """Everything but tensors.

        Raises:
            CaptureError: see ``settle``; or something has changed that no snapshot holds.
        """
        self.settle()
        self._check_unsaved()
        saved: dict[str, Any] = {
            "kind": optimizers.kind_of(self._optimizer),
            "groups": optimizers.save_groups(self._optimizer),
        }
        if self._bound:
            saved["bound"] = self._bound
        if self._has_values:
            state = self._optimizer.state
            saved["state"] = {self._name(owner): self._saved(owner, one) for owner, one in state.items() if one != {}}
        return saved

    def _check_unsaved(self) -> None:
        """Raises CaptureError if the optimizer, or a hook on its steps, has changed what no snapshot holds."""
        what, now = "", watched(self._optimizer)
        if now not in self._attributes:
            before = self._attributes[-1]
            what = next(name for name in (*now, *before) if now.get(name, self) != before.get(name, self))
        elif not self._has_values:
            states = self._optimizer.state.items()
            known = {owner: len(one) for owner, one in self._described.items()}
            added = (o for o, one in states if not isinstance(one, dict) or len(one) != known.get(o, 0))
            what = next((f"state of {self._name(owner)}" for owner in added), "")
        if what:
            raise CaptureError(
                f"optimizer {optimizers.kind_of(self._optimizer)}: its {what} has changed since ftckpt was attached, "
                "and no snapshot holds that: keep such state in an object that attach is given"
            )

    def check(self, saved: Sequence[Mapping[str, Any]], is_reshaped: bool) -> None:
        """Raises MismatchError if results of ``save`` are of another optimizer, or cannot be reshaped."""
        for one in saved:
            optimizers.check_kind(self._optimizer, one["kind"])
            if is_reshaped and (bound := one.get("bound") or self._bound):
                raise MismatchError(
                    f"optimizer {one['kind']}: state {listed(bound)} has neither the shape of its parameter nor one "
                    "for all shards, so no other layout can load it: start with the layout of the snapshot"
                )

    def load(self, saved: Mapping[str, Any]) -> None:
        """Restores the result of ``save``; described tensors are restored already.

        Raises:
            MismatchError: it is of another optimizer, other groups or other state.
        """
        self.check([saved], is_reshaped=False)
        optimizers.load_groups(self._optimizer, saved["groups"])
        self._load_values(saved)

    def load_reshaped(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Restores the results of ``save`` of the first ranks of another layout."""
        self.check(saved, is_reshaped=True)
        optimizers.load_groups_reshaped(self._optimizer, [one["groups"] for one in saved])
        self._load_values(saved[0])

    def _load_values(self, saved: Mapping[str, Any]) -> None:
        if not self._has_values:
            return
        owners = {self._name(owner): owner for owner in self._described}
        self._optimizer.state.clear()
        for name, values in saved["state"].items():
            if name not in owners:
                raise MismatchError(
                    f"the snapshot has optimizer state of {name}, for which this job's {saved['kind']} has none: "
                    "start with the model and the optimizer of the job that took it"
                )
            self._optimizer.state[owners[name]] = self._rebuilt(owners[name], values, ())

    def _rebuilt(self, owner: Any, value: Any, path: Path) -> Any:
        if isinstance(value, tuple) and value[:1] == (_NUMBER,):
            return value[1].to(value[2])
        if isinstance(value, tuple) and value[:1] == (_TENSOR,):
            if path not in self._described[owner]:
                raise MismatchError(
                    f"the snapshot has a tensor {as_text(path)} of {self._name(owner)}, which the first steps of "
                    f"this job's {optimizers.kind_of(self._optimizer)} do not create: use the settings of the job "
                    "that took it"
                )
            return self._put(owner, path, value[1:])
        if isinstance(value, dict):
            return type(value)({key: self._rebuilt(owner, item, (*path, key)) for key, item in value.items()})
        if isinstance(value, (list, tuple)):
            return type(value)(self._rebuilt(owner, item, (*path, index)) for index, item in enumerate(value))
        return value

    def _saved(self, owner: Any, value: Any, path: Path = ()) -> Any:
        """A copy of nested containers without described tensors."""
        if isinstance(value, torch.Tensor):
            is_described = path in self._described.get(owner, {})
            return (_TENSOR, *_strides(value)) if is_described else (_NUMBER, value, value.device.type)
        if isinstance(value, dict):
            return {key: self._saved(owner, item, (*path, key)) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self._saved(owner, item, (*path, index)) for index, item in enumerate(value))
        return value

    def _name(self, owner: Any) -> str:
        return self._names.get(owner, "a parameter") if isinstance(owner, torch.Tensor) else f"optimizer {owner}"

    def _odd(self) -> Iterator[tuple[Any, Path, torch.Tensor]]:
        """The described tensors that ``of`` leaves out."""
        for owner, of_owner in self._described.items():
            yield from ((owner, path, one) for path, one in of_owner.items() if not _is_regular(owner, one))


def _is_regular(owner: Any, tensor: torch.Tensor) -> bool:
    """Whether a tensor has a value for each element of its parameter on this rank, or is a single number of it."""
    if not isinstance(owner, torch.Tensor):
        return False
    if isinstance(tensor, DTensor):
        return (tensor.shape, tensor.placements) == (owner.shape, getattr(owner, "placements", ()))
    return local(owner).shape == tensor.shape or tensor.numel() == 1


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides of a tensor; none if it is row-major, or has gaps, which described memory has not."""
    if isinstance(tensor, DTensor) or tensor.is_contiguous():
        return ()
    dense = torch.empty_like(tensor, device="meta").stride()
    return dense if dense == tensor.stride() else ()
