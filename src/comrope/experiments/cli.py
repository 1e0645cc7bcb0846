"""The command line. Commands import their packages when they run, so that --help is fast."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Annotated, NoReturn

import typer

import comrope
from comrope.experiments import cli_results
from comrope.experiments.common import interrupts
from comrope.experiments.common.errors import Interrupted, UserError
from comrope.experiments.common.messages import one_line

__all__ = ["app", "main"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich's help takes 0.15 s more to import
)
app.add_typer(cli_results.app, name="results")
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Fields to set, such as model.position=comrope-ap train.epochs=10"),
]
Method = Annotated[
    str | None,
    typer.Option(help="The position encoding, such as comrope-ld; by default the recipe's."),
]
Perturbation = Annotated[
    float | None,
    typer.Option(help="Perturbation of the coordinates, in patches; by default the recipe's."),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bars.")]
FORMAT_WARNING = warnings.formatwarning


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"comrope {comrope.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", is_eager=True, callback=_print_version
        ),
    ] = False,
) -> None:
    """Learned rotary position embeddings: train, evaluate, compare."""


@app.command("train")
def train_command(
    recipe: Annotated[
        str,
        typer.Argument(help="A name (comrope recipes), a .yaml file, or @ID (comrope results)."),
    ],
    overrides: Overrides = None,
    method: Method = None,
    perturbation: Perturbation = None,
    out: Annotated[
        Path, typer.Option(help="The folder of the run; an unfinished run in it is resumed.")
    ] = Path("out/run"),
    data: Annotated[str | None, typer.Option(help="Short for data.root=PATH.")] = None,
    quiet: Quiet = False,
) -> None:
    """Train a model, or resume an interrupted training.

    Under torchrun or accelerate launch, all processes train one model together.
    """
    from comrope.experiments.runs.store import load_config
    from comrope.experiments.tasks import task_of
    from comrope.experiments.training.train import train

    config = load_config(recipe, method, perturbation)
    config = config.with_overrides(overrides or []).with_overrides(_root(data))
    result = train(config, out, progress=not quiet)
    task = task_of(config)
    for view, found in result.get(task.headline, {}).items():
        print(task.describe(view, {task.headline: found}))
    if result:
        print(f"run: {out}")


@app.command("eval")
def eval_command(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    overrides: Overrides = None,
    resolutions: Annotated[
        str | None, typer.Option(help="Such as 112,224,448; by default those of the run.")
    ] = None,
    offsets: Annotated[
        str,
        typer.Option(help="Shift the coordinates by N(0, rho²) image widths, rho such as 0,0.5,1."),
    ] = "0",
    data: Annotated[str | None, typer.Option(help="Short for data.root=PATH.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the accuracies here, as JSON.")] = None,
    quiet: Quiet = False,
) -> None:
    """Evaluate a trained model at any resolutions, optionally with shifted coordinates."""
    from comrope.experiments.config import load_recipe, read_numbers
    from comrope.experiments.runs.directory import CONFIG
    from comrope.experiments.tasks import task_of
    from comrope.experiments.training.evaluate import evaluate_run

    found = evaluate_run(
        run,
        overrides=overrides or [],
        data=data,
        resolutions=None if resolutions is None else read_numbers("--resolutions", resolutions),
        offsets=read_numbers("--offsets", offsets),
        progress=not quiet,
    )
    task = task_of(load_recipe(run / CONFIG))
    for entry in found:
        print(task.describe(entry["view"], entry))
    if out is not None and found:
        from comrope.experiments.common.files import write_text

        write_text(out, json.dumps(found, indent=1) + "\n")


@app.command("reproduce")
def reproduce_command(
    name: Annotated[
        str | None,
        typer.Argument(help="A study, or package.module:STUDY; by default all studies are listed."),
    ] = None,
    overrides: Overrides = None,
    preset: Annotated[str, typer.Option(help="demo, tiny, small or paper.")] = "demo",
    data: Annotated[str | None, typer.Option(help="The folder of the data set.")] = None,
    seeds: Annotated[
        int | None,
        typer.Option(min=1, max=1000, help="Runs per row; by default the study's number."),
    ] = None,
    methods: Annotated[str, typer.Option(help="Only these methods, such as ape,liere.")] = "",
    per_gpu: Annotated[
        int,
        typer.Option(
            min=1, max=1000, help="Runs at a time on each GPU; more than one suits small models."
        ),
    ] = 1,
    out: Annotated[
        Path | None,
        typer.Option(help="The folder of results, by default out/PRESET; studies share its runs."),
    ] = None,
    gather: Annotated[
        bool, typer.Option("--gather", help="Use only finished runs; train nothing.")
    ] = False,
    known: Annotated[
        Path | None,
        typer.Option(help="A folder with finished runs, such as results, which are not repeated."),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(help="Train every run in a job of its own: slurm; or local, to try it."),
    ] = None,
    cluster_options: Annotated[
        str,
        typer.Option(help="Of every job: partition=gpu,timeout_min=600,gpus_per_node=1 and so on."),
    ] = "",
    quiet: Quiet = False,
) -> None:
    """Reproduce a table and a figure: train the missing runs and gather all results."""
    from comrope.experiments.cluster import find_cluster
    from comrope.experiments.launch import relaunch_on_all_gpus
    from comrope.experiments.studies import STUDIES, find_study
    from comrope.experiments.studies.plan import find_preset
    from comrope.experiments.studies.reproduce import reproduce

    if name is None:
        for study in STUDIES.values():
            print(f"{study.name:15} {study.where or '-':12} {study.title}")
        return
    if cluster_options and cluster is None:
        raise UserError("cluster-options: expected --cluster, too; got none")
    jobs = None if cluster is None else find_cluster(cluster, cluster_options)
    if jobs is None and find_preset(preset).together and find_study(name).trains and not gather:
        relaunch_on_all_gpus(sys.argv[1:])
    reproduce(
        name,
        preset=preset,
        out=out or Path("out") / preset,
        data=data,
        seeds=seeds,
        methods=[m for m in methods.split(",") if m],
        overrides=overrides or [],
        per_gpu=per_gpu,
        gather=gather,
        known=known,
        cluster=jobs,
        progress=not quiet,
    )


@app.command("report")
def report_command(
    document: Annotated[
        list[Path], typer.Argument(help="Markdown files with marks, such as docs/results.md.")
    ],
    known: Annotated[
        Path, typer.Option("--known", "--out", help="The folder with the kept runs.")
    ] = Path("results"),
) -> None:
    """Update the tables and figures of documents from kept results."""
    from comrope.experiments.studies.report import report

    for mark in report(document, known):
        print(f"comrope {mark}")


@app.command("bench")
def bench_command(
    suites: Annotated[
        list[str] | None,
        typer.Argument(
            help="rotation, attention, vit, llama, language, liere; layer, step, decode, sizes; "
            "or all of them."
        ),
    ] = None,
    preset: Annotated[
        str,
        typer.Option(
            help="small, a trial on two CPU cores; full, for one large GPU; or cpu, which runs "
            "layer, step, decode and sizes."
        ),
    ] = "small",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16 or float16; by default bfloat16 on a GPU only."),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Samples; the suite llama always has one.")
    ] = None,
    compiled: Annotated[
        bool | None,
        typer.Option(
            "--compile/--no-compile", help="With compiled rows; by default as in the preset."
        ),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Measurements per row; slow rows have fewer.")
    ] = None,
    runs: Annotated[
        int | None, typer.Option(help="Repetitions of all rounds, each with its own medians.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Only rows whose names contain this text; may be given several times."),
    ] = None,
    out: Annotated[Path, typer.Option(help="The folder for results.json and figure.png.")] = Path(
        "out/bench"
    ),
    quiet: Quiet = False,
) -> None:
    """Measure the time and memory of comrope and other libraries, after a correctness check.

    The exit code is 1 if a check fails. Earlier results in the folder are replaced.
    """
    from comrope.experiments.bench.suites import bench, setting_of

    setting = setting_of(
        preset,
        device=device,
        dtype=dtype,
        batch=batch,
        rounds=rounds,
        runs=runs,
        compiled=compiled,
    )
    results = bench(suites or (), setting, out, preset=preset, only=only or (), progress=not quiet)
    if results["failures"]:
        _leave(f"comrope: {results['failures']} checks failed; see above", 1)


@app.command("inspect")
def inspect_command(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    out: Annotated[Path | None, typer.Option(help="By default RUN/inspect.")] = None,
) -> None:
    """Write figures and numbers of a trained model's position encoding."""
    from comrope.experiments.inspect import inspect_run

    facts = inspect_run(run, out or run / "inspect")
    for layer in facts.get("layers", []):
        print(
            f"{layer['layer']:18} angles moved {layer['moved']:8.1e}   "
            f"commutator {layer['commutator']:8.1e}   "
            f"scores move by {layer['offset_sensitivity']:8.1e} of their spread, input by its width"
        )
    if "ape_variation" in facts:
        shares = ", ".join(f"{v:.2f}" for v in facts["ape_variation"])
        print(f"variation of the absolute positions along each axis: {shares}")
    for picture in facts["pictures"]:
        print(f"picture: {picture}")


@app.command("export")
def export_command(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run, or of a saved model.")],
    to: Annotated[str, typer.Option(help="onnx, torch-export or safetensors.")],
    out: Annotated[Path, typer.Option(help="A file, .onnx or .pt2; for safetensors a folder.")],
) -> None:
    """Export a trained model for other programs, for any batch and image size.

    The exported program is compared with the model; the exit code is 1 if they differ.
    """
    from comrope.experiments.export import Differs, export

    try:
        done = export(run, to, out)
    except Differs as error:
        _leave(f"comrope: {error}", 1)
    else:
        measured = "" if done.error is None else f", largest relative error {done.error:.1e}"
        print(f"{to}: {done.path}{measured}")


@app.command("recipes")
def recipes_command(
    name: Annotated[str | None, typer.Argument(help="The recipe to print.")] = None,
    method: Method = None,
    perturbation: Perturbation = None,
    fields: Annotated[bool, typer.Option("--fields", help="Describe every field.")] = False,
) -> None:
    """List the recipes of comrope, or print one with every field.

    A recipe can be trained with any method: comrope train imagenet --method comrope-ld.
    """
    from comrope.experiments.config import describe_fields, load_recipe, recipe_names, to_yaml

    if fields:
        print(describe_fields())
    else:
        print(
            to_yaml(load_recipe(name, method, perturbation)) if name else "\n".join(recipe_names())
        )


def main() -> None:
    """Run the command ``comrope``; print one line for errors that a user can correct."""
    warnings.filterwarnings("once", category=DeprecationWarning, module=r"comrope\.")
    warnings.formatwarning = _format_warning
    try:
        code = _run()
    except UserError as error:
        _leave(f"comrope: {error}", 2)
    except Interrupted as error:
        _leave(f"comrope: {error}", 128 + error.number)
    except KeyboardInterrupt:
        _leave(interrupts.LINE, interrupts.STOPPED)
    except ModuleNotFoundError as error:
        _leave(f"comrope: {error.name} is not installed: pip install 'comrope[train]'", 2)
    except UnicodeEncodeError as error:
        wrong = ascii(error.object[error.start : error.end])
        _leave(f"comrope: expected a name in UTF-8, got {wrong}; rename the file or folder", 2)
    except OSError as error:
        _leave(f"comrope: {error}", 2)
    interrupts.leave(code)


def _run() -> int:
    """Run the command and return its exit code."""
    try:
        app()
    except SystemExit as left:
        if left.code == interrupts.STOPPED:  # typer's, of a Ctrl-C
            raise KeyboardInterrupt from None
        sys.stdout.flush()  # raises here, and not when Python ends
        return int(left.code or 0)
    except Exception as error:
        if interrupts.received():  # a library replaced its exception
            raise KeyboardInterrupt from error
        raise
    return 0


def _format_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    """Return one line for deprecation warnings, and other warnings as usual."""
    if issubclass(category, DeprecationWarning):
        return f"comrope: {message}\n"
    return FORMAT_WARNING(message, category, filename, lineno, line)


def _leave(message: str, code: int) -> NoReturn:
    interrupts.leave(code, one_line(message))


def _root(data: str | None) -> dict[str, str]:
    return {"data.root": data} if data is not None else {}
