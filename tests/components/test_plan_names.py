"""Names that ``ftckpt plan`` knows, its flags, and published cases of what losses leave."""

from __future__ import annotations

import json
import math
import shlex
from typing import Any

import pytest

from ftckpt.cli.main import main
from ftckpt.cli.plan_names import CLUSTERS, MODELS
from ftckpt.config import Config
from tests.support.errors import lacks


def planned_json(capsys: pytest.CaptureFixture[str], arguments: str) -> dict[str, Any]:
    main(["plan", *arguments.split(), "--json"])
    value: dict[str, Any] = json.loads(capsys.readouterr().out)
    return value


@pytest.mark.parametrize(("nodes", "group"), [(16, 2), (6, 6), (12, 6), (16, 4)])
def test_the_published_cases_of_gemini_and_reft(nodes: int, group: int, capsys: pytest.CaptureFixture[str]) -> None:
    """A group survives one node: of pairs of lost nodes those in different groups. GEMINI (SOSP'23) has 93.3 % for 16
    nodes in groups of 2, REFT (arXiv 2310.12670) the form for groups with one parity block each."""
    words = f"--zero 3 --params 1b --gpus-per-node 2 --nodes {nodes} --tp 1 --protect peer --peer-group {group}"
    rows = {row["lost"]: (row["survived"], row["cases"]) for row in planned_json(capsys, words)["failures"]}
    cases = math.comb(nodes, 2)
    assert rows["one node"] == (nodes, nodes)
    assert rows["any two nodes"] == (cases - nodes // group * math.comb(group, 2), cases)


JOB = "--model llama3-70b --cluster dgx-h100 --nodes 8 --tp 8 --pp 4"


def test_names_stand_for_their_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    model, cluster = MODELS["llama3-70b"], CLUSTERS["dgx-h100"]
    named = planned_json(capsys, JOB)
    assert (named["ranks"], named["state"]["bytes"]) == (64, model.params * 12)
    assert named["verdict"]["node_memory"] == cluster.node_bytes == 2 * 10**12
    assert named["network_limit"]["bytes_per_sec"] == 0.25 * 400e9 / 8
    words = (
        f"--params {model.params} --gpus-per-node 8 --nodes 8 --tp 8 --pp 4 --node-memory 2TB --network-rate 12.5GB/s"
    )
    given = planned_json(capsys, words)
    for part in ("failures", "memory_per_node", "network_bytes"):
        assert given[part] == named[part]
    other = planned_json(capsys, f"{JOB} --params 8b --node-memory 1TB --network-rate 1GB/s")
    assert other["state"]["bytes"] == 96e9 and other["network_limit"]["bytes_per_sec"] == 1e9
    assert other["verdict"]["node_memory"] == 10**12


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--model llama3-70b --cluster dgx-h100 --tp 3 --dp 8", "--tp 3 8192"),
        ("--model llama3-8b --cluster dgx-h100 --pp 64", "--pp 64 32"),
        ("--model llama3-8b", "--gpus-per-node --cluster"),
        ("--cluster dgx-h100", "--params --model"),
        ("--model llama9 --cluster dgx-h100", "--model llama9"),
    ],
)
def test_what_names_cannot_be_is_refused(capsys: pytest.CaptureFixture[str], arguments: str, text: str) -> None:
    assert main(["plan", *arguments.split()]) == 2
    assert not lacks(capsys.readouterr().err, *text.split())


@pytest.mark.parametrize(
    "settings", ["", "--protect peer --slots 4 --persist /there", "--persist-rate 2GB/s --mtbf 40h"]
)
def test_the_last_line_has_the_flags_of_the_job(capsys: pytest.CaptureFixture[str], settings: str) -> None:
    assert main(["plan", *f"{JOB} {settings}".split()]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    config, rest = Config.from_flags(shlex.split(last.removeprefix("flags: ")))
    words = settings.split()
    chosen = {flag[2:].replace("-", "_"): value for flag, value in zip(words[::2], words[1::2], strict=True)}
    assert config.enabled and not rest
    assert all(str(getattr(config, name)) == value for name, value in chosen.items())
    assert config.flags() == Config(enabled=True, **{n: getattr(config, n) for n in chosen}).flags()
