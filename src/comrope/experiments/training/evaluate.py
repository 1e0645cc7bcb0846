"""Evaluation of models and of finished runs, in any view and with any probe."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from rich.progress import Progress
from torch import nn

from comrope.experiments.common.console import progress_bar, say
from comrope.experiments.common.distributed import create_accelerator
from comrope.experiments.common.errors import UserError
from comrope.experiments.common.memory import shortage_reported
from comrope.experiments.config import Config
from comrope.experiments.data.batches import Validation
from comrope.experiments.data.workers import start_server
from comrope.experiments.runs.directory import CONFIG, WEIGHTS, read_weights
from comrope.experiments.tasks import Task, task_of
from comrope.experiments.tasks.base import NO_PROBE, Probe
from comrope.experiments.tasks.init_from import load_weights

__all__ = ["evaluate_run", "evaluate_view", "in_file", "load_run"]


def load_run(folder: Path, *, sealed: bool = True) -> tuple[Config, nn.Module]:
    """Return the configuration of a finished run, and its model with the evaluated weights.

    Args:
        folder: The folder of the run.
        sealed: Whether to raise if its files have changed since it was finished.
    """
    config, tensors = read_weights(folder, sealed=sealed)
    with in_file(folder / CONFIG):
        model = task_of(config).build_model()
    load_weights(model, tensors, str(folder / WEIGHTS))
    return config, model.eval()


@contextlib.contextmanager
def in_file(file: Path) -> Iterator[None]:
    """Add the name of a configuration's file to the errors about its fields within the block."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{file}: {error}") from None


def evaluate_view(
    task: Task,
    model: nn.Module,
    validation: Validation,
    view: Any,
    accelerator: Accelerator,
    *,
    bar: Progress,
    label: str,
    probe: Probe = NO_PROBE,
    check: Callable[[], Any] = lambda: None,
) -> dict[str, Any]:
    """Evaluate a model in one view, with a row in a progress bar; name skipped samples once.

    Args:
        task: The task of the model.
        model: The model, on its device.
        validation: This process's share of the validation set.
        view: The view.
        accelerator: Of this process.
        bar: The progress bar.
        label: Name of the view in the progress bar.
        probe: Change of the coordinates.
        check: Called after every batch; may raise.

    Returns:
        The metrics.
    """
    total = len(validation)
    row = bar.add_task(label, total=total, note="")

    def advance(samples: int) -> None:
        check()
        bar.advance(row, samples)

    named = len(validation.unreadable)
    found = task.evaluate(model, validation, view, accelerator, probe=probe, advance=advance)
    for name in [*validation.unreadable][named:]:
        say(f"skipped, cannot be read: {name}")
    if (value := found[task.headline]) is not None and not math.isfinite(value):
        raise UserError(
            f"{label}: expected a finite {task.headline}, got {value}; check that the outputs of "
            "the model are finite"
        )
    bar.update(row, completed=total, note=task.format_value(found[task.headline]))
    return found


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
    """Evaluate a finished run in every view, at every offset.

    Args:
        folder: The folder of the run.
        overrides: Fields to change, as in ``Config.with_overrides``.
        data: Short for ``data.root``.
        resolutions: Sizes to evaluate at; by default the views of the configuration.
        only: The names of some of these views; by default all.
        offsets: Standard deviations of a shift of every sample, in image widths.
        progress: Show a progress bar.

    Returns:
        An entry for every view and offset: "view", the fields of the view, "offset", and metrics.
        Empty in all processes except the main one.
    """
    trained, model = load_run(folder)
    config = trained.with_overrides(overrides)
    if data is not None:
        config = config.with_overrides({"data.root": data})
    task = task_of(config)
    if type(task) is not type(task_of(trained)):
        raise UserError(f"task: cannot be changed in evaluation; the run is of {config.task!r}")
    task.check_evaluation(trained)
    start_server(config.data.workers)
    accelerator = create_accelerator(config.train.device)
    views = task.views(resolutions)
    views = {name: view for name, view in views.items() if only is None or name in only}
    probes = [Probe(offset) for offset in offsets]
    for view in views.values():
        task.check_view(model, view)
    task.try_transforms(views.values(), train=False)
    for probe in probes:
        task.check_probe(model, probe)
    source = task.open(train=False).validation
    model.to(accelerator.device)
    found = []
    share = {"process": accelerator.process_index, "processes": accelerator.num_processes}
    with (
        shortage_reported("a smaller evaluate.batch_size or smaller resolutions need less"),
        contextlib.closing(task.validation(source, **share)) as validation,
        progress_bar(progress and accelerator.is_main_process, task.samples) as bar,
    ):
        for name, view in views.items():
            for probe in probes:
                offset = f", rho {probe.offset:g}" if probe.offset else ""
                entry = evaluate_view(
                    task,
                    model,
                    validation,
                    view,
                    accelerator,
                    bar=bar,
                    label=task.format_view(name) + offset,
                    probe=probe,
                )
                found.append({"view": name, **view._asdict(), **probe._asdict(), **entry})
    return found if accelerator.is_main_process else []
