"""The twin's figures of a slow bus stand beside measured ones, also where nothing was measured."""

from __future__ import annotations

import pytest

pytest.importorskip("benchmarks", reason="the scripts are only in a checkout")

from benchmarks.slow_bus_tables import twin_table


def test_what_was_not_measured_has_no_deviation() -> None:
    one = {"auto": {"ready": {"mean": 10.0}}}
    setup = {"rank": 64, "requests_per_s": 9, "policies": {"auto": {"ttft_ms": {"mean": 20.0}}}}
    burst = {"auto": {"mean": 200.0}}
    measured = {"6 GB/s": {"results": {"idle": {"32 tokens": one}, "burst": burst, "setups": {"S3": setup}}}}
    predicted = {
        "idle": {"32 tokens": {"auto": 11.0}},
        "burst": {"auto": 100.0},
        "setups": {"S2": {"auto": 15.0}, "S3": {"auto": 18.0}},
    }
    lines = twin_table(measured, {"ttft_mean_ms": {"6 GB/s": predicted}}).splitlines()
    assert [line.split(" | ")[-1] for line in lines[-4:]] == [
        "11.0 ms (+10%) |",
        "100.0 ms (-50%) |",
        "15.0 ms |",
        "18.0 ms (-10%) |",
    ]
