"""The benchmark of parity runs, leaves nothing behind, and says so where a claim does not hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import parity


def test_a_tiny_run(arena_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "result.json"
    argv = ["--json", str(out), "--mib", "1", "--repeats", "2", "--quick", "--arena", str(arena_root)]
    assert parity.main(argv) == 0
    assert list(arena_root.iterdir()) == []
    printed = capsys.readouterr().out
    result = json.loads(out.read_text())
    assert result["benchmark"] == "parity" and result["repeats"] == 2 and result["chunk_mib"] == 1
    assert {"hardware", "versions", "command", "date"} <= result["environment"].keys()
    for name, rate in result["rates"].items():
        assert 0 < rate["least"] <= rate["median"] <= rate["most"] and name in printed
    for name, case in result["smp"].items():
        assert 0 < case["least"] <= case["median"] <= case["most"] and name in printed
    assert set(result["ratios"]) <= {line.split("  ")[0] for line in printed.splitlines()}


def test_parity_takes_a_fraction_of_a_mirrors_memory_for_the_same_guarantees() -> None:
    cases = {case["protection"]: case for case in parity.memory_cases()}
    for name, mirror in parity.BESIDE.items():
        case = cases[name]
        assert case["guaranteed"] == cases[mirror]["guaranteed"]
        expected = 1 / (parity.NODES - 1)
        assert case["memory_over_state"] == pytest.approx(expected, rel=1e-4)
        assert cases[mirror]["memory_over_state"] == pytest.approx(1, rel=1e-4)
        assert case["memory_over_mirror"] == pytest.approx(expected, rel=1e-4)
    assert cases["peer rs, m=2"]["memory_over_state"] == pytest.approx(2 / (parity.NODES - 2), rel=1e-4)
    assert "any two nodes" in cases["peer rs, m=2"]["guaranteed"]
    assert "one node" not in cases["node xor"]["guaranteed"]


def test_shares_of_cores_follow_from_the_rates() -> None:
    names = ("checksum of a chunk", "xor, one pass", "rs row 0, one pass", "rs row 1, one pass")
    rates = {name: {"median": 2.0} for name in names}
    cases = {(case["protection"], case["node_gb"]): case for case in parity.core_cases(rates)}
    case = cases["checksums", 64.0]
    assert case["core_secs_per_snapshot"] == pytest.approx(32.0)
    assert case["share_of_a_core"] == pytest.approx(3.2)
    assert case["share_of_the_node"] == pytest.approx(3.2 / parity.NODE_CORES)
    assert cases["checksums, node", 6.4]["core_secs_per_snapshot"] == pytest.approx(6.4)
    assert cases["checksums, node, peer rs m=2", 6.4]["core_secs_per_snapshot"] == pytest.approx(12.8)


def test_what_does_not_hold_is_told() -> None:
    good = {name: 1.0 for name in ("checksum of a chunk / xxh3, raw", "xor encode / xor of two arrays")}
    assert parity.verdict(good) == []
    assert parity.verdict(good | {"rs encode, m=2 / pyeclib": 0.99}) == [
        "rs encode, m=2 / pyeclib: 0.99 is below 1.00"
    ]
    assert len(parity.verdict(dict.fromkeys(good, 0.7))) == 2
