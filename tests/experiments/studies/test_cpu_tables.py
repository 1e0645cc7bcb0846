"""Tables and the figure of the benchmark on CPUs."""

from __future__ import annotations

from pathlib import Path

from support.studies import table_lines

from comrope.experiments.common.figures import save
from comrope.experiments.studies.bench_tables import bench_table
from comrope.experiments.studies.cpu_tables import growth, sizes_figure, sizes_title

MACHINE = {"device": "CPU", "torch": "2+cpu", "threads": 2, "date": "2026-01-01"}


def row(suite, name, ms, compiled=False, part="a part (batch 4, float32)", of=None, **more):
    of = of or {}
    measure = {"ms": ms, "of": {k: v[1] for k, v in of.items()}, "of_runs": of}
    return {"suite": suite, "part": part, "name": name, "compiled": compiled, "error": 1e-7,
            "measures": {"forward": measure, "step": measure}, "peak_of": {"none": 1.5},
            "peak_mib": 1.0, **more}  # fmt: skip


def results(*rows):
    return {"rows": rows, "machine": MACHINE, "preset": "cpu", "setting": {"runs": 3}}


def test_a_layer_has_the_median_and_the_range_of_the_repetitions():
    of = {"timm RoPE-Mixed": [0.4, 0.5, 0.75], "timm axial": [0.9, 1.0, 1.1]}
    other = "a part (batch 4, bfloat16)"
    text = bench_table("layer", results(row("layer", "rope", 2.0, of=of),
                                        row("layer", "rope", 2.0, True, part=other)))  # fmt: skip
    header, _, line, against = table_lines(text)
    assert header == [
        "float32, eager",
        "float32, compiled",
        "bfloat16, eager",
        "bfloat16, compiled",
    ]
    assert line == ["rope", "0.50 (0.40–0.75)", "–", "–", "–"]
    assert against[:2] == ["rope ÷ timm axial RoPE", "1.00 (0.90–1.10)"]
    assert "Median of 3 repetitions" in text


def test_steps_are_relative_to_none_and_those_of_timm_to_its_ape():
    of = {"none": [1.0, 1.04, 1.1], "timm APE": [1.0, 1.02, 1.03]}
    large = "a part (batch 16, float32)"
    rows = [row("step", name, 1.0, part=part, of=of)
            for part in ("a part (batch 4, float32)", large)
            for name in ("none", "timm RoPE-Mixed, whole model")]  # fmt: skip
    lines = table_lines(bench_table("step", results(*rows)))
    assert lines[0][2:] == ["step, batch 4, eager", "compiled", "step, batch 16, eager", "compiled",
                            "peak memory of a step"]  # fmt: skip
    assert lines[-1][:2] == ["timm RoPE-Mixed ÷ timm APE", "1.02 (1.00–1.03)"]
    assert lines[2][-1] == "1.50"
    for name in ("step", "sizes"):
        assert "Not run yet" in bench_table(name, results())


def test_a_decoded_token_has_a_time_and_a_ratio():
    found = bench_table("decode", results(row("decode", "rope", 2.5, of={"none": [1, 1.25, 1.5]})))
    assert ["rope", "2.50", "1.25 (1.00–1.50)", "1e-07"] in table_lines(found)


def test_growth_is_of_the_time_per_token(tmp_path: Path):
    base = {"tokens": 10, "heads": 2, "block_size": 8, "axes": 2, "batch": 1}
    found = [
        row("sizes", name, ms * tokens, sizes=base | {"tokens": tokens})
        for name in ("comrope-ld", "rope-mixed", "copy of q and k")
        for tokens, ms in ((10, 1.0), (100, 1.5))
    ]
    found += [row("sizes", "comrope-ld", 12.0, sizes=base | {"heads": heads}) for heads in (4, 1)]
    kept = results(*found)
    assert growth(kept, "comrope-ld") == (10, 100, 1.5)
    assert "From 10 to 100 tokens" in sizes_title(kept)
    lines = table_lines(bench_table("sizes", kept))
    assert ["tokens, 10 to 100", "rope-mixed", "500000", "750000", "1.50", "0.10"] in lines
    save(sizes_figure(kept), tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
