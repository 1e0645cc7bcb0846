"""Tables and figures of measured rows."""

from __future__ import annotations

import pytest
import torch
from support.benches import TINY, fake, fake_part

from comrope.experiments.bench.report import described_machine, draw, print_tables
from comrope.experiments.bench.runner import Candidate, run_part

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("quick_bench")]


def missing():
    raise ModuleNotFoundError("No module named 'theirs'", name="theirs")


@pytest.fixture
def rows():
    part = fake_part(
        fake("none"),
        fake("ours", backend="auto"),
        fake("ours", compiled=True),
        fake("wrong", error=0.5),
        Candidate("theirs", missing, "rope"),
    )
    return run_part(part, TINY)


def test_a_table_has_times_ratios_and_what_is_left_out(rows, capfd):
    print_tables(rows)
    lines = capfd.readouterr().out.splitlines()
    (ours,) = (line for line in lines if "ours" in line and "compiled" not in line)
    timed = next(row for row in rows if row["name"] == "ours")["measures"]["forward"]
    assert f"{timed['ms']:.3g} ±" in ours
    assert f"{timed['of']['none']:.2f} /" in ours
    (wrong,) = (line for line in lines if "wrong" in line)
    assert "5.0e-01" in wrong
    assert any("theirs" in line and "not installed" in line for line in lines)


def test_a_figure_is_drawn_of_parts_with_times_only(rows, tmp_path):
    results = {"rows": rows, "machine": described_machine(torch.device("cpu")),
               "setting": {"compile": True}}  # fmt: skip
    draw(results, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    untimed = [row for row in rows if not row["measures"]]
    draw({**results, "rows": untimed}, tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_the_machine_is_described():
    about = described_machine(torch.device("cpu"))
    for key in ("device", "torch", "triton", "timm", "transformers", "date", "commit", "dirty"):
        assert key in about
    assert about["cuda"] is about["driver"] is None
