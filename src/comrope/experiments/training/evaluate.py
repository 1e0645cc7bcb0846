"""Accuracy of a model: at any resolutions, with the image where it is or moved."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from comrope.experiments.common.console import progress_bar
from comrope.experiments.common.distributed import autocast, create_accelerator, reshard, total
from comrope.experiments.common.errors import UserError
from comrope.experiments.common.randomness import generator, seed_everything
from comrope.experiments.config import TIMM, Config
from comrope.experiments.data.batches import IGNORED, Normalize, Validation
from comrope.experiments.data.images import Source, open_sources
from comrope.experiments.data.workers import start_server
from comrope.experiments.runs.directory import WEIGHTS, read_weights
from comrope.experiments.tasks.build import Adopted, adopt, init_of
from comrope.experiments.tasks.views import View, check_views, resolution_of, said, views_of
from comrope.experiments.training.state import load_model
from comrope.models import ViT, create_model

__all__ = [
    "accuracy",
    "build_model",
    "compile_blocks",
    "evaluate_run",
    "load_run",
    "validating",
    "vit_of",
]

FEW = 32  # classes, of which it is told what was taken for what


def build_model(config: Config) -> ViT:
    """The model of a configuration, as it starts: a function of the configuration alone."""
    seed_everything(config.train.seed, "start")
    model, options = config.model, {}
    if model.name.startswith(TIMM):
        return cast(ViT, adopt(config))  # it has what is asked of a ViT here
    if model.position not in ("ape", "none"):
        names = ("block_size", "init", "spread", "base")
        options = {name: getattr(model, name) for name in names}
        options["init"] = init_of(model)
    if config.data.frames:
        size = resolution_of(config)
        patch = int(model.name.split("_patch")[1].split("_")[0])
        options |= {"img_size": (config.data.frames, *size)}
        options |= {"patch_size": (model.tubelet, patch, patch)}
    try:
        vit = create_model(
            model.name,
            axis_scale=model.axis_scale or None,
            position=model.position,
            ape=model.ape,
            rotate_values=model.rotate_values,
            locality_bias=model.locality_bias,
            position_units=model.position_units,
            class_token=model.class_token,
            class_position=model.class_position,
            global_pool=model.global_pool,
            drop_path_rate=model.drop_path_rate,
            layer_scale=model.layer_scale,
            num_classes=config.data.num_classes,
            in_chans=config.data.in_chans,
            **options,
        )
    except ValueError as error:
        raise UserError(f"model: {error}") from None
    if not config.detects:
        return vit
    from comrope.experiments.tasks.detection import build_detector

    seed_everything(config.train.seed, "heads")  # the same on top of every method
    return cast(ViT, build_detector(config, vit))


def vit_of(model: Any) -> ViT:
    """The ViT that a model is, or that a detector has inside."""
    return cast(ViT, model.backbone.plain.vit if hasattr(model, "backbone") else model)


def compile_blocks(model: nn.Module, dynamic: bool | None = None) -> None:
    """Compile the blocks rather than the whole: one compilation serves them all."""
    blocks = list(cast(Iterable[nn.Module], model.blocks))
    for block in blocks:
        block.compile(dynamic=dynamic)
    # The blocks share their code; each rate of drop path needs a compilation of its own.
    torch._dynamo.config.recompile_limit += 4 * len(blocks)


def load_run(folder: Path) -> tuple[Config, ViT]:
    """A finished run: its configuration and its model with the weights that were evaluated."""
    config, tensors = read_weights(folder)
    model = build_model(config)
    load_model(model, tensors, str(folder / WEIGHTS))
    return config, model.eval()


@torch.compiler.set_stance("force_eager")  # every resolution would be compiled anew
@torch.inference_mode()
def accuracy(
    model: ViT,
    config: Config,
    validation: Validation,
    view: View,
    accelerator: Accelerator,
    *,
    offset: float = 0.0,
    patch_units: float = 0.0,
    backwards: bool = False,
    advance: Callable[[int], Any] = lambda images: None,
) -> dict[str, Any]:
    """Top-1 in percent, how many images that is of, and what was taken for what, if there are few
    classes: counts, a row a class.

    ``offset`` is the paper's rho: the coordinates of every image, class token included, are moved
    by N(0, rho^2) image widths along each axis, each image by its own, drawn from a fixed seed.
    ``patch_units`` as ``ViT.token_positions`` takes it. ``backwards``, clips begin with their last
    frame.
    """
    if isinstance(model, Adopted) and (offset or patch_units):
        raise UserError(
            f"{'offsets' if offset else 'patch_units'}: a model of timm finds its positions itself;"
            " they cannot be moved"
        )
    device, classes = accelerator.device, config.data.num_classes
    normalize = Normalize(config, device)
    correct, count = torch.zeros((), device=device), torch.zeros((), device=device)
    taken = torch.zeros(classes if classes <= FEW else 0, classes, device=device)
    moves = torch.randn(len(validation), model.num_axes, generator=generator("offset"))
    unreadable: list[str] = []
    was_training = model.training
    model.eval()
    for number, batch in enumerate(validation.batches(view)):
        if batch.fatal:
            raise UserError(batch.fatal)
        unreadable += batch.unreadable
        images = normalize(batch.images)
        images = images.flip(2) if backwards else images  # (batch, channels, time, ...)
        targets = batch.targets.to(device)
        place = _places(model, images, view, patch_units)
        if offset:  # however the images are put into batches
            first = (number * accelerator.num_processes + accelerator.process_index) * len(targets)
            own = torch.arange(first, first + len(targets)).clamp(max=len(validation) - 1)
            place = place + offset * moves[own][:, None].to(place)
        with autocast(config.train.precision, device):
            found = model(images, place).argmax(-1)
        correct += (found == targets).sum()
        count += (targets != IGNORED).sum()
        if len(taken):
            known = targets != IGNORED
            taken.index_put_((targets[known], found[known]), torch.ones_like(taken[0, 0]), True)
        advance(len(targets) * accelerator.num_processes)
    reshard(model)
    model.train(was_training)
    right, seen, skipped = total(accelerator, correct, count, float(len(unreadable)))
    if not seen:
        raise UserError(f"data.root: no validation image can be read, such as {unreadable[0]}")
    result: dict[str, Any] = {"top1": 100 * right / seen, "images": seen, "unreadable": skipped}
    if len(taken):
        counts = [int(n) for n in total(accelerator, *taken.flatten())]
        result["taken_for"] = [counts[i : i + classes] for i in range(0, len(counts), classes)]
    return result


@contextlib.contextmanager
def validating(config: Config, source: Source, accelerator: Accelerator) -> Iterator[Validation]:
    """This process's part of a validation set, for any number of evaluations."""
    validation = Validation(
        config, source, rank=accelerator.process_index, world=accelerator.num_processes
    )
    try:
        yield validation
    finally:
        validation.close()


def _places(model: ViT, images: Tensor, view: View, patch_units: float = 0.0) -> Tensor:
    """Where the tokens are. A part of a video takes less time: as much less as it is shorter."""
    grid = model.patches.grid_shape(images.shape[2:])
    place = model.token_positions(grid, patch_units)
    if view.span == 1:
        return place
    time = 0.5 + view.span * (place[:, :1] - 0.5)
    return torch.cat((time, place[:, 1:]), dim=1)


def evaluate_run(
    folder: Path,
    *,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    data: str | None = None,
    resolutions: Sequence[int] | None = None,
    only: Sequence[str] | None = None,
    offsets: Sequence[float] = (0.0,),
    progress: bool = True,
) -> list[dict[str, Any]]:
    """Figures of a finished run, in every view and at every offset; empty but in the main process.

    Of all views of the configuration, unless some ``resolutions`` are given, or names, ``only``.
    """
    from comrope.experiments.tasks.base import objective_of

    trained, model = load_run(folder)
    config = trained.with_overrides(overrides)
    if data is not None:
        config = config.with_overrides({"data.root": data})
    if config.model != trained.model or config.data.frames != trained.data.frames:
        raise UserError("model: cannot be changed in evaluation; the weights are those of the run")
    if config.data.holdout not in (0.0, trained.data.holdout):
        raise UserError(
            f"data.holdout: expected {trained.data.holdout:g}, as it was trained, or 0, the usual "
            f"validation set, got {config.data.holdout:g}: it was trained on some of those images"
        )
    start_server(config.data.workers)
    accelerator = create_accelerator(config.train.device)
    views = views_of(config, resolutions)
    views = {name: view for name, view in views.items() if only is None or name in only}
    check_views(model, views.values())
    source = open_sources(config, train=False)[1]
    model.to(accelerator.device)
    objective = objective_of(config, accelerator)
    found = []
    with (
        validating(config, source, accelerator) as validation,
        progress_bar(progress and accelerator.is_main_process, "images") as bar,
    ):
        for view_name, view in views.items():
            for offset in offsets:
                name = said(view_name) + (f", rho {offset:g}" if offset else "")
                task = bar.add_task(name, total=len(source), note="")
                advance = partial(bar.advance, task)
                entry = objective.evaluate(model, validation, view, advance, offset)
                note = f"{entry[config.headline]:.2f} %"
                bar.update(task, completed=len(source), note=note)
                entry = {"view": view_name, **view._asdict(), "offset": offset, **entry}
                found.append(entry)
    return found if accelerator.is_main_process else []
