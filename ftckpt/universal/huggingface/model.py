"""A model of Megatron-core under the names of Hugging Face: its tensors and its ``config.json``."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import numpy as np

from ftckpt.array_types import Bytes
from ftckpt.errors import ConvertError
from ftckpt.model.fragment import DTYPE_BYTES, TORCH_NAMES
from ftckpt.model.text import listed
from ftckpt.universal.catalog import Get, Tensor
from ftckpt.universal.huggingface.families import FAMILIES, NameRule, family_of
from ftckpt.universal.language.patterns import Pattern, Value
from ftckpt.universal.safetensors import STRIP_BYTES

log = logging.getLogger("ftckpt")

_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
_POSITIONS = "embedding.position_embeddings.weight"
_ATTENTION, _MLP = "decoder.layers.{layer}.self_attention", "decoder.layers.{layer}.mlp"
_DOWN = {
    f"{_MLP}.linear_fc2.weight": 1, f"{_MLP}.experts.experts.linear_fc2.weight": 2,
    f"{_MLP}.experts.experts.weight2": 1,
}  # fmt: skip
"""The last weight of an MLP (dense, of experts, of legacy grouped experts), and its hidden dimension."""
_NOT_SUPPORTED: dict[str, Any] = {
    "apply_layernorm_1p": False, "layernorm_zero_centered_gamma": False, "attention_output_gate": False,
    "apply_residual_connection_post_layernorm": False, "rotary_interleaved": False, "rotary_percent": 1.0,
    "rotary_seq_len_interpolation_factor": None, "window_size": None, "no_rope_freq": None, "squared_relu": False,
    "quick_geglu": False, "moe_router_score_function": "softmax", "moe_router_pre_softmax": False,
    "moe_router_topk_scaling_factor": None, "moe_router_num_groups": None, "activation_func_clamp_value": None,
    "glu_linear_offset": 0.0, "softmax_scale": None, "softmax_type": "vanilla", "qk_l2_norm": False,
    "moe_apply_probs_on_input": False, "moe_expert_capacity_factor": None, "window_attn_skip_freq": None,
    "moe_router_force_load_balancing": False, "openai_gelu": False,
}  # fmt: skip
"""Arguments of Megatron for which the families have no key, and the only value that is supported."""
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Megatron's constants of ``--use-rope-scaling``."""
_HEADS = {"heads": "num_attention_heads", "groups": "num_query_groups", "head_dim": "kv_channels"}
_KINDS = {"is_tied": "bool", "activation": "str", "rope": "dict", "norm_epsilon": "float", "rotary_base": "float"}
"""Types of facts; all others are ``int``."""
_MAX_NAMED = 5


@dataclass(frozen=True)
class SourceUnits:
    """The units of a ``source`` tensor that form another tensor, in ``runs``; a unit is ``items`` elements.

    Units are the rows of the other tensor or, if that ``is_transposed``, its columns.
    """

    source: Tensor
    runs: tuple[range, ...]
    items: int
    is_transposed: bool

    def rows(self, get: Get, first: int, last: int) -> Bytes:
        """Rows ``first`` to ``last`` of the other tensor."""
        if self.is_transposed:
            return self._columns(get, first, last)
        parts: list[Bytes] = [np.empty(0, np.uint8)]
        begin = 0
        for run in self.runs:
            if wanted := run[max(first - begin, 0) : max(last - begin, 0)]:
                parts.append(self._read(get, wanted).reshape(-1))
            begin += len(run)
        return parts[1] if len(parts) == 2 else np.concatenate(parts)

    def _columns(self, get: Get, first: int, last: int) -> Bytes:
        item_bytes = DTYPE_BYTES[self.source.dtype]
        parts: list[Bytes] = []
        step = max(self._units_per_row, STRIP_BYTES // (self.items * item_bytes))
        for run in self.runs:
            for begin in range(0, len(run), step):
                units = self._read(get, run[begin : begin + step])[:, first * item_bytes : last * item_bytes]
                parts.append(units.reshape(-1, last - first, item_bytes).transpose(1, 0, 2))
        return np.concatenate(parts, axis=1).reshape(-1)

    @property
    def _units_per_row(self) -> int:
        return math.prod(self.source.shape[1:]) // self.items

    def _read(self, get: Get, units: range) -> Bytes:
        """The bytes of some units, a row for each."""
        each, low, high = self._units_per_row, units[0], units[-1]
        unit_bytes, base = self.items * DTYPE_BYTES[self.source.dtype], low // each * each
        data = get(self.source, low // each, high // each + 1).reshape(-1, unit_bytes)
        rows: Bytes = data[low - base : high - base + 1 : units.step]
        return rows


class MegatronModel:
    """A model of Megatron-core: its ``weights``, the ``arguments`` of its job, and ``given`` keys of ``config.json``.

    Raises:
        ConvertError: the family has no place for a tensor or an argument, a tensor is missing, the number of heads is
            not known, or ``given`` has a wrong type; or it, the arguments, and the tensors contradict each other.
    """

    def __init__(self, weights: Sequence[Tensor], arguments: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        self._given, self._arguments = given, arguments
        self._type = str(given.get("model_type") or family_of([tensor.name for tensor in weights]))
        if self._type not in FAMILIES:
            raise ConvertError(f"--hf-config: model_type {self._type} is not one of {', '.join(FAMILIES)}")
        self._family, self._rules = FAMILIES[self._type], FAMILIES[self._type].rules()
        others = [key for key in arguments if arguments[key] in ("sinkhorn", ["sinkhorn"])]
        others += arguments.get("not_default", ())
        for name, right in {**_NOT_SUPPORTED, **dict(self._family.arguments), **dict.fromkeys(others)}.items():
            if arguments.get(name) not in (right, None):
                raise ConvertError(f"{name} is {arguments[name]}: not supported by {self._type} of Hugging Face")
        self._recorded = _settings(arguments)
        self._check_given()
        self._matched = self._match(weights)
        self._shapes = {pattern: tensor.shape for tensor, pattern, _ in self._matched}
        self._layers = 1 + max((int(captured.get("layer", 0)) for *_, captured in self._matched), default=0)
        self._check_complete()
        self._sizes = self._find_sizes()

    def config(self) -> dict[str, Any]:
        """The content of ``config.json``; logs the keys that are to be filled in."""
        keys = dict(self._family.config)
        if self._arguments.get("use_rope_scaling"):
            keys["rope_scaling"] = "rope_scaling"
        if "rope_parameters" in self._given:  # has them all
            keys = {key: fact for key, fact in keys.items() if not key.startswith("rope_")}
        config = {
            "architectures": [self._family.architecture],
            "model_type": self._type,
            **{key: value for key, value in self._given.items() if key != "dtype"},
            **self._family.constants,
            **{key: self._recorded[fact] for key, fact in keys.items() if fact in self._recorded},
            **{key: self._sizes[fact] for key, fact in keys.items() if fact in self._sizes},
            "torch_dtype": TORCH_NAMES[next(t.dtype for t, name, _ in self._matched if name == _EMBEDDING)],
        }
        if lacking := [key for key in keys if key not in config]:
            text = "ftckpt: config.json lacks %s, which the source does not have: fill in, or give --hf-config"
            log.warning(text, ", ".join(lacking))
        return config

    def renamed(self) -> Iterator[tuple[Tensor, SourceUnits]]:
        """Each tensor of Hugging Face, and the units of the source that form it."""
        for tensor, pattern, captured in self._matched:
            rule = self._rules[pattern]
            experts, inner = (tensor.shape[0], tensor.shape[1:]) if rule.has_experts else (1, tensor.shape)
            items = inner[-1] if len(inner) > 1 else 1
            height = math.prod(inner) // items
            cuts = self._cuts(rule, self._sizes["vocabulary"] if pattern in (_EMBEDDING, _OUTPUT) else height)
            for expert in range(experts):
                for name, cut in zip(rule.parts, cuts, strict=True):
                    begin = expert * height
                    runs = tuple(range(run.start + begin, run.stop + begin, run.step) for run in cut)
                    shape = (sum(map(len, runs)), items)[: max(1, len(inner))]
                    key = f"weight/{name.format(**{'expert': expert, **captured})}"
                    made = Tensor(key, tensor.dtype, shape[::-1] if rule.is_transposed else shape)
                    yield made, SourceUnits(tensor, runs, items, rule.is_transposed)

    def _check_given(self) -> None:
        """Raises ConvertError if a given key has a wrong type, or contradicts the family or the job's arguments."""
        given, right = dict(self._given), dict(self._family.constants)
        for key, fact in {"rope_scaling": "rope", "rope_parameters": "rope", **self._family.config}.items():
            value, kind = given.get(key), _KINDS.get(fact, "int")
            is_kind = type(value).__name__ in (kind, kind.replace("float", "int"))
            if value is not None and not (is_kind and (kind in ("bool", "str", "dict") or value > 0)):
                raise ConvertError(f"--hf-config: {key} is {value!r}: must be {kind}, and positive if a number")
            given |= value or {} if fact == "rope" else {}
            right |= {key: self._recorded[fact]} if fact in self._recorded else {}
        given.setdefault("rope_type", given.get("type"))
        if (is_scaled := self._arguments.get("use_rope_scaling")) is not None:
            right |= {"rope_type": "llama3" if is_scaled else "default", **self._recorded.get("rope_scaling", {})}
        for key, value in right.items():
            if given.get(key, value) not in (value, None):
                raise ConvertError(f"--hf-config: {key} is {given[key]!r}, the source has {value!r}")

    def _match(self, weights: Sequence[Tensor]) -> Sequence[tuple[Tensor, str, Mapping[str, Value]]]:
        patterns = {text: Pattern.glob(text) for text in self._rules}
        hits = [(each, text, pattern.match(each.name)) for each in weights for text, pattern in patterns.items()]
        matched = [(tensor, text, captured) for tensor, text, captured in hits if captured is not None]
        if unknown := sorted({tensor.name for tensor in weights} - {tensor.name for tensor, *_ in matched}):
            raise ConvertError(
                f"not supported: {self._type} of Hugging Face has nothing for {listed(unknown, _MAX_NAMED)}; write "
                "Megatron's names with --to safetensors"
            )
        return matched

    def _check_complete(self) -> None:
        """Raises ConvertError if a tensor of the family is missing: transformers would initialize it."""

        def names(rule: NameRule, captured: Mapping[str, Value]) -> set[str]:
            return {part.format(**{"expert": 0, **captured}) for part in rule.parts}

        layers = range(self._layers)
        every = set().union(*(names(rule, {"layer": layer}) for rule in self._rules.values() for layer in layers))
        found = set().union(*(names(self._rules[pattern], captured) for _, pattern, captured in self._matched))
        if lacking := sorted(every - found - {"lm_head.weight"}):  # it may be tied to the embedding
            raise ConvertError(f"the source lacks {listed(lacking, _MAX_NAMED)} of {self._type}")

    def _find_sizes(self) -> dict[str, Any]:
        """The facts of ``Family.config`` that tensors show."""
        shapes, given = self._shapes, self._given
        rows, hidden = shapes[_EMBEDDING]
        down = next(pattern for pattern in _DOWN if pattern in shapes)
        sizes = {
            **self._heads(),
            "hidden": hidden,
            "layers": self._layers,
            "ffn": shapes[down][_DOWN[down]],
            "experts": shapes[down][0],
            "positions": shapes.get(_POSITIONS, (0,))[0],
            "is_tied": _OUTPUT not in shapes,
        }
        claims = [(f"--hf-config: {key}", fact, given.get(key)) for key, fact in self._family.config.items()]
        claims += [(name, fact, self._recorded.get(fact)) for fact, name in _HEADS.items()]
        for name, fact, value in claims:
            if value is not None and sizes.get(fact, value) != value:
                raise ConvertError(f"{name} is {value}, the tensors have {sizes[fact]}")
        vocabulary, tp = given.get("vocab_size") or rows, self._arguments.get("tensor_model_parallel_size") or 1
        padding = tp * (self._arguments.get("make_vocab_size_divisible_by") or 128)
        if not 0 <= rows - vocabulary < padding:
            text = f"vocab_size is {vocabulary}, of {rows} rows only the last {padding - 1} can be padding: see"
            raise ConvertError(f"--hf-config: {text} make_vocab_size_divisible_by and tensor_model_parallel_size")
        return {**sizes, "vocabulary": vocabulary}

    def _heads(self) -> dict[str, int]:
        """Heads, groups of queries, and a head's size: the number of heads is not in the tensors."""
        rows = self._shapes[f"{_ATTENTION}.linear_qkv.weight"][0]
        width = self._shapes[f"{_ATTENTION}.linear_proj.weight"][1]
        norm = self._shapes.get(f"{_ATTENTION}.q_layernorm.weight")
        key = next(key for key, fact in self._family.config.items() if fact == "heads")
        heads = width // norm[0] if norm else self._recorded.get("heads") or self._given.get(key)
        if not heads:
            raise ConvertError(
                "the source does not have the number of attention heads, by which query, key and value are "
                f'separated: give --hf-config FILE, JSON with {{"{key}": …}} at least'
            )
        head_dim = width // heads
        groups, rest = divmod(rows - width, 2 * head_dim)
        has_groups = groups > 0 and not heads % groups and (self._type != "gpt2" or groups == heads)
        if rest or head_dim * heads != width or not has_groups:
            raise ConvertError(
                f"{heads} attention heads of {self._type} do not fit linear_qkv of {rows} rows for queries of {width}"
            )
        return {"heads": heads, "groups": groups, "head_dim": head_dim}

    def _cuts(self, rule: NameRule, height: int) -> list[tuple[range, ...]]:
        """The units of each part."""
        if rule.cut == "halves":
            if height != 2 * self._sizes["ffn"]:
                raise ConvertError(f"not supported: {self._type} of Hugging Face has gated layers, the source none")
            return [(range(height // 2),), (range(height // 2, height),)]
        if rule.cut == "pairs":
            return [(range(0, height, 2),), (range(1, height, 2),)]
        if not rule.cut:
            return [(range(height),)]
        head_dim = self._sizes["head_dim"]
        queries = self._sizes["heads"] // self._sizes["groups"] * head_dim
        ends = (0, queries, queries + head_dim, queries + 2 * head_dim)
        groups = range(0, height, ends[-1])
        parts = [tuple(range(at + begin, at + end) for at in groups) for begin, end in pairwise(ends)]
        return parts if len(rule.parts) > 1 else [tuple(chain(*parts))]


def _settings(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of ``Family.config`` that a job's arguments show."""
    found = {
        "norm_epsilon": arguments.get("norm_epsilon", arguments.get("layernorm_epsilon")),
        "max_positions": arguments.get("max_position_embeddings"),
        "topk": arguments.get("moe_router_topk"),
        **{fact: arguments.get(name) for fact, name in _HEADS.items()},
    }
    if arguments.get("group_query_attention") is False:  # num_query_groups means nothing
        found["groups"] = found["heads"]
    if arguments.get("rotary_base") is not None:
        found["rotary_base"] = float(arguments["rotary_base"])
    if arguments.get("use_rope_scaling") and arguments.get("rope_scaling_factor") is not None:
        found["rope_scaling"] = {"rope_type": "llama3", "factor": float(arguments["rope_scaling_factor"]), **_LLAMA3}
    if "bias_gelu_fusion" in arguments:  # the fused function approximates by tanh
        found["activation"] = "gelu_new" if arguments["bias_gelu_fusion"] else "gelu"
    return {fact: value for fact, value in found.items() if value is not None}
