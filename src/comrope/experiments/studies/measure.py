"""Finished runs of a study: find them, measure them, and gather them into rows."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from comrope._json import NUMBER, TEXT, Entries, Nullable
from comrope.experiments.common.console import say
from comrope.experiments.common.distributed import create_accelerator
from comrope.experiments.common.errors import UserError
from comrope.experiments.common.files import write_text
from comrope.experiments.common.json_files import check_json
from comrope.experiments.config import Config
from comrope.experiments.runs.directory import RESULT, TO_RESTORE, WEIGHTS, headline_of
from comrope.experiments.runs.records import Record
from comrope.experiments.runs.store import FolderStore, RunStore
from comrope.experiments.studies.study import Measurement, Results, Row, Study
from comrope.experiments.studies.tables import spread
from comrope.experiments.tasks import task_of
from comrope.experiments.tasks.base import NO_PROBE, Probe
from comrope.experiments.training.evaluate import load_run
from comrope.experiments.training.verify import verify_run

__all__ = [
    "Evaluation",
    "Finished",
    "NoRuns",
    "Runs",
    "evaluating",
    "gather_row",
    "gather_study",
    "measure_run",
    "newest_machine",
    "usable",
]

NEEDED = Entries(  # what rows use of a result
    {
        "data_root": Nullable(TEXT),
        "machine": Entries(dict.fromkeys(("device", "torch", "date"), TEXT)),
    }
)
FEW = 2  # up to so many missing rows of one name are listed one by one


class NoRuns(UserError):
    """No run of a study is finished."""


class Finished(NamedTuple):
    """A finished run: its configuration in the plan of a study, and its record."""

    config: Config
    record: Record


class Runs:
    """The finished runs that a study uses: those in its folder, then those of a store.

    Args:
        folder: The folder of the study's own runs.
        known: A store of more runs, without weights.
    """

    def __init__(self, folder: Path, known: RunStore | None = None) -> None:
        self.folder, self.trained, self.known = folder, FolderStore(folder), known
        self.verified: set[Path] = set()

    def path(self, config: Config) -> Path:
        """Return the folder of one of the study's own runs."""
        return self.trained.folder(config)

    def find(self, config: Config) -> Record | None:
        """Return a run if it is finished and evaluated in every view of its configuration."""
        task = task_of(config)
        for store in (self.trained, self.known):
            record = None if store is None else store.find(config)
            if record is None:
                continue
            found = headline_of(record.result, task.headline, _origin(record))
            if set(task.views()) <= set(found):
                self._verify(record)
                return record
        return None

    def _verify(self, record: Record) -> None:
        """Check the files of a run once."""
        if record.folder is not None and record.folder not in self.verified:
            verify_run(record.folder)
            self.verified.add(record.folder)


def _origin(record: Record) -> str:
    """Return where the result of a run comes from, for messages."""
    return f"run {record.id}" if record.folder is None else str(record.folder / RESULT)


def gather_study(
    study: Study,
    rows: dict[Row, list[Config]],
    runs: Runs,
    *,
    measure: bool = False,
    progress: bool = False,
) -> Results:
    """Return the part of results.json that comes from existing runs.

    Args:
        study: The study.
        rows: The configurations of every row.
        runs: The available runs. Their data may be missing.
        measure: Measure runs without a stored measurement, if their weights and data exist.
        progress: Print the name of every measured run.

    Returns:
        "rows", "missing" (names of rows without a run) and "machine" (of the newest run).
    """
    existing = {
        row: [found for c in configs if (found := usable(study, c, runs, measure=measure))]
        for row, configs in rows.items()
    }
    own = [row for row in rows if row.finetuned] or [*rows]  # without the pre-trained runs
    if not any(existing[row] for row in own):
        raise NoRuns(
            f"out: {runs.folder} holds no finished run of the study {study.name} with its "
            "measurements; expected at least one"
        )
    gathered = [
        gather_row(study, row, found, anywhere=True, progress=progress)
        for row, found in existing.items()
        if found
    ]
    missing = _names([row for row in rows if not existing[row]], [*rows])
    return {"rows": gathered, "missing": missing, "machine": newest_machine(gathered)}


def newest_machine(rows: Sequence[Results]) -> dict[str, str]:
    """Return the machine, versions and date of the newest run."""
    machines = [run["machine"] for row in rows for run in row["runs"]]
    return dict(max(machines, key=lambda machine: machine["date"]))


def gather_row(
    study: Study,
    row: Row,
    found: Sequence[Finished],
    *,
    anywhere: bool = False,
    progress: bool = False,
) -> Results:
    """Return one row of results.json; ``anywhere`` accepts results of data in other folders."""
    runs = [_run(study, each, anywhere, progress) for each in found]
    config = found[0].config
    gathered: Results = {
        "method": row.method,
        "label": row.label,
        "fields": dict(row.fields),
        "perturbation": row.perturbation,
        "perturbation_per": config.train.perturbation_per,
        "block_size": row.block_size,
        "finetuned": row.finetuned,
        "epochs": row.epochs,
        "runs": runs,
    }
    averaged = study.measurement.averaged if study.measurement else ()
    for key in (task_of(config).headline, *averaged):
        gathered[key] = _spread([run[key] for run in runs])
    return gathered


def _spread(found: Sequence[Any]) -> dict[str, Any]:
    """Return mean and standard deviation over seeds, of numbers or of every entry of mappings."""
    if isinstance(found[0], dict):
        return {key: _spread([each[key] for each in found]) for key in found[0]}
    return spread(found)


def _run(study: Study, found: Finished, anywhere: bool, progress: bool) -> Results:
    config, record = found
    result, task = dict(record.result), task_of(config)
    check_json(result, NEEDED, _origin(record), TO_RESTORE)
    if not anywhere and record.folder and result["data_root"] != config.data.root:
        say(f"{record.name}: was trained on the data at {result['data_root']}")
    result[task.headline] = {view: result[task.headline][view] for view in task.views()}
    every_number = Entries({task.headline: Entries(others=NUMBER)})
    check_json(result, every_number, _origin(record), "it cannot be averaged over seeds")
    run = {"run": record.name, "seed": config.train.seed, **result}
    if study.measurement:
        run |= measure_run(study.measurement, found, anywhere=anywhere, progress=progress)
    return run | (study.collect(record, config) if study.collect else {})


def measure_run(
    wanted: Measurement, run: Finished, *, anywhere: bool = False, progress: bool = False
) -> dict[str, Any]:
    """Return the measurement of a run: the stored one, else a new one, which is stored.

    Args:
        wanted: The measurement.
        run: The run.
        anywhere: Accept stored results of data in other folders; always for runs without weights.
        progress: Print the name of a measured run.
    """
    config, record = run
    weights = _weights(record)
    found = _known(wanted, run, anywhere or weights is None)
    if found is None:
        if weights is None:
            raise UserError(f"{record.name}: its weights are not kept; train it to measure it")
        if progress:
            say(f"{wanted.name}: {record.name}")
        found = wanted.run(config, weights)
        if create_accelerator(config.train.device).is_main_process:
            stored = {"about": wanted.key_of(config), "found": found}
            write_text(weights / f"{wanted.name}.json", json.dumps(stored) + "\n")
    return found


def _weights(record: Record) -> Path | None:
    """Return the folder of a run if it has the run's weights."""
    folder = record.folder
    return folder if folder is not None and (folder / WEIGHTS).is_file() else None


def _known(wanted: Measurement, run: Finished, anywhere: bool) -> dict[str, Any] | None:
    """Return a stored and complete measurement with the same key.

    ``anywhere`` ignores the data folder.
    """
    stored, key = run.record.measured.get(wanted.name, {}), wanted.key_of(run.config)
    then = stored.get("about", {})
    if anywhere and wanted.needs_data:
        then = {**then, "root": key["root"]}
    found = stored.get("found", {})
    complete = all(_are_figures(found.get(name)) for name in wanted.averaged)
    return found if then == key and "found" in stored and complete else None


def _are_figures(value: Any) -> bool:
    """Return whether a value is a finite number, or has such values by name."""
    if isinstance(value, dict):
        return all(map(_are_figures, value.values()))
    return NUMBER.accepts(value)


def usable(study: Study, config: Config, runs: Runs, *, measure: bool) -> Finished | None:
    """Return a run if it is finished and its measurement is stored or can be measured."""
    record, wanted = runs.find(config), study.measurement
    if record is None:
        return None
    found = Finished(config, record)
    if wanted is None or _known(wanted, found, anywhere=True) is not None:
        return found
    has_data = not wanted.needs_data or task_of(config).has_data()
    can_measure = _weights(record) is not None and has_data
    return found if measure and can_measure else None


class Evaluation:
    """A trained model, and a function that evaluates it, by default in its training view."""

    def __init__(self, model: nn.Module, evaluate: Callable[[Probe, Any], dict[str, Any]]) -> None:
        self.model, self._evaluate = model, evaluate

    def __call__(self, probe: Probe = NO_PROBE, *, view: Any = None) -> dict[str, Any]:
        return self._evaluate(probe, view)


@contextlib.contextmanager
def evaluating(config: Config, folder: Path) -> Iterator[Evaluation]:
    """Yield the evaluation of a trained run."""
    task, model = task_of(config), load_run(folder)[1]
    accelerator = create_accelerator(config.train.device)
    model.to(accelerator.device)
    share = {"process": accelerator.process_index, "processes": accelerator.num_processes}
    source = task.open(train=False).validation
    with contextlib.closing(task.validation(source, **share)) as validation:

        def evaluate(probe: Probe, view: Any) -> dict[str, Any]:
            seen = task.training_view if view is None else view
            return task.evaluate(model, validation, seen, accelerator, probe=probe)

        yield Evaluation(model, evaluate)


def _names(missing: list[Row], rows: list[Row]) -> list[str]:
    """Return the names of missing rows; the number of rows instead if many share a name."""
    found: dict[str, None] = {}
    for row in missing:
        alike = [each for each in missing if each.name == row.name]
        many = f"{row.name} ({len(alike)} rows)"
        found[_distinct_name(row, rows) if len(alike) <= FEW else many] = None
    return [*found]


def _distinct_name(row: Row, rows: list[Row]) -> str:
    """Return the name of a row, with the settings that differ from other rows of this name."""
    alike = [each for each in rows if each.name == row.name]
    details = []
    if len({each.perturbation for each in alike}) > 1:
        details.append(f"σ {row.perturbation:g}")
    if len({each.block_size for each in alike}) > 1:
        details.append(f"blocks of {row.block_size}")
    common = set.intersection(*(set(each.fields) for each in alike))
    details += [f"{key}={value}" for key, value in row.fields if (key, value) not in common]
    return f"{row.name} ({', '.join(details)})" if details else row.name
