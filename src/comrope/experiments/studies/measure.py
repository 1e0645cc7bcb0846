"""What studies find out about a trained model, kept beside its run: weights are not always."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from comrope import analysis
from comrope.experiments.common.console import say
from comrope.experiments.common.distributed import create_accelerator
from comrope.experiments.common.errors import UserError
from comrope.experiments.common.files import write_text
from comrope.experiments.config import Config
from comrope.experiments.inspect import angle_elements, at_the_start, histogram
from comrope.experiments.runs.directory import WEIGHTS, read_result
from comrope.experiments.studies.paper.video import REVERSED, pair_of
from comrope.experiments.tasks.views import usual_view, views_of
from comrope.experiments.training.evaluate import accuracy, load_run, open_sources, validating

__all__ = ["OFFSETS", "SHARES", "is_at_hand", "look_beside"]

OFFSETS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)  # the paper's rho, in image widths
SHARES = (-0.25, 0.0, 0.25, 0.5, 1.0)  # 0: relative coordinates, 1: they count patches
DIGITS = 4  # of a frequency that is kept
EMBEDDED = ("digits", "moving")  # data that need no root


class Beside(NamedTuple):
    """A file beside a run, and how it is made of its weights; of its data too, if it ``looks``."""

    file: str
    make: Callable[[Config, Path], dict[str, Any]]
    looks: bool = False
    how: Callable[[Config], dict[str, Any]] = lambda _: {}  # whatever else it depends on

    def about(self, config: Config) -> dict[str, Any]:
        data = {"root": config.data.root, "crop_pct": config.augment.crop_pct}
        return {**(data if self.looks else {}), **self.how(config)}

    def known(self, config: Config, folder: Path, anywhere: bool) -> dict[str, Any] | None:
        """What was found out before about the same; with data from ``anywhere``, or from there."""
        file, about = folder / self.file, self.about(config)
        if not file.is_file():
            return None
        kept = json.loads(file.read_text())
        then = kept.get("about", {})
        if anywhere and self.looks:
            then = {**then, "root": about["root"]}
        return kept.get("found") if then == about else None

    def can_be_made(self, config: Config, folder: Path) -> bool:
        data = config.data
        there = data.name in EMBEDDED if data.root is None else Path(data.root).exists()
        return (folder / WEIGHTS).is_file() and (there or not self.looks)


def is_at_hand(study: str, config: Config, folder: Path, measure: bool) -> bool:
    """Whether a study finds what it wants of a run besides its result; or, if it may ``measure``,
    can find it out."""
    wanted = BESIDE.get(study)
    if wanted is None or wanted.known(config, folder, anywhere=True) is not None:
        return True
    return measure and wanted.can_be_made(config, folder)


def look_beside(
    study: str, config: Config, folder: Path, as_it_is: bool, progress: bool
) -> dict[str, Any]:
    """What a study wants of a run besides its result: found out, unless it is known of this data,
    or ``as_it_is`` of any."""
    wanted = BESIDE.get(study)
    if wanted is None:
        return {}
    found = wanted.known(config, folder, anywhere=as_it_is)
    if found is None:
        if progress:
            say(f"{study}: {folder.name}")
        found = wanted.make(config, folder)
        if create_accelerator(config.train.device).is_main_process:
            kept = {"about": wanted.about(config), "found": found}
            write_text(folder / wanted.file, json.dumps(kept) + "\n")
    return found


@contextlib.contextmanager
def _looking(config: Config, folder: Path) -> Iterator[Callable[..., dict[str, Any]]]:
    """A function of a view, and of what ``accuracy`` takes besides, to what it finds of a run."""
    model = load_run(folder)[1]
    accelerator = create_accelerator(config.train.device)
    model.to(accelerator.device)
    with validating(config, open_sources(config, train=False)[1], accelerator) as validation:

        def look(view: Any, **options: Any) -> dict[str, Any]:
            return accuracy(model, config, validation, view, accelerator, **options)

        yield look


def _moved(config: Config, folder: Path) -> dict[str, Any]:
    """Accuracy at the training resolution for every rho."""
    if config.model.position == "liere":  # an exponential for every image, token, head and block
        smaller = max(1, config.evaluate.batch_size // 8)
        config = config.with_overrides({"evaluate.batch_size": smaller})
    with _looking(config, folder) as look:
        usual = usual_view(config)
        return {"offset": {f"{r:g}": look(usual, offset=r)["top1"] for r in OFFSETS}}


def _in_other_units(config: Config, folder: Path) -> dict[str, Any]:
    """Accuracy at every resolution, by how far coordinates go over to counting patches."""
    with _looking(config, folder) as look:
        return {
            "units": {
                f"{share:g}": {
                    name: look(view, patch_units=share)["top1"]
                    for name, view in views_of(config).items()
                }
                for share in SHARES
            }
        }


def _shares_and_views(config: Config) -> dict[str, Any]:
    return {"shares": [*SHARES], "views": [*views_of(config)]}


def _both_ways(config: Config, folder: Path) -> dict[str, Any]:
    """What clips were taken for, as they are and from their last frame to their first."""
    result = read_result(folder)
    if result is None or pair_of(result["classes"]) is None:
        raise UserError(
            "data.root: expected two classes of which one is the other backwards, such as "
            f"{' and '.join(REVERSED[0])}; none are in {config.data.root}"
        )
    ways = {"forwards": False, "backwards": True}
    with _looking(config, folder) as look:
        usual = usual_view(config)
        found = {way: look(usual, backwards=turn)["taken_for"] for way, turn in ways.items()}
    return {"both_ways": found}


def _elements(config: Config, folder: Path) -> dict[str, Any]:
    """How the elements of all angle matrices are spread."""
    elements = angle_elements(load_run(folder)[1])
    return {"std": float(elements.std()), "histogram": histogram(elements)}


def _frequencies(config: Config, folder: Path) -> dict[str, Any]:
    """Of every plane of every layer, (layers, N, planes): at the start and after training."""
    return {"start": _spectra(at_the_start(config)), "learned": _spectra(load_run(folder)[1])}


def _spectra(model: nn.Module) -> list[list[list[float]]]:
    found = []
    for rope in analysis.rotary_modules(model).values():
        with torch.no_grad():
            _, frequencies = rope.spectrum()
        found.append([[float(f"{w:.{DIGITS}g}") for w in axis.flatten()] for axis in frequencies])
    return found


BESIDE = {
    "offset": Beside("offset.json", _moved, True, lambda _: {"rho": [*OFFSETS]}),
    "units": Beside("units.json", _in_other_units, True, _shares_and_views),
    "backwards": Beside("backwards.json", _both_ways, True),
    "distribution": Beside("angles.json", _elements),
    "angles": Beside("frequencies.json", _frequencies),
}
