"""Pieces of tables: rows, numbers with their spread over seeds, names of what was compared."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from comrope.experiments.studies.stats import Difference, by_seed
from comrope.experiments.studies.study import LABELS

__all__ = [
    "CAUTION",
    "SEARCHED_WITH",
    "all_share_noise",
    "by_resolution",
    "class_token_said",
    "counts_of_seeds",
    "fields_said",
    "interval",
    "label",
    "named",
    "number",
    "over_views",
    "rows",
    "seeds_said",
    "spread",
    "spread_said",
    "usual_size",
    "validated_on",
]

CAUTION = (
    "Differences are taken seed by seed: their mean, in points, and its 95 % confidence interval "
    "(Student's t). *Better* and *worse* are those whose interval leaves zero out; every interval "
    "stands for itself, and of twenty without a difference one would show some.\n\n"
)
# Of tables with rows that differ from those in blocks or noise.
SEARCHED_WITH = (
    "Settings were searched with blocks of 8 and σ = 1, and hold for rows with others as they are: "
    "that favours what they were searched with.\n\n"
)


def rows(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    marks = ["---", *["---:"] * (len(header) - 1)]
    return "".join(f"| {' | '.join(line)} |\n" for line in (header, marks, *lines))


def number(values: dict[str, Any], digits: int = 2) -> str:
    """Mean, and spread if there is one."""
    text = f"{values['mean']:.{digits}f}"
    return text if values["std"] is None else f"{text} ± {values['std']:.{digits}f}"


def spread(values: list[float]) -> dict[str, Any]:
    """Mean and sample standard deviation over seeds."""
    std = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "std": std, "values": values}


def named(cell: dict[str, Any]) -> str:
    """What its row is called; results from before have no names of rows."""
    return cell.get("name") or LABELS[cell["method"]]


def over_views(cell: dict[str, Any], views: Sequence[str]) -> dict[str, Any]:
    """Mean and spread over seeds of the mean over these views."""
    return spread(list(by_seed(cell, views).values()))


def label(cell: dict[str, Any], *, settings: bool = True) -> str:
    text = named(cell)
    if settings and cell["method"] == "liere" and cell["perturbation"]:
        text += "" if cell["perturbation_per"] == "sample" else " (noise shared by the batch)"
    return f"{text}, not told the time" if cell["timeless"] else text


def class_token_said(cell: dict[str, Any]) -> str:
    """Where images are moved: a class token that is not rotated does not move with them."""
    where = cell.get("fields", {}).get("model.class_position")
    return ", class token unrotated" if where == "unrotated" else ""


def all_share_noise(results: dict[str, Any]) -> bool:
    """Whether the noise of every row is one draw a step: then no row is alone in that."""
    return all(cell["perturbation_per"] == "batch" for cell in results["cells"])


def counts_of_seeds(results: dict[str, Any]) -> set[int]:
    """How many seeds there are of a cell; not the same for all while some runs are missing. What
    others start from counts for nothing."""
    cells = results.get("cells", ())
    own = [cell for cell in cells if cell["finetuned"]] or cells
    return {len(cell["runs"]) for cell in own}


def seeds_said(results: dict[str, Any]) -> str:
    """Such as "5 seeds", or "2 to 5 seeds"; empty where nothing was trained."""
    counts = counts_of_seeds(results)
    if max(counts, default=0) <= 1:
        return "one seed" if counts else ""
    return f"{'' if len(counts) == 1 else f'{min(counts)} to '}{max(counts)} seeds"


def spread_said(results: dict[str, Any], drawn: str) -> str:
    """What a figure shows of the seeds, as a band or a bar; empty of one."""
    seeds = seeds_said(results)
    return "" if seeds == "one seed" else f"mean of {seeds}, {drawn}: ± one standard deviation"


def usual_size(results: dict[str, Any]) -> str:
    """The resolution of training, or the first if nothing was evaluated there."""
    sizes = [str(r) for r in results["resolutions"]]
    size = str(results["trained_at"])
    return size if size in sizes else sizes[0]


def validated_on(results: dict[str, Any]) -> str:
    share = results["recipe"]["data"].get("holdout")  # results from before have none
    if not share:
        return "on the validation set"
    return f"on {share:g} of the training images, which were kept out of training"


def interval(difference: Difference | None, *, bold: bool = False) -> list[str]:
    """Two columns: the difference in points with its interval, and what that allows to say."""
    if difference is None:
        return ["–", "–"]
    text = f"{difference.mean:+.2f}"
    if difference.low is not None:
        text += f" [{difference.low:+.2f}, {difference.high:+.2f}]"
    return [text, f"**{difference.verdict}**" if bold else difference.verdict]


def fields_said(fields: dict[str, Any]) -> str:
    return ", ".join(f"`{name}={value}`" for name, value in fields.items())


def by_resolution(results: dict[str, Any], *, with_mean: bool = False) -> str:
    """Ours, a column a resolution, and one of their mean."""
    views = [str(r) for r in results["resolutions"]]
    blocks = len({cell["block_size"] for cell in results["cells"]}) > 1
    shared = all_share_noise(results)
    uneven = len(counts_of_seeds(results)) > 1
    header = ["method", *(["block"] if blocks else []), "σ", *(["seeds"] if uneven else [])]
    header += [*(f"{view} px" for view in views), *(["mean"] if with_mean else [])]
    ours = [
        [
            label(cell, settings=not shared),
            *([str(cell["block_size"])] if blocks else []),
            f"{cell['perturbation']:g}",
            *([str(len(cell["runs"]))] if uneven else []),
            *(number(cell["top1"][view], 1) for view in views),
            *([number(over_views(cell, views), 1)] if with_mean else []),
        ]
        for cell in results["cells"]
    ]
    text = f"Top-1 accuracy, %, {validated_on(results)}, by evaluation resolution.\n\n"
    text += rows(header, ours)
    if shared:
        text += "\nNoise on the coordinates: one draw a step, shared by the batch.\n"
    return text
