"""The commands ``comrope results``: finished runs in a store of a few text files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["app"]

app = typer.Typer(help="Keep finished runs in a few text files.", no_args_is_help=True)
Store = Annotated[Path, typer.Option(help="The folder of the .jsonl files.")]
RESULTS = Path("results")


@app.command("add")
def add_command(
    folders: Annotated[
        list[Path], typer.Argument(help="Folders of runs, or folders with such folders in them.")
    ],
    store: Store = RESULTS,
    replace: Annotated[
        bool, typer.Option("--replace", help="A new result replaces another of the same run.")
    ] = False,
) -> None:
    """Store finished runs: their configuration, results and measurements, without weights."""
    from comrope.experiments.runs.store import JsonlStore, records_in

    records = [record for folder in folders for record in records_in(folder)]
    changed = JsonlStore(store).add(records, replace=replace)
    for record in changed:
        print(f"{record.id}  {record.name}")
    print(f"{len(changed)} of {len(records)} finished runs are new; store: {store}")


@app.command("show")
def show_command(
    run: Annotated[
        str | None, typer.Argument(help="Its identity, the beginning of it, or its name.")
    ] = None,
    as_yaml: Annotated[
        bool, typer.Option("--yaml", help="Its whole configuration, as a recipe to train.")
    ] = False,
    store: Store = RESULTS,
) -> None:
    """List the runs of a store, or show one of them.

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
