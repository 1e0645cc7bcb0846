"""The README is true: its code runs, its table is that of the committed results."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import documents
import pytest
import torch

import comrope

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_code_runs():
    scope = {}
    exec(code_blocks()[0], scope)
    assert scope["out"].shape == (2, 12, 197, 64)


def test_the_code_for_models_that_exist_runs():
    """But for the weights, which would be fetched."""
    timm = pytest.importorskip("timm")
    code = code_blocks()[1].replace("pretrained=True", "depth=1")
    torch.manual_seed(0)
    scope = {"comrope": comrope, "timm": timm, "seen": []}
    image = torch.randn(1, 3, 224, 224)
    for line in code.strip().splitlines():
        exec(line, scope)
        scope["seen"].append(scope["model"].eval()(image))
    torch.testing.assert_close(scope["seen"][1], scope["seen"][0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(scope["seen"][2], scope["seen"][0], rtol=1e-4, atol=1e-5)


def code_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_table_is_that_of_the_results_file():
    path, table = re.search(
        r"<!-- rotation: (\S+) -->\n(.*?)<!-- end -->", README, re.DOTALL
    ).groups()
    result = json.loads((ROOT / path).read_text())
    assert load(ROOT / "benchmarks/rotation.py").markdown(result) in table
    machine = result["machine"]
    for fact in (machine["cpu"], f"torch {machine['torch'].split('+')[0]}", machine["date"]):
        assert fact in table


@pytest.mark.parametrize("document", documents.DOCUMENTS)
def test_tables_are_those_of_the_results_files(document):
    text = (ROOT / document).read_text()
    assert documents.MARKED.search(text)
    assert documents.fill(text) == text, "python tests/documents.py writes them anew"


@pytest.mark.parametrize("document", sorted(ROOT.glob("*.md")) + sorted(ROOT.glob("docs/*.md")))
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


def test_the_example_ends_with_a_table_and_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "similarity.png"
    command = [sys.executable, str(ROOT / "examples/similarity.py"), "--out", str(picture)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "comrope-torus" in out
    assert picture.stat().st_size > 50_000


def test_make_demo_is_the_command_that_the_readme_names():
    assert (
        "$(BIN)/comrope reproduce classification --preset demo" in (ROOT / "Makefile").read_text()
    )
