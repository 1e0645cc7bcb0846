"""Networks around a rotation are checked and compared with the network without positions."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.benches import TINY

from comrope.experiments.bench.networks import attention, vit
from comrope.experiments.bench.runner import FAILURES, run_part

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("quick_bench")]


@pytest.mark.parametrize("make", [attention, pytest.param(vit, marks=pytest.mark.slow)])
def test_networks_are_checked_and_compared_with_none(make):
    setting = replace(TINY, rounds=1)
    rows = run_part(make(setting), setting)
    assert not any(row["status"] in FAILURES for row in rows)
    named = {row["name"]: row for row in rows}
    assert named["none"]["measures"]["step"]["of"]["none"] == 1
    for row in rows:
        if row["status"] != "not installed":
            assert row["error"] <= row["limit"]
            assert row["measures"]["forward"]["of"]["none"] > 0
    assert named["comrope-ld"]["ran"] == "spectral"
    if make is vit:
        of = named["timm RoPE-Mixed, whole model"]["measures"]["step"]["of"]
        assert set(of) == {"none", "vanilla", "timm APE"}
