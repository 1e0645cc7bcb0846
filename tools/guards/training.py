"""G4: the final weights of short trainings, bit for bit, on one thread of a CPU."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from guards.tree import api, bytes_digest, config_of, fingerprint

__all__ = ["observe"]

TRAIN = ("experiments.training.train", "experiments.train")
# Run -> recipe, the run it starts from, and fields; one epoch each.
RUNS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "digits ape": ("digits", "", {"model__position": "ape", "train__perturbation": 0.0}),
    "digits comrope-ld": ("digits", "", {"model__position": "comrope-ld"}),
    "digits liere": ("digits", "", {"model__position": "liere"}),
    "digits_patch4 ape": ("digits_patch4", "", {"evaluate__resolutions": [24]}),
    "moving comrope-ld": ("moving", "", {"evaluate__frames": [], "evaluate__spans": []}),
    "scenes comrope-ld": (
        "scenes", "digits_patch4 ape",
        {"evaluate__resolutions": [], "train__batch_size": 16, "train__precision": "bf16"},
    ),
    "digits_finetune comrope-ld": ("digits_finetune", "digits ape", {}),
}  # fmt: skip


def observe() -> dict[str, Any]:
    """Return run -> digest of its weights and the figures of its evaluation."""
    import torch

    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (recipe, start, fields) in RUNS.items():
            found[name] = _run(Path(folder), name, recipe, start, fields)
    return {**found, "machine": fingerprint()}


def _run(folder: Path, name: str, recipe: str, start: str, fields: dict[str, Any]) -> str:
    from safetensors.torch import load_file

    train = api("train", *TRAIN)
    fields = {"train__epochs": 1, "evaluate__resolutions": [12], **fields}
    if start:
        fields["train__start_from"] = str(folder / start)
    config = config_of(recipe, **fields)
    result = train(config, folder / name, progress=False)
    tensors = load_file(folder / name / "model.safetensors")
    parts = []
    for key in sorted(tensors):
        parts += [key.encode(), tensors[key].contiguous().view(-1).float().numpy().tobytes()]
    figures = result[_headline(config)]
    return f"{bytes_digest(*parts)} {[round(x, 4) for x in figures.values()]}"


def _headline(config: Any) -> str:
    """Return the metric that a result is read for; in earlier trees the configuration has it."""
    if hasattr(config, "headline"):
        return str(config.headline)
    return str(api("task_of", "experiments.tasks")(config).headline)
