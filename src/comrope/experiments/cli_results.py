"""The commands of ``comrope results``: finished runs in a store of a few text files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["app"]

app = typer.Typer(help="Store finished runs in a few text files.", no_args_is_help=True)
Store = Annotated[Path, typer.Option(help="The folder of the .jsonl files.")]
RESULTS = Path("results")


@app.command("add")
def add_command(
    folders: Annotated[
        list[Path], typer.Argument(help="Folders of runs, or folders that contain such folders.")
    ],
    store: Store = RESULTS,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace different stored results of the same runs.")
    ] = False,
) -> None:
    """Store finished runs: configuration, results and measurements, but no weights."""
    from comrope.experiments.runs.store import JsonlStore, records_in
    from comrope.experiments.training.verify import verify_run

    records = [record for folder in folders for record in records_in(folder)]
    for record in records:
        if record.folder is not None:
            verify_run(record.folder)
    changed = JsonlStore(store).add(records, replace=replace)
    for record in changed:
        print(f"{record.id}  {record.name}")
    print(f"{len(changed)} of {len(records)} finished runs are new; store: {store}")


@app.command("reseal")
def reseal_command(
    folders: Annotated[
        list[Path], typer.Argument(help="Folders of runs, or folders that contain such folders.")
    ],
) -> None:
    """Accept the present files of finished runs after a deliberate change.

    Their digests are written again, after all other checks of the files.
    """
    from comrope.experiments.runs.store import run_folders
    from comrope.experiments.training.verify import reseal_run

    for run in [run for folder in folders for run in run_folders(folder)]:
        reseal_run(run)
        print(f"sealed: {run}")


@app.command("show")
def show_command(
    run: Annotated[
        str | None,
        typer.Argument(help="Its identity or the beginning of the identity, or its name."),
    ] = None,
    as_yaml: Annotated[
        bool, typer.Option("--yaml", help="Print the complete configuration as a recipe.")
    ] = False,
    store: Store = RESULTS,
) -> None:
    """List the runs of a store, or show one run.

    To train a run again: comrope train @ID.
    """
    from comrope.experiments.config import to_yaml
    from comrope.experiments.runs.records import describe
    from comrope.experiments.runs.store import JsonlStore

    if run is None:
        for record in JsonlStore(store).records():
            print(f"{record.id}  {record.recipe:13} {record.name}")
        return
    record = JsonlStore(store).get(run)
    print(to_yaml(record.config, record.parent) if as_yaml else describe(record), end="")
