"""The configuration, and units of its values."""

from __future__ import annotations

import argparse
import ast
import os
import re
from collections.abc import Callable
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt import config as config_module
from ftckpt.config import Config, add_flags
from ftckpt.deepspeed import section
from ftckpt.errors import ConfigError
from ftckpt.setting import kind_of
from ftckpt.units import counted, in_words, rate, seconds, size
from tests.support.errors import lacks, raises
from tests.support.processes import run_python

# --- every wrong setting is an error at start that names the field and what is accepted ---


TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)
QUANTITIES = {size: ["1MiB", "1.5 GiB", "64MB"], rate: ["0", "2GB/s", "16Gbit/s"], seconds: ["90s", "40h"]}
NAMES = st.just("") | st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True)
OWN: dict[str, st.SearchStrategy[Any]] = {
    "smp_cores": st.floats(0, 1),
    "metrics_port": st.integers(0, 65535) | st.just("auto"),
    "slots": st.integers(2, 64),
    "job": NAMES,
    "node": NAMES,
    "rack": NAMES,
    "persist": st.sampled_from(["", "/checkpoints/a", "s3://bucket/a"]),
    "arena": TEXTS.map("/{}".format),
    "protect": st.sampled_from(["auto", "none", "node", "copy", "node,peer", "node, replica,peer"]),
    "layouts": st.sampled_from(["", "tp2pp2", "tp2pp2dp2,tp1, dp4ep2etp1cp2vpp2", "site.layouts:of"]),
}


def values_of(setting: Field[Any]) -> st.SearchStrategy[Any]:
    """All that a user may give."""
    meta, auto = setting.metadata, ["auto"] * bool(setting.metadata["auto"])
    if setting.name in OWN:
        return OWN[setting.name]
    if meta["choices"]:
        return st.sampled_from(meta["choices"])
    if meta["quantity"] is not None:
        return st.sampled_from(QUANTITIES[meta["quantity"]] + auto)
    if kind_of(setting) is int:
        numbers = st.integers(int(meta["minimum"]), meta["maximum"] or 1 << 40)
        return numbers | st.just("auto") if auto else numbers
    return {float: st.floats(1, 1e9), bool: st.booleans()}.get(type(setting.default), TEXTS)


@st.composite
def configs(draw: st.DrawFn) -> Config:
    settings = [setting for setting in fields(Config) if setting.name != "enabled"]
    values = {one.name: draw(values_of(one)) for one in settings if draw(st.booleans())}
    if not values.get("persist"):
        values.pop("persist_interval", None)
    if not str(values.get("persist", "")).startswith("/"):
        values.pop("persist_format", None)
    if values.get("restore_from"):
        values.pop("rollback_before", None)
    return Config(enabled=True, **values)


@given(configs(), st.lists(st.sampled_from(["--lr", "1e-4", "x", "--job=1", "-v", ""]), max_size=4))
def test_flags_and_json_of_any_configuration_build_an_equal_one(config: Config, others: list[str]) -> None:
    flags = config.flags()
    half = len(others) // 2
    assert Config.from_flags([*others[:half], *flags, *others[half:]]) == (config, others)
    assert Config.from_mapping({s.name: getattr(config, s.name) for s in fields(config)}) == config


def test_both_forms_of_a_flag_are_read_and_all_else_is_left() -> None:
    argv = "--lr 1 --ftckpt --ftckpt-interval 5 data --ftckpt-job=a --ftckpt-start-timeout-secs=2"
    config, rest = Config.from_flags(argv.split())
    assert config == Config(enabled=True, interval=5, job="a", start_timeout_secs=2.0)
    assert rest == ["--lr", "1", "data"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--ftckpt-intervall", "1"], "--ftckpt-intervall --ftckpt-interval"),
        (["--ftckpt", "--ftckpt-interval", "often"], "--ftckpt-interval often"),
        (["--ftckpt", "--ftckpt-slots=2", "--ftckpt-slots=2"], "--ftckpt-slots"),
        (["--ftckpt-interval=2"], "--ftckpt"),
    ],
)
def test_a_wrong_flag_is_refused(argv: list[str], message: str) -> None:
    with raises(ConfigError, *message.split()):
        Config.from_flags(argv)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("interval", 0, "interval 0 1"),
        ("persist_interval", "often", "persist_interval often"),
        ("mtbf", "node=40h", "mtbf node=40h 90s 40h"),
        ("slots", 1, "slots 1 2"),
        ("protect", "nodes", "protect nodes"),
        ("chunk_size", 0, "chunk_size 0 64KiB"),
        ("smp_rate", -0.1, "smp_rate -0.1 2GB/s 16Gbit/s"),
        ("network_rate", "2Gb/s", "network_rate 2Gb/s"),
        ("arena", "", "arena"),
        ("job", "a/b", "job a/b"),
        ("job", "..", "job"),
    ],
)
def test_a_wrong_value_is_refused_by_name(name: str, value: object, message: str) -> None:
    with raises(ConfigError, *message.split()):
        Config(**{name: value})


@pytest.mark.parametrize(
    ("give", "said"),
    [
        (lambda: Config(slots=1), "slots 1"),
        (lambda: section.merged({"slots": 1}), '"slots" 1'),
        (lambda: Config.from_flags(["--ftckpt", "--ftckpt-slots", "1"]), "--ftckpt-slots 1"),
        (lambda: Config(persist_format="universal"), "persist="),
        (lambda: section.merged({"persist_format": "universal"}), '"persist"'),
    ],
)
def test_settings_are_named_as_the_user_wrote_them(give: Callable[[], object], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        give()
    assert not lacks(str(raised.value), *said.split())


def test_paths_are_those_of_the_directory_in_which_the_job_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the script's working directory is when it names them, as under Hydra."""
    here = os.getcwd()
    monkeypatch.chdir(tmp_path)
    config = Config(persist="stored", events="e", arena="a", secret_file="s")
    assert [config.persist, config.events, config.arena, config.secret_file] == [
        f"{here}/{name}" for name in ("stored", "e", "a", "s")
    ]
    assert Config(persist="s3://bucket/a").persist == "s3://bucket/a"


@pytest.mark.parametrize(
    ("persist", "form", "message"),
    [
        ("", "universal", "persist_format persist="),
        ("s3://bucket/a", "megatron-dist", "persist_format"),
        ("foo:bar", "snapshot", "persist foo:bar"),
    ],
)
def test_a_format_that_cannot_lie_there_is_refused(persist: str, form: str, message: str) -> None:
    with raises(ConfigError, *message.split()):
        Config(persist=persist, persist_format=form)


@given(st.integers(65536, 1 << 40))
def test_a_chunk_is_the_most_whole_pages_that_its_size_holds(given_bytes: int) -> None:
    nbytes = Config(chunk_size=f"{given_bytes}B").chunk_bytes
    assert nbytes % 4096 == 0 and 4096 <= nbytes <= given_bytes < nbytes + 4096


def test_what_would_do_nothing_is_refused() -> None:
    assert Config.from_flags(["--ftckpt", "--ftckpt-persist=/a", "--ftckpt-persist-interval=auto"])[0].persist == "/a"
    with raises(ConfigError, "--ftckpt-persist-interval", "without --ftckpt-persist"):
        Config.from_flags(["--ftckpt", "--ftckpt-persist-interval", "10"])
    for flag in ("job", "persist"):
        for words in ([f"--ftckpt-{flag}", ""], [f"--ftckpt-{flag}="]):
            with raises(ConfigError, f"--ftckpt-{flag}"):
                Config.from_flags(["--ftckpt", *words])


def test_a_parser_with_the_flags_knows_them_all() -> None:
    parser = add_flags(argparse.ArgumentParser())
    text = parser.format_help()
    given = parser.parse_args(["--ftckpt", "--ftckpt-interval", "7", "--ftckpt-on-lost", "fresh"])
    assert (given.ftckpt, given.ftckpt_interval, given.ftckpt_on_lost) == (True, 7, "fresh")
    for setting in fields(Config):
        if setting.name != "enabled":
            flag = f"--ftckpt-{setting.name.replace('_', '-')}"
            assert re.search(rf"{flag}\s", text)
            assert getattr(given, f"ftckpt_{setting.name}") is not None


def test_texts_name_settings_by_their_flags() -> None:
    """``written`` turns those into what the user has written; the name of a field it cannot see."""
    fields_of_words = "|".join(setting.name for setting in fields(Config) if "_" in setting.name)
    bare = re.compile(rf"(?<![-\"\w.])(?:{fields_of_words})\b")
    package, found = Path(config_module.__file__).parent, []
    for path in package.rglob("*.py"):
        if path.name in ("config.py", "events.py"):  # the help of settings, and what pages say of events' fields
            continue
        source = path.read_text()
        if not bare.search(source):
            continue
        tree = ast.parse(source)
        documented = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and node not in documented]
        found += [
            f"{path.relative_to(package)}:{text.lineno}: {text.value}"
            for text in texts
            if isinstance(text.value, str) and " " in text.value.strip() and bare.search(text.value)
        ]
    assert not found


@pytest.mark.parametrize(
    ("call", "names"),
    [
        ("Config(enabled=True, slotz=2)", "slots"),
        ("Config(enabled=True, slots=1)", "slots"),
        ("Config.from_flags(['--ftckpt', '--ftckpt-slots', '1'])", "--ftckpt-slots"),
    ],
)
def test_a_wrong_configuration_ends_a_script_with_one_line(call: str, names: str) -> None:
    ended = run_python(f"import ftckpt; ftckpt.{call}")
    (line,) = ended.stderr.splitlines()
    assert ended.returncode == 1 and line.startswith("ftckpt: ") and names in line


# --- sizes, rates, times and counts as users write them ---


def test_sizes() -> None:
    texts = ("64MiB", "64MB", "1.5 GiB", "512KiB", "100B", "2kB", "1TiB", "0")
    assert [size(text) for text in texts] == [64 << 20, 64_000_000, 3 << 29, 512 << 10, 100, 2000, 1 << 40, 0]


def test_rates_of_bytes_and_of_bits() -> None:
    assert [rate(text) for text in ("2GB/s", "16Gbit/s", "500 MiB/s", "100Gbit/s", "0")] == [
        2e9, 2e9, 500 * 2**20, 12.5e9, 0.0,
    ]  # fmt: skip


def test_times_and_counts() -> None:
    assert [seconds(text) for text in ("500ms", "90s", "5min", "40h", "2d")] == [
        0.5,
        90.0,
        300.0,
        144_000.0,
        172_800.0,
    ]
    assert [counted(text) for text in ("34b", "34e9", "1.5t", "7B", "750m")] == [34e9, 34e9, 1.5e12, 7e9, 750e6]


@pytest.mark.parametrize(
    "text", ["", "64", "4 pounds", "64mb", "2g", "8Mbit", "2GB/s", "nan", "inf", "-1GiB", "1e3", "GiB", "0x"]
)
def test_what_is_no_size_is_told_how_to_be_written(text: str) -> None:
    with pytest.raises(ValueError, match="400GiB"):
        size(text)


@given(st.floats(1, 1e14))
def test_a_rate_in_words_is_read_as_it_was(bytes_per_sec: float) -> None:
    assert rate(in_words(bytes_per_sec)) == pytest.approx(bytes_per_sec, rel=0.0006)
