"""Names of layouts, which layouts fit, and the command line that Megatron reads afterwards."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ftckpt.megatron
from ftckpt.config import Config
from ftckpt.errors import ConfigError, LayoutError
from ftckpt.megatron import job
from ftckpt.megatron.layouts import rewrite
from ftckpt.model.layouts import AXES, JobSizes, choose, fits, parse_layout
from tests.support.errors import lacks, raises

GPT = JobSizes(
    global_batch=16, micro_batch=2, num_layers=4, num_heads=4, num_query_groups=4, num_experts=0, ffn=256, seq=64
)
SIZES = st.dictionaries(st.sampled_from(AXES), st.integers(1, 999), min_size=1)


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py"])
    monkeypatch.setattr(job, "choice", None)
    yield
    ftckpt.megatron.configure(Config())


@given(SIZES, st.randoms())
def test_a_name_gives_its_sizes_in_any_order(sizes: dict[str, int], order: Any) -> None:
    parts = [f"{axis}{size}" for axis, size in sizes.items()]
    order.shuffle(parts)
    parsed = parse_layout("".join(parts))
    assert {axis: parsed[axis] for axis in sizes} == sizes
    missing = set(AXES) - sizes.keys() - {"dp"}
    assert all(parsed[axis] == (parsed["tp"] if axis == "etp" else 1) for axis in missing)
    assert ("dp" in parsed) == ("dp" in sizes)
    assert Config(layouts="".join(parts)).layouts == "".join(parts)


@pytest.mark.parametrize(
    ("name", "message"),
    [("", ""), ("tp2,pp2", "tp2,pp2"), ("tp0", "tp0"), ("tp2sp2", "sp"), ("tp2pp2tp4", "tp2pp2tp4 tp")],
)
def test_a_wrong_name_is_refused_by_its_reader_and_at_start(name: str, message: str) -> None:
    with raises(LayoutError, *message.split()):
        parse_layout(name)
    if "," not in name and name:
        with raises(ConfigError, "layouts", repr(name), "axes"):
            Config(layouts=f"tp1,{name}")


def test_a_list_in_json_and_a_function_are_settings() -> None:
    assert Config.from_mapping({"layouts": ["tp2pp2", "tp1"]}).layouts == "tp2pp2,tp1"
    assert Config(layouts="my.site:layout_of").layouts == "my.site:layout_of"
    for wrong in (["tp2", 3], "tp2,,pp2", "tp2;pp2", ":f", "m:"):
        with pytest.raises(ConfigError, match="layouts: "):
            Config.from_mapping({"layouts": wrong})


@pytest.mark.parametrize(
    ("name", "world", "changes", "why"),
    [
        ("tp2pp2dp2", 8, {}, ""),
        ("tp2pp2", 8, {}, ""),
        ("tp2pp2", 6, {}, "4"),
        ("tp3", 3, {"ffn": 255}, "4 tp 3"),
        ("tp3", 3, {"num_heads": 6, "ffn": 255}, "tp 3 4"),
        ("tp2", 2, {"ffn": 255}, "255 tp 2"),
        ("pp3", 3, {}, "4 3"),
        ("pp2vpp4", 2, {}, "4 8"),
        ("vpp2", 1, {}, "vpp 2 pp 2"),
        ("pp2vpp2", 2, {"least_interleaved": 3}, "vpp 2 pp 3"),
        ("cp3", 3, {}, "64 6"),
        ("tp4", 4, {"seq": 62, "sequence_parallel": True}, "62 4"),
        ("tp1", 3, {}, "16 2 dp 3"),
        ("tp1", 2, {"batch_steps": (6,)}, "6 2 dp 2"),
        ("pp2vpp2", 16, {}, "1 vpp 2 pp 2"),
        ("pp2vpp2", 2, {"microbatch_group": 7}, "8 vpp 2 pp 2"),
        ("ep2", 2, {}, "ep 2"),
        ("ep2", 2, {"num_experts": 3}, "3 ep 2"),
        ("tp2ep4", 4, {"num_experts": 4, "sequence_parallel": True}, "etp ep pp 8"),
        ("tp2", 4, {"num_experts": 4}, "tp 2"),
        ("pp2", 2, {"by_hand": "--first", "pp": 4}, "pp 2 --first pp 4"),
        ("pp2", 2, {"by_hand": "--table", "stages": 4}, "pp vpp 2 --table 4"),
    ],
)
def test_what_fits(name: str, world: int, changes: dict[str, Any], why: str) -> None:
    said = fits(parse_layout(name), world, replace(GPT, **changes))
    assert not lacks(said, *why.split()) and bool(said) == bool(why)


def test_the_first_that_fits_is_taken() -> None:
    wanted = ["tp2pp2dp2", "tp2pp1dp2", "tp1pp2", "tp1"]
    for world, name in ((8, "tp2pp2dp2"), (4, "tp2pp1dp2"), (2, "tp1pp2dp1"), (1, "tp1pp1dp1"), (16, "tp1pp2dp8")):
        choice = choose(wanted, world, GPT)
        assert choice.name == name and choice.sizes["dp"] * choice.sizes["tp"] * choice.sizes["pp"] == world
    assert not lacks(str(choose(",".join(wanted), 4, GPT)), "tp2pp1dp2", "4", "tp2pp2dp2", "8")
    assert not lacks(str(choose("tp1", 1, GPT)), "tp1pp1dp1", "1")


def test_none_that_fits_is_an_error_that_says_of_each_why() -> None:
    with raises(LayoutError, "6 ranks", "tp2pp2", "4", "tp1", "16"):
        choose("tp2pp2, tp1", 6, GPT)


def half(world_size: int) -> str:
    return f"tp{world_size // 2}"


NUMBER = 3


def test_a_function_names_the_layout() -> None:
    assert choose(half, 4, GPT).name == choose(f"{__name__}:half", 4, GPT).name == "tp2pp1dp2"
    with pytest.raises(LayoutError, match="tp0"):
        choose(half, 1, GPT)
    with raises(LayoutError, "4", "4 ranks"):
        choose(lambda ranks: ranks, 4, GPT)  # type: ignore[arg-type, return-value]
    for place in ("nowhere.at_all:f", f"{__name__}:nothing", f"{__name__}:NUMBER"):
        with pytest.raises(LayoutError, match=f"layouts: '{place}'"):
            choose(place, 4, GPT)
    with raises(LayoutError, "empty"):
        choose([], 4, GPT)


LINE = (
    "--num-layers 4 --num-attention-heads 4 --seq-length 64 --micro-batch-size 2 --global-batch-size 16 "
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --lr 1e-3"
)
STAGES, LAYERS = "--num-virtual-stages-per-pipeline-rank", "--num-layers-per-virtual-pipeline-stage"
MOE = " --num-experts 4 --sequence-parallel"


@pytest.mark.parametrize(
    ("more", "layouts", "world", "added"),
    [
        ("", "tp2pp2dp2,tp2pp1", 8, ""),
        (" --tensor-model-parallel-size=4", "tp2pp2", 4, " --tensor-model-parallel-size=2"),
        ("", "tp2pp2cp2", 8, " --context-parallel-size 2"),
        ("", "tp2pp2vpp2", 4, f" {STAGES} 2"),
        (f" {STAGES} 2", "tp2pp2", 4, f" {STAGES} 1"),
        (f" {LAYERS} 1", "tp2pp2", 4, f" {LAYERS} 2"),
        (f" {LAYERS} 2", "tp2pp2vpp2", 4, f" {LAYERS} 1"),
        (MOE, "tp2pp2ep2etp1", 4, f"{MOE} --expert-model-parallel-size 2 --expert-tensor-parallel-size 1"),
        (" --expert-tensor-parallel-size 1", "tp2pp2", 4, " --expert-tensor-parallel-size 2"),
    ],
)
def test_the_sizes_are_put_on_the_command_line(more: str, layouts: str, world: int, added: str) -> None:
    argv, choice = rewrite((LINE + more).split(), layouts, world)
    assert argv == (LINE + added).split()
    assert rewrite(argv, layouts, world) == (argv, choice)


def parser() -> Any:
    import argparse

    made = argparse.ArgumentParser(allow_abbrev=False)
    for axis in ("tensor", "pipeline"):
        made.add_argument(f"--{axis}-model-parallel-size", type=int, default=1)
    for name in ("num-layers", "num-attention-heads", "seq-length", "micro-batch-size", "global-batch-size"):
        made.add_argument(f"--{name}", type=int)
    made.add_argument("--lr", type=float)
    return made


def test_the_flags_join_a_parser_that_reads_the_chosen_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("megatron.core")
    from ftckpt.megatron.train_loop import _add_flags

    monkeypatch.setenv("WORLD_SIZE", "4")
    # The runner takes the flags off the line.
    ftckpt.megatron.configure(Config.from_flags(["--ftckpt", "--ftckpt-layouts=tp2pp2dp2,tp4"])[0])
    sys.argv += LINE.split()
    args = _add_flags(lambda made: made, parser()).parse_args()
    assert (args.tensor_model_parallel_size, args.pipeline_model_parallel_size) == (4, 1)
    assert args.ftckpt_layouts == "tp2pp2dp2,tp4" and args.lr == 1e-3
