"""Saved models: ``from_pretrained`` reads config.json and model.safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import torch

from comrope.models import ViT, create_model
from fuzz import oracles
from fuzz.folders import FolderTarget
from fuzz.judge import Answer, ask, require

__all__ = ["Fuzz"]

CONFIG, WEIGHTS = "config.json", "model.safetensors"
MOST_PIXELS = 2**14


def sum_again(case: Path) -> None:
    """Write the digest of the present weights."""
    config = json.loads(oracles.content_of(case / CONFIG))
    config["weights_sha256"] = oracles.digest_of(case / WEIGHTS)
    (case / CONFIG).write_text(json.dumps(config))


class Fuzz(FolderTarget):
    errors = (ValueError, FileNotFoundError)
    more: ClassVar[Any] = {"sum": sum_again}

    def create(self, folder: Path) -> None:
        torch.manual_seed(0)
        create_model("vit_nano_patch2_12", in_chans=1, num_classes=10, depth=1).save_pretrained(
            folder
        )

    def judge(self, case: Path) -> bool:
        with self.watched():
            answer = self.ask(lambda: ViT.from_pretrained(case), case)
            if not answer.accepted:
                return False
        _check_silent(answer, case)
        with self.watched():
            _check_forward(answer.value)
        return True


def _check_silent(answer: Answer, case: Path) -> None:
    config = json.loads(oracles.content_of(case / CONFIG))
    digest = config.get("weights_sha256")
    require(digest in (None, oracles.digest_of(case / WEIGHTS)), "silent: changed weights")
    state = answer.value.state_dict()
    require(oracles.equal(state, oracles.read_tensors(case / WEIGHTS)), "silent: other weights")
    require(oracles.finite(list(state.values())), "silent: weights that are not finite")
    own = json.loads(json.dumps(answer.value.arguments(), default=list))
    for name, value in config["arguments"].items():
        if name in own:  # not an earlier name
            same = own[name] == value or _per_axis(own[name], value)
            require(same, "silent: another argument", f"{name}: {value!r} became {own[name]!r}")


def _per_axis(own: Any, value: Any) -> bool:
    """Return whether a list has one number for all axes."""
    return isinstance(own, list) and own == [value] * len(own)


def _check_forward(model: ViT) -> None:
    """Require finite outputs for an image of the training size, if that is small."""
    arguments = model.arguments()
    size = arguments["img_size"]
    shape = (arguments["in_chans"], *((size, size) if isinstance(size, int) else size))
    if torch.Size(shape).numel() > MOST_PIXELS:
        return
    inputs = torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(1, *shape)
    dtype = next(model.parameters()).dtype
    with torch.inference_mode():
        outputs = ask(lambda: model(inputs.to(dtype)), names=["img_size"], errors=()).value
    require(outputs.shape[0] == 1, "an output of another shape", outputs.shape)
