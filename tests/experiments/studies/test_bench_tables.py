"""Tables of documents from files of benchmarks; test_report compares the documents."""

from __future__ import annotations

from support.studies import table_lines

from comrope.experiments.studies.bench_tables import bench_table

MACHINE = {"device": "GPU", "torch": "1", "triton": "3", "date": "2026-01-01", "cores": 2}


def test_a_suite_has_eager_and_compiled_rows_side_by_side():
    def row(name, compiled, ratio):
        measures = {key: {"of": {"none": ratio}} for key in ("forward", "step")}
        return {"suite": "vit", "part": "a ViT", "name": name, "compiled": compiled,
                "measures": measures, "peak_of": {"none": 1.0}}  # fmt: skip

    rows = [row("none", True, 1.0), row("ours", False, 1.5), row("ours", True, 1.25)]
    text = bench_table("vit", {"rows": rows, "preset": "full", "machine": MACHINE})
    assert ["ours", "1.50", "1.25", "1.50", "1.25", "1.00"] in table_lines(text)
    assert ["none", "–", "1.00", "–", "1.00", "1.00"] in table_lines(text)
    assert "a ViT, in times of *none*" in text


def test_speed_in_training_is_compared_with_vanilla_rope():
    rows = [{"method": "liere", "images_per_second": 1234.5, "of_vanilla": 0.5}]
    text = bench_table("training", {"rows": rows, "machine": MACHINE, "command": "x", "model": "m"})
    assert ["LieRE", "1,234", "0.50"] in table_lines(text)


def test_precision_is_that_of_float32_positions_beside_the_worst_of_float64():
    def row(positions, *scores):
        return {"method": "liere", "init": "rope", "positions": positions, "scores": scores,
                "lengths": [1e-7, 3e-6]}  # fmt: skip

    rows = [row("float32", 1e-6, 2e-2), row("float64", 4e-8, 3e-8)]
    text = bench_table("precision", {"rows": rows, "distances": [1, 1000], "machine": MACHINE})
    header, _, line = table_lines(text)
    assert header[2:] == ["1e+00", "1e+03", "length", "float64 positions"]
    assert line == ["`liere`", "rope", "1e-06", "2e-02", "3e-06", "4e-08"]
