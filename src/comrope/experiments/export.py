"""Export a trained model: to ONNX, torch.export, or a folder for ``from_pretrained``.

An exported program is run and compared with the model at two sizes before its file is written.
"""

from __future__ import annotations

import importlib.util
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram

from comrope._files import write_files, write_text
from comrope._json import NUMBER, TEXT, Entries, Items, is_unicode
from comrope.analysis import rotary_modules
from comrope.experiments.common.errors import UserError
from comrope.experiments.common.json_files import read_json
from comrope.experiments.common.messages import shown
from comrope.experiments.runs.directory import CONFIG
from comrope.experiments.tasks import task_of
from comrope.experiments.training.evaluate import load_run
from comrope.models import GPT, ViT
from comrope.models.export import Exportable
from comrope.models.pretrained import architecture_of
from comrope.models.transformer import RotaryTransformer

__all__ = ["FORMATS", "Differs", "Exported", "export"]

FORMATS = {"onnx": ".onnx", "torch-export": ".pt2", "safetensors": ""}
OPSET = 20  # the first with GELU; supported since ONNX Runtime 1.17
TOLERANCE = 1e-4
NOTES = "preprocessing.json"  # in the folder of saved weights, and inside exported files
SCHEMA = Entries(
    optional={
        "mean": Items(NUMBER),
        "std": Items(NUMBER),
        "interpolation": TEXT,
        "crop_pct": NUMBER,
    }
)
LARGEST_ONNX = 3 * 2**29  # bytes; larger models need a separate file of weights
MODELS: dict[str | None, type[RotaryTransformer]] = {"ViT": ViT, "GPT": GPT}

Notes = dict[str, Any]
Run = Callable[[Tensor], Tensor]


class Exported(NamedTuple):
    """The exported file or folder, and its largest relative error; None for a folder."""

    path: Path
    error: float | None


class Differs(Exception):
    """The exported program differs from the model; its file was removed."""


def export(source: Path, to: str, out: Path) -> Exported:
    """Export the model of a finished run, or a model saved by ``save_pretrained``.

    Args:
        source: The folder.
        to: "onnx" or "torch-export", in float32, for any batch and any size of at least two patches
            per axis or two tokens; "safetensors", for ``from_pretrained``.
        out: A file, or with "safetensors" a folder.

    Raises:
        Differs: The exported program differs from the model.
        UserError: An argument is invalid, or the model cannot be exported.
    """
    if to not in FORMATS:
        raise UserError(f"to: expected one of {', '.join(FORMATS)}, got {to!r}")
    _check_place(to, out)
    if to == "onnx":
        _check_installed("onnx", "onnxscript", "onnxruntime")
    model, notes = _load(source)
    if to == "safetensors":
        return _export_folder(model, notes, out)
    model = model.float()
    for rope in rotary_modules(model).values():
        rope.backend = "auto"  # the comparison runs on a CPU
    out.parent.mkdir(parents=True, exist_ok=True)
    return (_export_onnx if to == "onnx" else _export_torch)(model, notes, out)


def _check_place(to: str, out: Path) -> None:
    if to == "safetensors":
        if out.is_file() or (out / CONFIG).exists():
            raise UserError(f"out: expected a folder without other files, got {out}")
    elif out.suffix != FORMATS[to] or out.is_dir():
        raise UserError(f"out: expected a file that ends in {FORMATS[to]}, got {out}")
    elif not is_unicode(str(out)):  # the exporters require UTF-8
        raise UserError(f"out: expected a path in UTF-8, got {shown(str(out))}")


def _check_installed(*packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise UserError(
                f"to: onnx needs {package}, which is not installed: pip install 'comrope[export]'"
            )


def _load(source: Path) -> tuple[RotaryTransformer, Notes]:
    """Return a model, and the preprocessing of its inputs if known."""
    if (source / CONFIG).is_file():
        config, model = load_run(source)
        task = task_of(config)
        if not isinstance(model, RotaryTransformer):
            found = f"{type(model).__name__} of the task {task.name}"
            raise UserError(f"run: expected a model of comrope, {source} has a {found}")
        return model, task.preprocessing()
    if not source.is_dir():
        raise UserError(f"run: expected the folder of a run or of a saved model, got {source}")
    try:
        kind = MODELS.get(architecture_of(source), ViT)
        return kind.from_pretrained(source), _read_notes(source / NOTES)
    except (ValueError, FileNotFoundError) as error:
        raise UserError(f"run: {error}") from None


def _read_notes(path: Path) -> Notes:
    try:
        notes: Notes = read_json(path, SCHEMA, "export the run again")
    except FileNotFoundError:
        return {}
    return notes


def _export_folder(model: RotaryTransformer, notes: Notes, out: Path) -> Exported:
    model.save_pretrained(out)
    if notes:
        text = json.dumps(notes, indent=2) + "\n"
        write_text(out / NOTES, text)
    return Exported(out, None)


def _export_torch(model: RotaryTransformer, notes: Notes, out: Path) -> Exported:
    program, worst = _program(model), 0.0

    def write(path: Path) -> None:
        nonlocal worst
        buffer = io.BytesIO()  # with a path, torch would write its name into the file
        torch.export.save(program, buffer, extra_files={NOTES: json.dumps(notes)})
        path.write_bytes(buffer.getbuffer())
        worst = _compare(model, torch.export.load(path).module(), str(out))

    write_files({out: write})
    return Exported(out, worst)


def _export_onnx(model: RotaryTransformer, notes: Notes, out: Path) -> Exported:
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    if size > LARGEST_ONNX:
        raise UserError(f"to: expected at most {LARGEST_ONNX} bytes for onnx, the model has {size}")
    made = torch.onnx.export(
        _program(model),
        dynamo=True,
        opset_version=OPSET,
        input_names=[model.input_name],
        output_names=["logits"],
        dynamic_shapes=_dynamic(model),  # for their names
        verbose=False,
    )
    assert made is not None
    for node in made.model.graph:
        node.metadata_props.clear()  # paths of this machine
    made.model.metadata_props[NOTES] = json.dumps(notes)
    worst = 0.0

    def write(path: Path) -> None:
        nonlocal worst
        made.save(path)
        worst = _compare(model, _onnx_runtime(path, model.input_name), str(out))

    write_files({out: write})
    return Exported(out, worst)


def _program(model: RotaryTransformer) -> ExportedProgram:
    """Trace a model in strict mode; otherwise argument checks would get symbolic numbers."""
    example = model.example_input(2)
    with torch.no_grad():
        program = torch.export.export(
            Exportable(model), (example,), dynamic_shapes=_dynamic(model), strict=True
        )
        program = program.run_decompositions({})  # one flat graph for inference
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # paths of this machine
    return program


def _dynamic(model: RotaryTransformer) -> dict[str, dict[int, Any]]:
    """Return the dynamic sizes: batch, and those of the model."""
    sizes = {
        dimension: Dim(name, min=2) if unit == 1 else unit * Dim(name, min=2)
        for dimension, (name, unit) in model.dynamic_sizes().items()
    }
    return {"x": {0: Dim("batch"), **sizes}}


@torch.no_grad()
def _compare(model: RotaryTransformer, run: Run, name: str) -> float:
    """Return the largest relative error at the training size and at a larger one."""
    random, worst = torch.Generator().manual_seed(0), 0.0
    for batch, more in ((1, 0), (2, 1)):
        x = model.example_input(batch, more, generator=random)
        expected = model(x)
        error = float((run(x) - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
        if not error <= TOLERANCE:  # also for NaN
            raise Differs(
                f"{name}: differs from the model by {error:.1e} at {tuple(x.shape)}, more than "
                f"{TOLERANCE:.0e}; it was removed"
            )
        worst = max(worst, error)
    return worst


def _onnx_runtime(path: Path, name: str) -> Run:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda x: torch.from_numpy(session.run(None, {name: x.numpy()})[0])
