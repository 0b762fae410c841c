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


def test_what_does_not_hold_is_told() -> None:
    good = {name: 1.0 for name in ("checksum of a chunk / xxh3, raw", "xor encode / xor of two arrays")}
    assert parity.verdict(good) == []
    assert parity.verdict(good | {"rs encode, m=2 / pyeclib": 0.99}) == [
        "rs encode, m=2 / pyeclib: 0.99 is below 1.00"
    ]
    assert len(parity.verdict(dict.fromkeys(good, 0.7))) == 2
