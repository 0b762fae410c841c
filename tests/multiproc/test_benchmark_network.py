"""The benchmark of the network runs where namespaces can be made, and its goal can be missed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import network

pytestmark = pytest.mark.multiproc


@pytest.mark.slow
def test_a_small_size(tmp_path: Path) -> None:
    status = network.main(["--quick", "--json", str(tmp_path / "out.json")])
    if status == network.NO_NAMESPACES:
        pytest.skip("making a network takes root, and iproute2")
    assert status == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert [row["mode"] for row in found["rows"]] == list(network.MODES)
    assert all(row["protected_per_min"] > 0 for row in found["rows"][1:])
    [profile] = found["cases"]["profile"]
    assert all(smp["idle"] for smp in profile["smps"]), "both SMPs have learnt when training is quiet"
    assert all(0.3 < sum(end - begin for begin, end in smp["idle"]) < 0.9 for smp in profile["smps"])
    rates = {(one["links"], one["connections"]): one["bytes_per_sec"] for one in found["rates"]}
    assert rates[2, 4] > 1.3 * rates[2, 1], "chunks go over both links"


def test_bursts_that_take_longer_are_told() -> None:
    alone, slower = {"burst_secs": [1.0, 1.1, 0.9]}, {"burst_secs": [1.05, 1.5, 1.0]}
    assert network.slow_down(slower, alone) == pytest.approx(0.05)
