"""How long the network takes for a target, as it is allowed to, and as it was seen to."""

from __future__ import annotations

import pytest

from ftckpt.smp.link import MARGIN, NetworkLimit, TransferForecast

LIMIT = NetworkLimit(1e9, "the test")
WEEK_SECS = 7 * 86400.0


def test_a_target_may_take_a_multiple_of_what_its_bytes_need() -> None:
    assert TransferForecast(96_000_000_000, LIMIT, WEEK_SECS).wait_secs == MARGIN * 96
    assert TransferForecast(96_000_000_000, NetworkLimit(0.0, "any"), WEEK_SECS).wait_secs == 0
    assert TransferForecast(0, LIMIT, WEEK_SECS).wait_secs == 0
    assert TransferForecast(96_000_000_000, LIMIT, 100.0).wait_secs == 100, "a failure is due by then"


def test_a_link_that_is_slower_than_the_limit_is_waited_for() -> None:
    forecast = TransferForecast(10_000, NetworkLimit(1000.0, "the test"), WEEK_SECS)
    forecast.begin(0)
    for second in range(6):
        forecast.note(100 * second, 50.0 + second)
    assert forecast.wait_secs == MARGIN * 10, "so little says nothing of the rest"
    for second in range(6, 8):
        forecast.note(100 * second, 50.0 + second)
    assert forecast.wait_secs == pytest.approx(MARGIN * 100)
    for second in range(1000):
        forecast.note(700, 60.0 + second)
    assert forecast.wait_secs == pytest.approx(MARGIN * 100), "nothing more comes: that is no reason to wait longer"
    forecast.begin(700)
    forecast.note(700, 5000.0)
    assert forecast.wait_secs == pytest.approx(MARGIN * 100), "the next one begins with what the last one showed"
    for second in range(6):
        forecast.note(700 + 5000 * second, 6000.0 + second)
    assert forecast.wait_secs == MARGIN * 10, "the link is free again"


def test_what_is_never_in_time_is_said_with_a_rate_that_is() -> None:
    assert LIMIT.too_slow(10**12, 1000.0) is None
    fault = LIMIT.too_slow(10**12, 100.0)
    assert fault is not None and "16.7 min" in fault[0] and fault[1] == "--ftckpt-network-rate 40GB/s"
    assert NetworkLimit(0.0, "any").too_slow(10**12, 100.0) is None
