"""The language of parameter names: geometry from names and shapes, and errors for all that does not fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.errors import SpecError
from ftckpt.model.fragment import Box
from ftckpt.universal.language.patterns import evaluate, fill_template
from ftckpt.universal.language.placing import LocalTensor, Placement, place
from ftckpt.universal.language.spec import Spec
from tests.integrations.megatron_models import Model, build, fill, parallel
from tests.support.errors import raises
from tests.support.pool import run_ranks
from tests.support.tiers import by_default

Held = list[tuple[LocalTensor, np.ndarray]]


def spec(*rules: Mapping[str, Any], variables: Mapping[str, Any] | None = None, **given: int) -> Spec:
    return Spec.parse({"rules": list(rules), "variables": variables or {}}, "test", given)


def held(name: str, parts: Sequence[np.ndarray], axis: str = "tp", **coords: int) -> Held:
    return [(LocalTensor(name, part.shape, {**coords, axis: rank}), part) for rank, part in enumerate(parts)]


def whole(placements: Sequence[Placement | None], stored: Held) -> dict[str, np.ndarray]:
    """Every logical tensor put together; each element has to be there, and copies have to agree."""
    found: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for placement, (_, values) in zip(placements, stored, strict=True):
        if placement is None:
            continue
        fresh = (np.zeros(placement.shape, values.dtype), np.zeros(placement.shape, bool))
        elements, there = found.setdefault(placement.name, fresh)
        for box_map in placement.boxes:
            part = values[at(box_map.local)].reshape(box_map.box.shape)
            assert (elements[at(box_map.box)] == part)[there[at(box_map.box)]].all()
            elements[at(box_map.box)] = part
            there[at(box_map.box)] = True
    assert all(there.all() for _, there in found.values())
    return {name: elements for name, (elements, _) in found.items()}


def at(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + s) for o, s in zip(box.offset, box.shape, strict=True))


def placed(rules: Spec, stored: Held, **arguments: Any) -> dict[str, np.ndarray]:
    return whole(place(rules, [each for each, _ in stored], arguments), stored)


def ramp(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape, dtype=int)).reshape(shape) + 1


def fused(heads: int, kv_heads: int, head_dim: int, ranks: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """A weight of queries, keys and values, and the parts of ranks: entire heads, the first ranks one more; where
    there are fewer key heads than ranks, several ranks hold the same."""
    whole_weight = [ramp(n * head_dim, 2) + 1000 * k for k, n in enumerate((heads, kv_heads, kv_heads))]
    parts = []
    for rank in range(ranks):
        mine = []
        for value, units in zip(whole_weight, (heads, kv_heads, kv_heads), strict=True):
            if units >= ranks:
                counts = [len(piece) for piece in np.array_split(np.arange(units), ranks)]
                first, count = sum(counts[:rank]), counts[rank]
            else:
                first, count = rank // (ranks // units), 1
            mine.append(value[first * head_dim : (first + count) * head_dim])
        parts.append(np.concatenate(mine))
    return np.concatenate(whole_weight), parts


@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), [(8, 8, 4), (8, 4, 4), (8, 2, 4), (8, 1, 4), (7, 5, 3)])
def test_heads_are_never_cut(heads: int, kv_heads: int, ranks: int) -> None:
    weight, parts = fused(heads, kv_heads, 4, ranks)
    widths = [("q", "$heads"), ("k", "$kv_heads"), ("v", "$kv_heads")]
    part_rules = [{"name": name, "width": f"{num} * $head_dim", "unit": "$head_dim"} for name, num in widths]
    rules = spec(
        {"match": "qkv", "fragment": {"dim": 0, "parts": part_rules}},
        variables={"heads": {"from": ["num_attention_heads"]}, "head_dim": "$hidden // $heads", "hidden": 4 * heads},
        kv_heads=kv_heads,
    )
    assert (placed(rules, held("qkv", parts), num_attention_heads=heads)["qkv"] == weight).all()


@given(st.data())
def test_any_cuts_at_once(data: st.DataObject) -> None:
    """Experts along one dimension and parts along another, uneven, with stacked layers."""
    ep, tp = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=tp, max_size=tp))
    num_parts = data.draw(st.integers(1, 3))
    layers = data.draw(st.integers(1, 2))
    stored, expected = [], []
    for layer in range(layers):
        parts = [ramp(2 * ep, 2, sum(sizes)) + 1000 * (n + 10 * layer) for n in range(num_parts)]
        expected.append(np.concatenate(parts, axis=2))
        for expert_rank in range(ep):
            for rank, size in enumerate(sizes):
                begin = sum(sizes[:rank])
                mine = [part[2 * expert_rank : 2 * expert_rank + 2, :, begin : begin + size] for part in parts]
                values = np.concatenate(mine, axis=2)
                stored.append((LocalTensor(f"l.{layer}.w", values.shape, {"tp": rank, "ep": expert_rank}), values))
    cut = {"dim": 2, "uneven": True, "parts": [f"p{n}" for n in range(num_parts)]}
    rules = spec(
        {"match": "l.{layer}.w", "rename": "l.w", "stack": "layer", "fragment": [{"dim": 0, "axis": "ep"}, cut]}
    )
    assert (placed(rules, stored)["l.w"] == np.stack(expected)).all()


def test_experts_are_numbered_over_their_ranks_and_stacked() -> None:
    experts = [ramp(4, 2) + 100 * n for n in range(4)]
    stored = []
    for ep in range(2):
        for local in range(2):
            stored += held(f"experts.{local}.w", np.split(experts[2 * ep + local], 2), ep=ep)
    rule = {"match": "experts.{expert}.w", "fragment": {"dim": 0}, "expert": "expert", "stack": "expert"}
    found = placed(spec({**rule, "rename": "experts.w"}), stored)
    assert (found["experts.w"] == np.stack(experts)).all()
    del rule["stack"]
    found = placed(spec({**rule, "rename": "experts.{expert}.w"}), stored)
    assert all((found[f"experts.{n}.w"] == experts[n]).all() for n in range(4))
    with raises(SpecError, "[1, 2]"):
        placed(spec({**rule, "rename": "experts.{expert}.w"}), stored[:-2])
    everywhere = {**rule, "rename": "experts.{expert}.w", "expert": {"number": "expert", "numbers": "global"}}
    renamed = []
    for ep in range(2):
        renamed += held(f"experts.{ep}.w", np.split(experts[ep], 2), ep=ep)
    found = placed(spec(everywhere), renamed)
    assert all((found[f"experts.{n}.w"] == experts[n]).all() for n in range(2))


def test_a_vocabulary_can_lose_its_padding() -> None:
    weight = ramp(8, 2)
    stored = held("embedding", np.split(weight, 4))
    rule = {"match": "embedding", "fragment": {"dim": 0}}
    kept = place(spec({**rule, "padded_vocabulary": True}), [each for each, _ in stored], {})
    assert all(each is not None and each.padded and each.shape == (8, 2) for each in kept)
    cut = spec({**rule, "padded_vocabulary": {"size": "$vocab"}}, vocab=5)
    assert (placed(cut, stored)["embedding"] == weight[:5]).all()
    with raises(SpecError, "embedding", "8 rows", "9"):
        placed(spec({**rule, "padded_vocabulary": {"size": 9}}), stored)


A, B = held("a.weight", [ramp(2)]), held("b.weight", [ramp(2)])
UNIQUE = {"match": "a.weight", "unique": True}


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ([UNIQUE], "test b.weight"),
        ([UNIQUE, {"match": "*.weight", "unique": True}], "a.weight 1 2"),
        ([{"match": "**", "unique": True, "rename": "c"}], "a.weight b.weight 0"),
        ([{"match": "**", "fragment": {"dim": 3}}], "a.weight 3"),
        ([{"match": "**", "fragment": {"dim": 0, "parts": ["a", "b", "c"]}}], "1 3"),
        (
            [{"match": "**", "fragment": {"dim": 0, "parts": [{"name": "a", "width": 3}]}}],
            "3 2",
        ),
        ([{"match": "**", "fragment": {"dim": 0, "parts": [{"name": "a", "width": "$w"}]}}], "--set w=VALUE"),
    ],
)
def test_what_does_not_fit_is_an_error(rules: list[Mapping[str, Any]], text: str) -> None:
    with raises(SpecError, *text.split()):
        placed(spec(*rules), A + B)


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ({"unique": True}, "1 match"),
        ({"match": "a"}, "unique replicated average fragment drop"),
        ({"match": "a", "unique": True, "renam": "b"}, "renam"),
        ({"match": "a", "fragment": {"dim": -1}}, "dim -1"),
        ({"match": "a", "fragment": {"dim": 0, "parts": [{"name": "a", "unit": 2}]}}, "unit width"),
        ({"match": "a", "unique": True, "padded_vocabulary": {"dim": 1}}, "padded_vocabulary dim size"),
        (
            {"match": "a.{n}", "unique": True, "expert": {"number": "n", "numbers": "odd"}},
            "odd",
        ),
        ({"match": "{a}.{a}", "unique": True}, "a"),
    ],
)
def test_a_wrong_rule_is_an_error_that_names_the_field(rule: Mapping[str, Any], text: str) -> None:
    with raises(SpecError, *text.split()):
        spec(rule)


def test_a_wrong_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    with raises(SpecError, "nothing"):
        Spec.load("nothing")
    path = tmp_path / "own.yaml"
    for text, error in (
        ("rules: [", "cannot be read"),
        ("about: x", "either rules or variants"),
        ("rules: [1]", "rule 1: has to be a mapping"),
        ("more: 1\nrules: []", "unknown field more; known are about, rules, variables, variants"),
        ("variables: {a: {of: b}}\nrules: [{match: a, unique: true}]", "variables: a: unknown field of"),
    ):
        path.write_text(text)
        with pytest.raises(SpecError, match=error):
            Spec.load(path)


def test_arithmetic() -> None:
    assert evaluate("(layer + 2) * $heads - 7 // 2 % 2", {"layer": 3}, {"heads": 4}) == 19
    assert fill_template("x.{layer + offset}.{what}", {"layer": 1, "offset": 4, "what": "bias"}, {}) == "x.5.bias"
    for text in ("1 +", "2 ** 9", "__import__('os')", "1.5", "layer.x", "1 // 0", "-1 // 0", "(" * 300):
        with pytest.raises(SpecError):
            evaluate(text, {"layer": 1}, {})


def test_a_ready_specification_for_names_of_hugging_face() -> None:
    def model(tp: int) -> Held:
        found = held("model.embed_tokens.weight", [ramp(8, 4)] * tp) + held("model.norm.weight", [ramp(4)] * tp)
        for n in range(2):
            at_layer = f"model.layers.{n}"
            _, parts = fused(4, 2, 2, tp)
            found += held(f"{at_layer}.self_attn.qkv_proj.weight", parts)
            found += held(f"{at_layer}.self_attn.o_proj.weight", np.split(ramp(4, 8), tp, axis=1))
            gate = np.split(ramp(8, 4), tp)
            found += held(f"{at_layer}.mlp.gate_up_proj.weight", [np.concatenate([g, g + 100]) for g in gate])
            found += held(f"{at_layer}.mlp.down_proj.weight", np.split(ramp(4, 8), tp, axis=1))
            for norm in ("input_layernorm", "post_attention_layernorm"):
                found += held(f"{at_layer}.{norm}.weight", [ramp(4)] * tp)
        return found

    arguments = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 8}
    expected = {stored.name: values for stored, values in model(1)}
    for tp in (1, 2, 4):
        found = placed(Spec.load("llama"), model(tp), **arguments)
        assert found.keys() == expected.keys()
        assert all((found[name] == expected[name]).all() for name in expected), tp


RMS = {"normalization": "RMSNorm"}
GATED = {**RMS, "gated_linear_unit": True, "add_bias_linear": False}
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "gated_linear_unit": True, **RMS}
BIASED = {**EXPERTS, "moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid",
          "moe_router_load_balancing_type": "none"}  # fmt: skip
CASES: dict[str, tuple[str, Model]] = {
    "gpt": ("gpt", Model()),
    "gpt-untied": ("gpt", Model(untied=True)),
    "gpt-without-biases": ("gpt", Model({"add_bias_linear": False})),
    "gpt-qk-layernorm": ("gpt", Model({"qk_layernorm": True})),
    "gpt-rmsnorm": ("gpt", Model({**RMS, "add_bias_linear": False, "add_qkv_bias": True})),
    "llama": ("llama", Model({**GATED, "num_query_groups": 2}, untied=True)),
    "llama-tied": ("llama", Model({**GATED, "num_query_groups": 2})),
    "llama-qkv-bias": ("llama", Model({**GATED, "num_query_groups": 2, "add_qkv_bias": True}, untied=True)),
    "llama-qk-layernorm": ("llama", Model({**GATED, "num_query_groups": 2, "qk_layernorm": True}, untied=True)),
    "llama-biases": ("llama", Model({"gated_linear_unit": True}, untied=True)),
    "mixtral": ("mixtral", Model(EXPERTS, untied=True)),
    "mixtral-tied": ("mixtral", Model(EXPERTS)),
    "mixtral-expert-bias": ("mixtral", Model(BIASED, untied=True)),
    "mixtral-router-bias": ("mixtral", Model({**EXPERTS, "add_bias_linear": True}, untied=True)),
    "mixtral-qkv-bias": ("mixtral", Model({**EXPERTS, "add_qkv_bias": True, "qk_layernorm": True}, untied=True)),
    "mixtral-shared-expert-gate": (
        "mixtral",
        Model({**EXPERTS, "moe_shared_expert_intermediate_size": 32, "moe_shared_expert_gate": True}, untied=True),
    ),
    "mixtral-shared-expert": ("mixtral", Model({**EXPERTS, "moe_shared_expert_intermediate_size": 32}, untied=True)),
}
LAYOUTS = {"tp2": (2, {"tp": 2}), "pp2-vpp2": (2, {"pp": 2, "vpp": 2}), "tp2-pp2": (4, {"tp": 2, "pp": 2}),
           "tp2-ep2": (4, {"tp": 2, "ep": 2}), "tp2-etp1-ep2": (2, {"tp": 2, "ep": 2, "etp": 1})}  # fmt: skip


def stored_and_placed(rank: int, world_size: int, model: Model, layout: Mapping[str, int]) -> tuple[Any, Any]:
    """The contents of a rank's checkpoint in the ``torch`` format, and their place by Megatron itself."""
    from megatron.core import parallel_state as mpu
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
    from megatron.core.utils import unwrap_model

    own: list[Any] = []
    theirs: list[Any] = []

    def leaves(value: Any) -> None:
        if isinstance(value, ShardedTensorFactory):
            leaves(value.build())
        elif isinstance(value, dict | list | tuple):
            for item in value.values() if isinstance(value, dict) else value:
                leaves(item)
        elif isinstance(value, ShardedTensor) and "_extra_state" not in value.key:
            data = value.data.detach().float().numpy().copy()
            theirs.append((value.key, tuple(value.global_shape), tuple(value.global_offset), data))

    with parallel(layout):
        coords = {
            "tp": mpu.get_tensor_model_parallel_rank(), "pp": mpu.get_pipeline_model_parallel_rank(),
            "ep": mpu.get_expert_model_parallel_rank(), "etp": mpu.get_expert_tensor_parallel_rank(),
        }  # fmt: skip
        built = build(model, layout)
        distinguish(built)
        for number, chunk in enumerate(built.chunks):
            for name, value in unwrap_model(chunk).state_dict_for_save_checkpoint().items():
                if value is not None and hasattr(value, "shape"):
                    own.append((name, {**coords, "vpp": number}, value.detach().float().numpy().copy()))
            leaves(unwrap_model(chunk).sharded_state_dict(metadata={"non_homogeneous_layers": True}))
    return own, theirs


def distinguish(built: Any) -> None:
    """Values that distinguish elements: biases and norms are alike everywhere when they are made."""
    from ftckpt.megatron.state import MegatronState

    described = MegatronState(built.chunks, built.optimizer, None, {}).describe()
    pieces = [*described.stepped, *described.volatile]
    fill(piece for piece in pieces if piece.fragment.key.startswith(("weight/", "buffer/")))


PAIRS = list(product(CASES, LAYOUTS))
QUICK = [
    (name, layout)
    for name, layout in PAIRS
    if name in ("gpt", "llama", "mixtral") or layout == ("tp2-ep2" if CASES[name][0] == "mixtral" else "tp2")
]


@pytest.mark.multiproc
@pytest.mark.parametrize(("name", "layout"), by_default(PAIRS, QUICK))
def test_specifications_say_what_megatron_says(name: str, layout: str) -> None:
    spec, model = CASES[name]
    world_size, sizes = LAYOUTS[layout]
    if "ep" in sizes and "num_moe_experts" not in model.config:
        pytest.skip("no experts")
    if model.config.get("add_bias_linear") and sizes.get("tp", 1) != 1 and sizes.get("etp") != 1:
        pytest.skip("Megatron has no experts with biases that are cut")
    stored: list[tuple[LocalTensor, np.ndarray]] = []
    theirs: dict[str, np.ndarray] = {}
    # Without the distributed optimizer each rank has, and fills, all of its weights.
    for result in run_ranks(stored_and_placed, world_size, replace(model, sharded=False), sizes):
        own, said = result.value
        stored += [(LocalTensor(at_rank, values.shape, coords), values) for at_rank, coords, values in own]
        for key, shape, offset, values in said:
            tensor = theirs.setdefault(key, np.full(shape, np.nan, np.float32))
            lengths = (1,) * (len(shape) - values.ndim) + values.shape
            tensor[at(Box(offset, lengths))] = values.reshape(lengths)
    arguments = {"untie_embeddings_and_output_weights": model.untied, "num_attention_heads": 4, "hidden_size": 32}
    found = placed(Spec.load(spec), stored, **arguments)
    assert found.keys() == theirs.keys()
    for key, values in theirs.items():
        assert (found[key] == values).all(), key
