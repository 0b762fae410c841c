"""A short campaign of random faults, and that its judge sees what it must see."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import fault_campaign
from benchmarks.campaign_damage import Job
from benchmarks.campaign_job import Ended, KnownState, Trouble
from benchmarks.fault_campaign import judge
from ftckpt.model.lineage import FIRST
from ftckpt.parity.modes import Modes
from tests.support.pool import RankResult

pytestmark = [pytest.mark.multiproc, pytest.mark.faults]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 39])
def test_a_short_campaign(seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "campaign.json"
    code = fault_campaign.main(["--trials", "4", "--seed", str(seed), "--json", str(output)])
    result = json.loads(output.read_text())
    assert code == 0, capsys.readouterr().out
    assert (result["wrong"], result["hung"], result["leaked"]) == (0, 0, 0) and result["bad"] == []
    assert result["resumed"] + result["refused"] == 4
    assert {"drift", "back", "fork"} <= result["faults"].keys()


def job(whole: int, protected: int, *lost: str, doubts: tuple[int, int] = (0, 0)) -> Job:
    sealed = {f"dp{rank}": {whole - 2, whole - 1, whole} for rank in range(2)}
    head = FIRST.doubt(*doubts)
    return Job(Path("/nowhere"), [], Modes(), whole, protected, set(lost), sealed=sealed, head=head)


def ended(start: int | None, *wrong: str) -> list[RankResult]:
    return [RankResult(rank, 0, Ended(start, wrong)) for rank in range(2)]


def failed(text: str | None, code: int = 1) -> list[RankResult]:
    return [RankResult(0, code, None, text), RankResult(1, 0, Ended(3, ()))]


REFUSED = "Traceback\nftckpt.errors.LostError: iteration 9 was committed and cannot be restored: no arena of dp0"


@pytest.mark.parametrize(
    ("results", "memory", "kind"),
    [
        (ended(9), job(9, 7), "resumed"),
        (ended(8), job(9, 7), "wrong"),
        (ended(None), job(-1, -1), "resumed"),
        (ended(None), job(9, -1, "dp0"), "wrong"),
        (ended(9, "shared"), job(9, 7), "wrong"),
        ([ended(9)[0], ended(8)[1]], job(8, 7), "wrong"),
        (failed(REFUSED), job(9, -1, "dp0"), "refused"),
        (failed(REFUSED), job(9, 7), "wrong"),
        (failed("Traceback\nValueError: x"), job(9, -1, "dp0"), "wrong"),
        (failed(None, -9), job(9, -1, "dp0"), "hung"),
        (ended(9), job(9, 7, doubts=(8, 9)), "wrong"),
        (ended(7), job(9, 7, doubts=(8, 9)), "wrong"),
        (failed(REFUSED), job(9, 7, doubts=(8, 9)), "wrong"),
        (failed(REFUSED), job(9, 7, doubts=(2, 9)), "refused"),
    ],
)
def test_the_judge(results: list[RankResult], memory: Job, kind: str) -> None:
    found, _, _ = judge(results, memory)
    assert found == kind


def events(name: str, **fields: int) -> list[dict[str, object]]:
    return [{"event": name, "rank": rank, **fields} for rank in range(2)]


DRIFT = Trouble("drift", 20, 0, "flip")


def test_after_a_drift_each_has_its_own_and_a_mixture_has_nothing_else() -> None:
    own, other = (KnownState(rank, 2, DRIFT) for rank in range(2))
    own.advance(21), other.advance(21)
    assert own.wrong(21) == () and own.wrong(20) != ()
    own.shared.copy_(other.shared)
    assert own.wrong(21) == ("shared",) and own.wrong(21, mixes=True) == ()
    own.shared[0] += 1
    assert own.wrong(21, mixes=True) == ("shared",)
