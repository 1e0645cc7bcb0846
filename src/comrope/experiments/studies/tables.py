"""Tables in Markdown: their parts, and the complete table.md of a study."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from comrope.experiments.config import commutes
from comrope.experiments.studies.stats import Difference, by_seed
from comrope.experiments.studies.study import Results, Study, method_label

__all__ = [
    "NOTE_INTERVALS",
    "NOTE_SEARCH",
    "accuracy_by_resolution",
    "describe_class_token",
    "describe_fields",
    "describe_missing",
    "describe_run_of",
    "describe_seeds",
    "describe_spread",
    "describe_validation",
    "format_difference",
    "format_mean",
    "markdown_table",
    "mean_over_views",
    "row_label",
    "row_name",
    "seed_counts",
    "shares_perturbation",
    "short_name",
    "spread",
    "study_table",
    "training_size",
    "with_paper_table",
]

NOTE_INTERVALS = (
    "Differences are paired by seed: their mean, in points, and its 95 % confidence interval "
    "(Student's t). *Better* and *worse*: the interval excludes zero. Single intervals are not "
    "corrected for multiple comparisons: where there is no difference, one of twenty excludes "
    "zero.\n\n"
)
# For tables with rows that differ from the searched ones in block size or perturbation.
NOTE_SEARCH = (
    "Settings were searched with blocks of 8 and σ = 1 and are used unchanged with others, which "
    "favours these two.\n\n"
)


def study_table(study: Study, results: Results) -> str:
    """Return table.md: title, data and seeds, the table, command and machine."""
    body = study.table(results)
    if study.show_settings:
        body += _describe_settings(results)
    body += describe_missing(results)
    where = f" ({results['where']} of the paper)" if results["where"] else ""
    seeds = describe_seeds(results)
    seeds = {"": "", "one seed": " One seed."}.get(seeds, f" Mean ± standard deviation of {seeds}.")
    text = f"Ours: {results['data']}.{seeds}\n\n{body}"
    return f"# {results['title']}{where}\n\n{text}{describe_run_of(results)}"


def describe_run_of(results: Results) -> str:
    """Return the last line of a table: the command, the machine and the date."""
    machine = results["machine"]
    made = f"{machine['device']}, torch {machine['torch']}, {machine['date']}"
    return f"\n`{results['command']}`, {made}\n"


def describe_missing(results: Results) -> str:
    """Return a line with the names of rows without a finished run; empty if there are none."""
    missing = "; ".join(results.get("missing") or ())
    return f"\nNot run yet: {missing}.\n" if missing else ""


def _describe_settings(results: Results) -> str:
    """Return the fields that rows set: first those common to all rows, then row by row."""
    rows = results.get("rows", ())
    common = set.intersection(*(_items(row) for row in rows)) if len(rows) > 1 else set()
    texts = []
    if common:
        texts.append(f"all rows: {describe_fields(_among(rows[0], common))}")
    for row in {row_name(row): row for row in rows}.values():
        own = _among(row, _items(row) - common)
        texts += [f"{row_name(row)}: {describe_fields(own)}"] if own else []
    return f"\nSettings other than the recipe's: {'; '.join(texts)}.\n" if texts else ""


def _items(row: Results) -> set[str]:
    return {json.dumps(item) for item in row.get("fields", {}).items()}


def _among(row: Results, items: set[str]) -> dict[str, Any]:
    return {name: v for name, v in row["fields"].items() if json.dumps((name, v)) in items}


def markdown_table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    marks = ["---", *["---:"] * (len(header) - 1)]
    return "".join(f"| {' | '.join(line)} |\n" for line in (header, marks, *lines))


def format_mean(values: Mapping[str, Any], digits: int = 2) -> str:
    """Return the mean, and the standard deviation if there is one."""
    text = f"{values['mean']:.{digits}f}"
    return text if values["std"] is None else f"{text} ± {values['std']:.{digits}f}"


def format_difference(
    difference: Difference | None, *, bold: bool = False, digits: int = 2
) -> list[str]:
    """Return two columns: the difference with its interval, and the verdict."""
    if difference is None:
        return ["–", "–"]
    text = f"{difference.mean:+.{digits}f}"
    if difference.low is not None:
        text += f" [{difference.low:+.{digits}f}, {difference.high:+.{digits}f}]"
    return [text, f"**{difference.verdict}**" if bold else difference.verdict]


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Return mean and sample standard deviation over seeds, and the values."""
    std = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "std": std, "values": [*values]}


def mean_over_views(row: Results, views: Sequence[str]) -> dict[str, Any]:
    """Return mean and standard deviation over seeds of each run's mean over views."""
    return spread([*by_seed(row, views).values()])


def row_name(row: Results) -> str:
    """Return the label of a row, by default that of its method."""
    return row["label"] or method_label(row["method"])


def short_name(row: Results) -> str:
    """Return the name of a row without the part in brackets."""
    return row_name(row).split(" (")[0]


def row_label(row: Results, *, settings: bool = True) -> str:
    """Return the name of a row; with ``settings``, also a perturbation shared by the batch."""
    text = row_name(row)
    if settings and not commutes(row["method"]) and row["perturbation"]:
        text += "" if row["perturbation_per"] == "sample" else " (perturbation shared by the batch)"
    return text


def describe_class_token(row: Results) -> str:
    """Return a remark for shifted images: an unrotated class token is not shifted."""
    where = row["fields"].get("model.class_position")
    return ", class token unrotated" if where == "unrotated" else ""


def shares_perturbation(results: Results) -> bool:
    """Return whether all rows have one perturbation per step, shared by the batch."""
    return all(row["perturbation_per"] == "batch" for row in results["rows"])


def seed_counts(results: Results) -> set[int]:
    """Return the numbers of seeds of the rows, without runs that others start from."""
    rows = results.get("rows", ())
    own = [row for row in rows if row["finetuned"]] or rows
    return {len(row["runs"]) for row in own}


def describe_seeds(results: Results) -> str:
    """Return a text such as "5 seeds" or "2 to 5 seeds"; empty if nothing was trained."""
    counts = seed_counts(results)
    if max(counts, default=0) <= 1:
        return "one seed" if counts else ""
    return f"{'' if len(counts) == 1 else f'{min(counts)} to '}{max(counts)} seeds"


def describe_spread(results: Results, drawn: str) -> str:
    """Return a text about the bands or bars of a figure; empty for one seed."""
    seeds = describe_seeds(results)
    return "" if seeds == "one seed" else f"mean of {seeds}, {drawn}: ± one standard deviation"


def training_size(results: Results) -> str:
    """Return the training resolution, or the first one if that was not evaluated."""
    sizes = [str(r) for r in results["resolutions"]]
    size = str(results["trained_at"])
    return size if size in sizes else sizes[0]


def describe_validation(results: Results) -> str:
    share = results["recipe"]["data"].get("holdout")
    if not share:
        return "on the validation set"
    return f"on {share:g} of the training images, which were kept out of training"


def describe_fields(fields: Mapping[str, Any]) -> str:
    """Return fields in the form of a command line."""
    return ", ".join(f"`{name}={_plain(value)}`" for name, value in fields.items())


def _plain(value: Any) -> str:
    return ",".join(f"{v:g}" for v in value) if isinstance(value, (list, tuple)) else str(value)


def accuracy_by_resolution(results: Results, *, with_mean: bool = False) -> str:
    """Return a table with a column for each resolution, and one for their mean."""
    views = [str(r) for r in results["resolutions"]]
    blocks = len({row["block_size"] for row in results["rows"]}) > 1
    shared = shares_perturbation(results)
    uneven = len(seed_counts(results)) > 1
    header = ["method", *(["block"] if blocks else []), "σ", *(["seeds"] if uneven else [])]
    header += [*(f"{view} px" for view in views), *(["mean"] if with_mean else [])]
    lines = [
        [
            row_label(row, settings=not shared),
            *([str(row["block_size"])] if blocks else []),
            f"{row['perturbation']:g}",
            *([str(len(row["runs"]))] if uneven else []),
            *(format_mean(row["top1"][view], 1) for view in views),
            *([format_mean(mean_over_views(row, views), 1)] if with_mean else []),
        ]
        for row in results["rows"]
    ]
    text = f"Top-1 accuracy, %, {describe_validation(results)}, by evaluation resolution.\n\n"
    text += markdown_table(header, lines)
    if shared:
        text += "\nPerturbation of the coordinates: one draw a step, shared by the batch.\n"
    return text


def with_paper_table(results: Results, name: str, *, with_mean: bool = False) -> str:
    """Return accuracy by resolution, then that of a table of the paper (its name in paper.yaml)."""
    ours = accuracy_by_resolution(results, with_mean=with_mean)
    return f"{ours}\n{_paper_by_resolution(results, name)}"


def _paper_by_resolution(results: Results, name: str) -> str:
    paper = results["paper"][name]
    wanted = {(row["method"], f"{row['perturbation']:g}") for row in results["rows"]}
    lines = [
        [method_label(method), sigma, *(f"{v:.2f}" for v in values)]
        for method, by_sigma in paper["top1"].items()
        for sigma, values in by_sigma.items()
        if (method, sigma) in wanted
    ]
    if not lines:
        return ""
    # The columns have the same ratios of resolution to training resolution as ours.
    header = ["method", "σ", *(f"{r} px" for r in paper["resolutions"])]
    other = "" if results["preset"] == "paper" else ", on another data set"
    return (
        f"The paper's{other} ({paper['data']} trained at "
        f"{paper['trained_at']} px, blocks of 8):\n\n{markdown_table(header, lines)}"
    )
