"""Exported models compute what the model computes, at any batch and size, or are not there."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from support import gpts
from support.runs import tiny
from torch import nn

from comrope.experiments import export as exporting
from comrope.experiments.common.errors import UserError
from comrope.experiments.config import to_yaml
from comrope.experiments.export import export
from comrope.experiments.runs.directory import write_finished
from comrope.experiments.tasks import task_of
from comrope.experiments.training.evaluate import load_run
from comrope.models import GPT, ViT, create_model
from comrope.models.export import Exportable


def nano(**options) -> ViT:
    options = {"num_classes": 10, "depth": 1, **options}
    model = create_model("vit_nano_patch8_32", **options).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def error_of(run, model: ViT, batch: int, *grid: int) -> float:
    sizes = [p * g for p, g in zip(model.patches.patch_size, grid, strict=True)]
    x = torch.randn(batch, model.patches.in_chans, *sizes)
    with torch.no_grad():
        expected = model(x)
        return float((run(x) - expected).abs().max() / expected.abs().max())


def onnx_session(path: Path, name: str = "x"):
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda x: torch.from_numpy(session.run(None, {name: x.numpy()})[0])


# Two of each kind would take minutes: AP is a line as LD is, RoPE-Mixed has planes as RoPE has.
@pytest.mark.slow
@pytest.mark.parametrize("position", ["comrope-ld", "comrope-torus", "rope", "liere", "ape"])
def test_onnx_computes_what_the_model_computes(position, tmp_path):
    pytest.importorskip("onnxscript")
    onnx = pytest.importorskip("onnx")
    values = {"rotate_values": position in ("comrope-ld", "liere")}
    model, out = nano(position=position, **values), tmp_path / "new" / "model.onnx"
    model.save_pretrained(tmp_path / "saved")
    said = export(tmp_path / "saved", "onnx", out)
    assert said.path == out
    assert said.error < 1e-5
    run = onnx_session(out)
    for batch, grid in ((1, (4, 4)), (3, (4, 4)), (2, (7, 3)), (1, (2, 9)), (1, (1, 1))):
        assert error_of(run, model, batch, *grid) <= 1e-5, (batch, grid)
    content = onnx.load(out)
    onnx.checker.check_model(content, full_check=True)
    shape = content.graph.input[0].type.tensor_type.shape.dim
    assert [d.dim_param or d.dim_value for d in shape] == ["batch", 3, "8*rows", "8*columns"]
    assert {node.domain for node in content.graph.node} == {""}
    assert not content.functions
    assert b"site-packages" not in out.read_bytes()  # nor any other path of this machine
    assert sorted(p.name for p in out.parent.iterdir()) == ["model.onnx"]


@pytest.mark.parametrize(
    ("options", "grids"),
    [
        pytest.param(
            {
                "position": "comrope-torus", "img_size": (4, 8, 8), "patch_size": (4, 4, 2),
                "global_pool": "avg", "class_token": False, "rotate_values": True,
            },
            [(1, 2, 4), (1, 5, 3)],
            marks=pytest.mark.slow,
        ),
        (
            {
                "position": "liere", "img_size": (32,), "patch_size": (4,), "ape": True,
                "class_position": "unrotated", "channel_order": "half", "rotate_values": True,
            },
            [(8,), (11,)],
        ),
    ],
)  # fmt: skip
def test_torch_export_computes_what_the_model_computes(options, grids, tmp_path, command):
    model, out = nano(**options), tmp_path / "model.pt2"
    model.save_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / "preprocessing.json").write_text('{"mean": [0.5]}')
    code, said = command("export", tmp_path / "saved", "--to", "torch-export", "--out", out)
    assert code == 0
    assert float(said.removeprefix(f"torch-export: {out}, largest relative error ")) < 1e-5
    notes = {"preprocessing.json": ""}
    program = torch.export.load(out, extra_files=notes)
    assert json.loads(notes["preprocessing.json"]) == {"mean": [0.5]}
    for batch in (1, 3):
        for grid in grids:
            assert error_of(program.module(), model, batch, *grid) <= 1e-5, (batch, grid)
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert not [name for name in called if "comrope" in name or "linalg" in name or "wrap" in name]
    content = out.read_bytes()
    assert b"site-packages" not in content
    assert b"stack_trace" not in content


@pytest.mark.slow
@pytest.mark.parametrize("to", ["onnx", "torch-export"])
@pytest.mark.parametrize(
    ("position", "options"),
    [
        (
            "comrope-torus",
            {"rotate_values": True, "num_kv_heads": 2, "attention_temperature": "log"},
        ),
        ("liere", {"share_rotations": "layers", "channel_order": "half", "tie_embeddings": False}),
        ("none", {}),
    ],
)
def test_a_language_model_for_any_batch_and_length(to, position, options, tmp_path):
    if to == "onnx":
        pytest.importorskip("onnxscript")
    model, out = gpts.nano(position, dtype=torch.float32, **options), tmp_path / "model"
    out = out.with_suffix(exporting.FORMATS[to])
    model.save_pretrained(tmp_path / "saved")
    assert export(tmp_path / "saved", to, out).error < 1e-5
    run = onnx_session(out, "tokens") if to == "onnx" else torch.export.load(out).module()
    for shape in ((1, 1), (1, 2), (3, gpts.CONTEXT), (2, 3 * gpts.CONTEXT)):
        tokens = gpts.text(*shape)
        with torch.no_grad():
            expected = model(tokens)
            error = (run(tokens) - expected).abs().max() / expected.abs().max()
        assert error < 1e-5, shape


@pytest.fixture
def run(tmp_path) -> Path:
    """What a finished run leaves, without the training."""
    config = tiny()
    weights = task_of(config).build_model().state_dict()
    write_finished(tmp_path / "run", to_yaml(config), weights, {})
    return tmp_path / "run"


def test_a_run_becomes_a_folder_to_load_from(run, tmp_path, command):
    code, said = command("export", run, "--to", "safetensors", "--out", tmp_path / "model")
    assert (code, said) == (0, f"safetensors: {tmp_path / 'model'}\n")
    model = ViT.from_pretrained(tmp_path / "model")
    x = torch.randn(2, 1, 12, 16)
    _, trained = load_run(run)
    assert torch.equal(model(x), trained(x))
    notes = json.loads((tmp_path / "model" / "preprocessing.json").read_text())
    assert notes["mean"] == [0.306]
    assert notes["crop_pct"] == 1.0


class Wrong(nn.Module):
    """Right at the size that the model was trained at, and nowhere else."""

    def __init__(self, model: ViT) -> None:
        super().__init__()
        self.model = Exportable(model)

    def forward(self, x):
        return self.model(x) * (1 + (x.shape[-1] - 32) * 1e-3)


def test_a_saved_language_model(tmp_path, command):
    model = gpts.nano()
    model.save_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / "preprocessing.json").write_text('{"tokenizer": "bytes"}')
    out = tmp_path / "model"
    assert command("export", tmp_path / "saved", "--to", "safetensors", "--out", out)[0] == 0
    tokens = gpts.text()
    assert torch.equal(GPT.from_pretrained(out)(tokens), model(tokens))
    assert json.loads((out / "preprocessing.json").read_text()) == {"tokenizer": "bytes"}


def test_what_differs_is_not_left_behind(tmp_path, command, monkeypatch):
    nano().save_pretrained(tmp_path / "saved")
    monkeypatch.setattr(exporting, "Exportable", Wrong)
    out = tmp_path / "out" / "model.pt2"
    out.parent.mkdir()
    out.write_text("what was there before")
    code, said = command("export", tmp_path / "saved", "--to", "torch-export", "--out", out)
    assert code == 1
    assert "(2, 3, 40, 48)" in said  # the size at which it is wrong
    assert out.read_text() == "what was there before"
    assert list(out.parent.iterdir()) == [out]


def test_mistakes_are_one_line(tmp_path, command):
    saved, empty = tmp_path / "saved", tmp_path / "empty"
    nano().save_pretrained(saved)
    empty.mkdir()
    (empty / "pytorch_model.bin").write_bytes(b"code")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()
    for source, to, out, argument in (
        (saved, "tensorrt", "a.onnx", "to"),
        (saved, "onnx", "a.pt2", "out"),
        (saved, "torch-export", "a", "out"),
        (saved, "safetensors", "run", "out"),
        (tmp_path / "no", "torch-export", "a.pt2", "run"),
        (empty, "torch-export", "a.pt2", "run"),  # a pickle
        (tmp_path / "run", "torch-export", "a.pt2", "run"),  # not finished
    ):
        code, said = command("export", source, "--to", to, "--out", tmp_path / out)
        assert code == 2
        assert said.startswith(f"comrope: {argument}: ")
        assert len(said.strip().splitlines()) == 1
    assert not list(tmp_path.glob("a*"))


def test_a_package_that_is_missing_is_named(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "onnxscript" else find(name)
    )
    with pytest.raises(UserError, match=r"^to: .*onnxscript.*comrope\[export\]"):
        export(tmp_path, "onnx", tmp_path / "a.onnx")
