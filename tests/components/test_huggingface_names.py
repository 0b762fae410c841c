"""Weights under Hugging Face's names: bit-equal for every family, complete; what has no place is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_tensors

from ftckpt.cli.main import main
from ftckpt.errors import ConvertError
from ftckpt.megatron.model_arguments import model_arguments
from ftckpt.universal.consolidation import Consolidator
from ftckpt.universal.conversion import Options, convert, prepare
from ftckpt.universal.formats import ReadOptions, open_reader
from ftckpt.universal.huggingface import model
from ftckpt.universal.huggingface.writer import HuggingFaceWriter
from ftckpt.universal.safetensors import INDEX
from ftckpt.universal.universal_format import UniversalWriter
from ftckpt.universal.verification import verify
from tests.support.errors import raises
from tests.support.hf_names import (
    ARGUMENTS,
    FAMILIES,
    HIDDEN,
    PAD,
    VOCABULARY,
    Arrays,
    hf_tensors,
    megatron_tensors,
    source,
)

CUT = {"vocab_size": VOCABULARY}
CASES = [(name, joined, False) for name in FAMILIES for joined in (False, True)]
CASES += [(name, False, True) for name in FAMILIES if name.startswith("mixtral") or name.endswith("moe")]


def objects(arguments: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a job's snapshot has of its model."""
    return {"shards": {"dp0": {} if arguments is None else {"model": json.dumps(arguments)}}}


def arrays(name: str, joined: bool = False, grouped: bool = False) -> Arrays:
    return megatron_tensors(name, hf_tensors(name), joined=joined, grouped=grouped)


def megatron(name: str, arguments: Mapping[str, Any] | None = ARGUMENTS, *cut: bool) -> Any:
    """A model of Megatron-core."""
    return source(arrays(name, *cut), objects(arguments))


def export(reader: Any, path: Path, given: Mapping[str, Any] | None = None, max_bytes: int = 1 << 30) -> Arrays:
    """The tensors of an export, verified by reading both again."""
    conversion = prepare(reader, HuggingFaceWriter(path, max_bytes, given), Options())
    assert not conversion.left_out
    convert(reader, HuggingFaceWriter(path, max_bytes, given), Options())
    assert verify(conversion, open_reader([path], ReadOptions()), 2)
    return {name: array for file in path.glob("*.safetensors") for name, array in load_file(file).items()}


def config(path: Path) -> dict[str, Any]:
    return dict(json.loads((path / "config.json").read_text()))


def assert_equal(found: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray]) -> None:
    assert found.keys() == right.keys()
    assert not [name for name in right if not np.array_equal(found[name], right[name])]


@pytest.mark.parametrize(("name", "joined", "grouped"), CASES)
def test_each_family_is_renamed_and_cut(name: str, joined: bool, grouped: bool, tmp_path: Path) -> None:
    right = hf_tensors(name)
    found = export(megatron(name, ARGUMENTS, joined, grouped), tmp_path / "out", CUT, max_bytes=9000)
    assert_equal(found, right)
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["weight_map"].keys() == right.keys() and len(set(index["weight_map"].values())) > 2
    wanted = {**FAMILIES[name].json(name), "torch_dtype": "float32"}
    written = config(tmp_path / "out")
    assert {key: written.get(key) for key in wanted} == wanted
    assert written["architectures"][0].lower().startswith(name.replace("_", ""))


@pytest.mark.parametrize("name", FAMILIES)
def test_parts_of_a_tensor_are_those_of_the_whole(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = megatron(name, ARGUMENTS, False, name == "mixtral")
    consolidator = Consolidator(reader)
    monkeypatch.setattr(model, "STRIP_BYTES", 100)
    tensors, get = HuggingFaceWriter(tmp_path).rename(reader.catalog, consolidator.tensors, consolidator.get)
    for tensor in tensors:
        whole = get(tensor, 0, tensor.rows)
        assert whole.nbytes == tensor.nbytes
        middle = tensor.rows // 3
        ranges = ((0, middle), (middle, middle + 1), (middle + 1, tensor.rows))
        parts = [get(tensor, first, last) for first, last in ranges if first < last]
        assert np.array_equal(np.concatenate(parts), whole), tensor.key


def test_the_padding_of_a_vocabulary_stays_without_its_size(tmp_path: Path) -> None:
    found = export(megatron("llama"), tmp_path / "out")
    assert found["lm_head.weight"].shape == found["model.embed_tokens.weight"].shape == (VOCABULARY + PAD, HIDDEN)
    assert config(tmp_path / "out")["vocab_size"] == VOCABULARY + PAD


def test_weights_that_are_casts_of_masters(tmp_path: Path) -> None:
    tensors = {key.replace("weight/", "master/", 1): array for key, array in arrays("qwen3").items()}
    derived = dict.fromkeys((key.replace("master/", "weight/", 1) for key in tensors), "BF16")
    reader = source(
        {**tensors, "buffer/x.local_tokens_per_expert": np.zeros(3, np.float32)}, objects(ARGUMENTS), derived=derived
    )
    convert(reader, HuggingFaceWriter(tmp_path / "out", given=CUT), Options())
    found = load_tensors(tmp_path / "out" / "model.safetensors")
    right = {key: torch.from_numpy(array).to(torch.bfloat16) for key, array in hf_tensors("qwen3").items()}
    assert found.keys() == right.keys() and all(torch.equal(found[name], right[name]) for name in right)
    assert config(tmp_path / "out")["torch_dtype"] == "bfloat16"


def test_arguments_of_megatron_lm_and_given_keys(tmp_path: Path) -> None:
    scaled = {**ARGUMENTS, "use_rope_scaling": True, "rope_scaling_factor": 8.0}
    reader = source(arrays("llama"), {"megatron": {"args": {**scaled, "window_size": None}}})
    export(reader, tmp_path / "out", {"model_type": "mistral", "eos_token_id": 7, "rms_norm_eps": 1e-4})
    found = config(tmp_path / "out")
    assert (found["model_type"], found["architectures"]) == ("mistral", ["MistralForCausalLM"])
    assert (found["eos_token_id"], found["rms_norm_eps"], found["rope_theta"]) == (7, 1e-4, 5000.0)
    assert found["rope_scaling"]["rope_type"] == "llama3" and found["rope_scaling"]["factor"] == 8.0
    newer = {"rope_parameters": {"rope_theta": 5000, "rope_type": "llama3", "factor": 8.0}, "dtype": "float64"}
    export(reader, tmp_path / "newer", newer)
    found = config(tmp_path / "newer")
    assert "rope_theta" not in found and "dtype" not in found and found["torch_dtype"] == "float32"


def test_what_is_to_be_filled_in_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    export(megatron("mixtral", {"use_rope_scaling": True}), tmp_path / "out", {"num_attention_heads": 4})
    missing = ("rms_norm_eps", "rope_theta", "max_position_embeddings", "num_experts_per_tok", "rope_scaling")
    assert all(key in caplog.text and key not in config(tmp_path / "out") for key in missing)
    caplog.clear()
    # The size of a head is that of its normalization.
    export(megatron("qwen3", {}), tmp_path / "qwen3", {"rms_norm_eps": 1e-5})
    assert "rope_theta" in caplog.text and "rms_norm_eps" not in caplog.text
    assert config(tmp_path / "qwen3")["num_attention_heads"] == 4


def without(*parts: str) -> Callable[[Arrays], Arrays]:
    return lambda tensors: {key: array for key, array in tensors.items() if not any(part in key for part in parts)}


def halved(tensors: Arrays) -> Arrays:
    return {key: array[: len(array) // 2] if "linear_fc1.weight" in key else array for key, array in tensors.items()}


def more(name: str) -> Callable[[Arrays], Arrays]:
    return lambda tensors: {**tensors, f"weight/{name}": np.zeros((2, 2), np.float32)}


REFUSED: dict[str, tuple[str, Callable[[Arrays], Arrays], dict[str, Any] | None, dict[str, Any], tuple[str, ...]]] = {
    "no place for a tensor": (
        "llama", more("decoder.layers.0.mlp.linear_fc3.weight"), {}, {}, ("llama", "linear_fc3.weight", "--to")
    ),
    "a bias of the router": ("mixtral", more("decoder.layers.1.mlp.router.expert_bias"), {}, {}, ("expert_bias",)),
    "a layer is missing": ("llama", without("layers.0."), {}, {}, ("model.layers.0.input_layernorm.weight", "llama")),
    "a tensor is missing": ("gpt2", without("1.mlp.linear_fc2.bias"), {}, {}, ("transformer.h.1.mlp.c_proj.bias",)),
    "no heads": ("llama", dict, None, {}, ("--hf-config", "num_attention_heads")),
    "no heads of gpt2": ("gpt2", dict, None, {}, ("--hf-config", "n_head")),
    "other heads": ("llama", dict, {"num_attention_heads": 5}, {}, ("5 attention heads", "linear_qkv")),
    "other groups": ("llama", dict, {}, {"num_key_value_heads": 4}, ("num_key_value_heads is 4", "have 2")),
    "given and recorded heads": ("llama", dict, {}, {"num_attention_heads": 8}, ("num_attention_heads is 8", "4")),
    "heads of gpt2": ("gpt2", dict, {}, {"n_head": 6}, ("n_head is 6", "4")),
    "recorded groups": ("llama", dict, {"num_query_groups": 4}, {}, ("num_query_groups is 4", "have 2")),
    "given groups": ("llama", dict, {"num_query_groups": 2}, {"num_key_value_heads": 1}, ("is", "1", "2")),
    "size of heads": ("llama", dict, {"kv_channels": 12}, {}, ("kv_channels is 12", "have 6")),
    "given size of heads": ("qwen3", dict, {"kv_channels": 10}, {"head_dim": 20}, ("head_dim is 20", "10")),
    "heads that fit": ("llama", dict, {"num_attention_heads": 8, "kv_channels": 6}, {}, ("kv_channels is 6", "3")),
    "epsilon": ("llama", dict, {}, {"rms_norm_eps": 1e-5}, ("rms_norm_eps is 1e-05", "0.0001")),
    "theta": ("llama", dict, {}, {"rope_parameters": {"rope_theta": 1e4}}, ("rope_theta is 10000.0", "5000.0")),
    "scaling": (
        "llama", dict, {"use_rope_scaling": False}, {"rope_scaling": {"type": "linear"}}, ("rope_type", "linear")
    ),
    "factor": (
        "llama", dict, {"use_rope_scaling": True, "rope_scaling_factor": 8}, {"rope_scaling": {"factor": 4}},
        ("factor is 4", "8.0"),
    ),
    "top k": ("mixtral", dict, {}, {"num_experts_per_tok": 1}, ("num_experts_per_tok is 1", "2")),
    "activation": ("llama", dict, {}, {"hidden_act": "gelu"}, ("hidden_act is 'gelu'", "silu")),
    "activation of gpt2": ("gpt2", dict, {}, {"activation_function": "relu"}, ("activation_function is 'relu'",)),
    "text": ("llama", dict, None, {"num_attention_heads": "4"}, ("num_attention_heads is '4'", "int")),
    "a fraction": ("llama", dict, None, {"num_attention_heads": 4.0}, ("num_attention_heads is 4.0", "int")),
    "text of a vocabulary": ("llama", dict, {}, {"vocab_size": "50"}, ("vocab_size is '50'",)),
    "text of epsilon": ("llama", dict, {}, {"rms_norm_eps": "1e-4"}, ("rms_norm_eps is '1e-4'", "float")),
    "no object": ("llama", dict, {}, {"rope_parameters": 4}, ("rope_parameters is 4", "dict")),
    "negative heads": ("llama", dict, None, {"num_attention_heads": -4}, ("num_attention_heads is -4",)),
    "no vocabulary": ("llama", dict, {}, {"vocab_size": 0}, ("vocab_size is 0",)),
    "rows that are no padding": (
        "llama", dict, {"make_vocab_size_divisible_by": 7, "tensor_model_parallel_size": 2}, CUT, ("64", "13")
    ),
    "another size": ("qwen2", dict, {}, {"hidden_size": 48}, ("hidden_size is 48", "24")),
    "a larger vocabulary": ("llama", dict, {}, {"vocab_size": 65}, ("vocab_size is 65", "64 rows")),
    "another family": ("llama", dict, {}, {"model_type": "gemma"}, ("gemma", "mixtral")),
    "not gated": ("llama", halved, {}, {}, ("gated",)),
    "layernorm 1p": ("qwen3", dict, {"apply_layernorm_1p": True}, {}, ("apply_layernorm_1p is True",)),
    "a window": ("llama", dict, {"window_size": [8, 0]}, {}, ("window_size is [8, 0]",)),
    "another softmax": ("llama", dict, {"softmax_type": "learnable"}, {}, ("softmax_type is learnable",)),
    "a clamp": ("llama", dict, {"activation_func_clamp_value": 7.0}, {}, ("activation_func_clamp_value is 7.0",)),
    "sinkhorn": ("mixtral", dict, {"moe_router_load_balancing_type": "sinkhorn"}, {}, ("is sinkhorn",)),
    "unknown": ("llama", dict, {"new_scale": 2, "not_default": ["new_scale"]}, {}, ("new_scale is 2", "llama")),
    "sigmoid": ("mixtral", dict, {"moe_router_score_function": "sigmoid"}, {}, ("moe_router_score_function",)),
    "geglu": ("llama", dict, {"swiglu": False}, {}, ("swiglu is False",)),
    "rotary": ("gpt2", dict, {"position_embedding_type": "rope"}, {}, ("position_embedding_type is rope", "gpt2")),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_hugging_face_does_not_have_is_refused_by_name(case: str, tmp_path: Path) -> None:
    name, change, arguments, given, words = REFUSED[case]
    known = None if arguments is None else {**ARGUMENTS, **arguments}
    reader = source(change(arrays(name)), objects(known))
    with raises(ConvertError, *words):
        prepare(reader, HuggingFaceWriter(tmp_path / "out", given=given), Options())


DIFFERENT = {
    "activation_func_clamp_value": 7.0, "glu_linear_offset": 1.0, "softmax_scale": 0.5, "softmax_type": "off-by-one",
    "qk_l2_norm": True, "moe_apply_probs_on_input": True, "window_attn_skip_freq": 2,
    "moe_expert_capacity_factor": 1.0,
}  # fmt: skip
HARMLESS = {"hidden_dropout": 0.0, "recompute_granularity": "full", "bf16": True, "bias_dropout_fusion": True}


def test_what_a_model_has_of_other_than_megatrons_defaults_is_recorded() -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=2, hidden_size=HIDDEN, num_attention_heads=4, kv_channels=6, num_query_groups=2
    )
    for name, value in HARMLESS.items():
        setattr(config, name, value)
    found = json.loads(model_arguments(SimpleNamespace(config=config)))
    assert found["not_default"] == [] and (found["num_query_groups"], found["kv_channels"]) == (2, 6)
    for name, value in DIFFERENT.items():
        setattr(config, name, value)
    found = json.loads(model_arguments(SimpleNamespace(config=config)))
    assert sorted(found["not_default"]) == sorted(DIFFERENT) and DIFFERENT.items() <= found.items()
    for activation, is_gated in ((torch.nn.functional.silu, False), (torch.nn.functional.gelu, True)):
        config.activation_func, config.gated_linear_unit = activation, is_gated
        assert json.loads(model_arguments(SimpleNamespace(config=config)))["squared_relu"]


def test_groups_of_queries_are_not_gpt2s(tmp_path: Path) -> None:
    tensors = arrays("gpt2")
    cut = {key: array[: len(array) // 3 * 2] if "linear_qkv" in key else array for key, array in tensors.items()}
    with raises(ConvertError, "gpt2", "48"):
        prepare(source(cut, objects(ARGUMENTS)), HuggingFaceWriter(tmp_path / "out"), Options())


@pytest.mark.parametrize("is_recorded", [True, False])
def test_names_of_hugging_face_pass_through(is_recorded: bool, tmp_path: Path) -> None:
    right = hf_tensors("llama")
    described = {**FAMILIES["llama"].json("llama"), "architectures": ["LlamaForCausalLM"]}
    tensors = {f"weight/{name}": array for name, array in right.items()}
    computed = {"buffer/model.rotary_emb.inv_freq": np.zeros(3, np.float32)}
    reader = source({**tensors, **computed}, objects(described if is_recorded else None))
    convert(reader, HuggingFaceWriter(tmp_path / "out", given={} if is_recorded else described), Options())
    assert_equal(load_file(tmp_path / "out" / "model.safetensors"), right)
    assert config(tmp_path / "out") == described
    if not is_recorded:
        with raises(ConvertError, "--hf-config", "--to safetensors"):
            prepare(reader, HuggingFaceWriter(tmp_path / "x"), Options())


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert(megatron("gpt2", None), UniversalWriter(tmp_path / "source"), Options())
    words = ["convert", str(tmp_path / "source"), str(tmp_path / "out")]
    assert main([*words, "--to", "huggingface", "--verify"]) == 2
    assert "--hf-config" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps({"n_head": 4, **CUT}))
    assert main([*words, "--hf-config", str(tmp_path)]) == 2
    assert "--to universal" in capsys.readouterr().err
    with_config = [*words, "--to", "huggingface", "--hf-config", str(tmp_path / "config.json"), "--verify"]
    assert main(with_config) == 0
    assert "verified" in capsys.readouterr().out
    assert_equal(load_file(tmp_path / "out" / "model.safetensors"), hf_tensors("gpt2"))
    (tmp_path / "config.json").write_text("[1]")
    assert main(with_config) == 2
    assert "config.json" in capsys.readouterr().err
