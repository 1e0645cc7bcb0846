"""README and docs/results.md: their code runs, their numbers are those of committed files."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import comrope

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
RESULTS = (ROOT / "docs/results.md").read_text()
TIMES = "\u00d7"
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read(name: str) -> dict:
    return json.loads((ROOT / "benchmarks/results" / name).read_text())


def compiled_step_times() -> dict[str, str]:
    """Compiled training steps of the whole ViT-B, in times of the model without positions."""
    rows = [row for row in read("bench-h200.json")["rows"] if row["suite"] == "vit"]
    part = rows[-1]["part"]
    return {
        row["name"]: f"{row['measures']['step']['of']['none']:.2f}"
        for row in rows
        if row["part"] == part and row["compiled"] and row["measures"]
    }


def test_the_layer_runs_and_trains():
    scope = {}
    exec(BLOCKS[0], scope)
    out = scope["out"]
    assert out.shape == (2, 197, 768)
    out.square().mean().backward()
    scope["optimizer"].step()


def test_swap_and_fold_run_and_keep_the_outputs():
    """As in the README, without the download of weights."""
    pytest.importorskip("timm")
    code = BLOCKS[1].replace("pretrained=True", "depth=1")
    assert code != BLOCKS[1]
    torch.manual_seed(0)
    scope, seen = {}, {}
    image = torch.randn(1, 3, 224, 224)
    for line in filter(None, code.splitlines()):
        exec(line, scope)
        if "model" in scope:
            seen[line.partition("(")[0]] = scope["model"].eval()(image)
    calls = ("model = timm.create_model", "comrope.swap", "comrope.fold")
    first, swapped, folded = (seen[call] for call in calls)
    torch.testing.assert_close(swapped, first, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(folded, first, rtol=1e-4, atol=1e-5)


def test_every_python_block_is_run_above():
    assert len(BLOCKS) == 2


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 140


def test_the_table_of_methods_has_measured_numbers():
    from comrope.experiments.studies.study import PUBLISHED

    found = re.findall(r"\| `([\w-]+)` \|.*\| ([\d,]+) \| ([\d.]+) \|", README)
    times = compiled_step_times()
    assert {method for method, _, _ in found} == {*PUBLISHED} - {"ape"}
    for method, parameters, time in found:
        layer = comrope.RotaryEmbedding(method, num_heads=12, head_dim=64, block_size=8)
        assert f"{sum(p.numel() for p in layer.parameters()):,}" == parameters, method
        assert times[method] == time, method


def test_the_speed_that_is_claimed_was_measured():
    times = compiled_step_times()
    (eager,) = (
        row["measures"]["step"]["of"]["none"]
        for row in read("bench-h200.json")["rows"]
        if row["suite"] == "vit" and row["name"] == "comrope-ld, Algorithm 1" and row["measures"]
    )
    text = " ".join(README.split())
    assert f"takes {times['comrope-ld']}{TIMES} the time of a model without positions" in text
    assert f"Vanilla RoPE takes {times['vanilla RoPE, plain PyTorch']}{TIMES}" in text
    assert f"Algorithm 1 takes {eager:.2f}{TIMES}" in text


def test_the_cost_in_the_table_of_the_paper_was_measured():
    from comrope.experiments.studies import STUDIES

    cells = STUDIES["cost"].table(read("cost-h200-eager.json"))
    rows = [
        line.split(" | ") for line in cells.splitlines() if "| ComRoPE" in line and "e-0" in line
    ]
    ours = sorted(row[3] for row in rows)
    theirs = sorted(row[7] for row in rows)
    assert f"training {ours[0]} to {ours[-1]}{TIMES} vanilla RoPE" in README
    assert f"the paper has {theirs[0]} to {theirs[-1]}{TIMES}" in README


def test_what_to_expect_is_what_was_measured():
    pytest.importorskip("timm")
    model = comrope.create_model("vit_nano_patch4_32", position="comrope-ld", num_classes=10)
    assert f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} million" in README
    offset = RESULTS.partition("<!-- reproduce offset --preset tiny -->")[2]
    loss = re.search(r"\| LieRE .* \| ([\d.]+) \|\n", offset)[1]
    assert f"LieRE loses up to {float(loss):.1f} points" in README
    for method in ("ComRoPE-AP", "ComRoPE-LD", "comrope-torus (all commuting)"):
        over = rf"\| {re.escape(method)} \| vanilla RoPE, patch units \| 1 \| 5 \|.*"
        (row,) = re.findall(over, RESULTS)
        assert row.count("undecided") == 2, method


def test_conclusions_quote_intervals_of_the_tables_below_them():
    """Every difference with an interval in the first part of the text is in one of the tables."""
    marked = re.compile(r"<!-- reproduce .*?<!-- end -->", re.DOTALL)
    tables = "".join(marked.findall(RESULTS))
    conclusions = marked.sub("", RESULTS.partition("## Which position encoding is best")[0])
    intervals = re.findall(r"[+-]\d\.\d\d \[[+-]\d\.\d\d, [+-]\d\.\d\d\]", conclusions)
    assert len(intervals) > 8
    for interval in intervals:
        assert interval in tables, interval


@pytest.mark.parametrize("document", sorted(ROOT.glob("*.md")) + sorted(ROOT.glob("docs/**/*.md")))
def test_local_links_lead_somewhere(document):
    for target in re.findall(r"\]\((?!http)([^)#]+)", document.read_text()):
        assert (document.parent / target).exists(), target


def test_the_benchmark_refuses_a_speed_when_parity_fails(monkeypatch, capsys):
    rotation = load(ROOT / "benchmarks/rotation.py")
    monkeypatch.setattr(rotation, "METHODS", ("comrope-ld",))
    monkeypatch.setattr(rotation.Layer, "parity", lambda self, backend: float("nan"))
    monkeypatch.setattr(sys, "argv", ["rotation.py", "--batch=1", "--tokens=2", "--heads=1"])
    with pytest.raises(SystemExit, match="parity checks failed"):
        rotation.main()
    assert "no speed is reported" in capsys.readouterr().out


@pytest.mark.slow
def test_the_example_ends_with_a_table_and_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "similarity.png"
    command = [sys.executable, str(ROOT / "examples/similarity.py"), "--out", str(picture)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "comrope-torus" in out
    assert picture.stat().st_size > 50_000


def test_the_make_commands_of_the_readme_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    assert "$(BIN)/comrope reproduce classification --preset demo" in makefile
