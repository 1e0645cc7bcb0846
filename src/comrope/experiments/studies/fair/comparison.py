"""The comparison of all methods: accuracies, and differences that their intervals allow to tell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from comrope.experiments.common.figures import new_figure
from comrope.experiments.studies.fair.rows import ADDED, OURS
from comrope.experiments.studies.forest import Line, draw_forest
from comrope.experiments.studies.markdown import (
    CAUTION,
    SEARCHED_WITH,
    all_share_noise,
    by_resolution,
    counts_of_seeds,
    interval,
    label,
    named,
    rows,
    spread_said,
    usual_size,
)
from comrope.experiments.studies.plots import of_method, resolutions
from comrope.experiments.studies.stats import Difference, compare, decided_together

__all__ = [
    "Pair",
    "figure",
    "how_much_added",
    "more_over_less",
    "ours_over_others",
    "paired",
    "pairs",
    "table",
]

TOGETHER = (
    "In bold, what remains when all differences {} are asked at once (Holm's correction).\n\n"
)
DASHES = ("--", ":", "-.", (0, (6, 1, 1, 1, 1, 1)))
NO_NOISE = "itself without noise"
EXPLAINED = (
    "*Values too*: besides queries and keys, values are rotated, and what attention makes of them "
    "is rotated back. *Values and near*: and heads look near at the start of training; learned "
    "angles then start and learn as the settings below say.\n\n"
)
FOR_LONGER = (
    "*A quarter longer*: trained for a quarter more epochs than the others, to stand beside what "
    "takes more time a step.\n\n"
)
UNLIKE = (
    "What is added to one of ours can be added to any rotation: a difference over a baseline that "
    "has as much is that of the method and its settings, one over a baseline that has less that of "
    "all there is.\n\n"
)


class Pair(NamedTuple):
    """Two rows: one of ours beside a baseline, or a row beside itself with less."""

    mine: dict[str, Any]
    other: dict[str, Any]
    trained: Difference | None  # at the training resolution
    mean: Difference | None  # of the mean over resolutions

    @property
    def is_of_noise(self) -> bool:
        """Whether it is noise that the other row has not; to no positions it means nothing."""
        return bool(self.mine["perturbation"]) and named(self.mine) == named(self.other)

    @property
    def family(self) -> str:
        """What it is asked with at once."""
        return "that noise makes" if self.is_of_noise else f"with σ = {self.mine['perturbation']:g}"


def paired(results: dict[str, Any], mine: dict[str, Any], other: dict[str, Any]) -> Pair:
    every, size = [str(r) for r in results["resolutions"]], usual_size(results)
    return Pair(mine, other, compare(mine, other, [size]), compare(mine, other, every))


def pairs(results: dict[str, Any]) -> list[Pair]:
    """Ours over baselines; then rows with all that can be added, and rows with noise, over
    themselves without."""
    more = more_over_less(results, len(ADDED))
    return [*ours_over_others(results), *more, *_noise_over_none(results)]


def more_over_less(results: dict[str, Any], by: int) -> list[Pair]:
    """Rows of one method with the same noise, of which one has so much more added; of two readings
    of a method, it is the second that has more."""
    cells, found = results["cells"], []
    for mine in cells:
        less = [
            other
            for other in cells
            if mine["method"] == other["method"] and mine["perturbation"] == other["perturbation"]
            if how_much_added(mine) == how_much_added(other) + by
            if is_longer(mine) == is_longer(other)
        ]
        found += [paired(results, mine, other) for other in less[-1:]]
    return found


def ours_over_others(results: dict[str, Any]) -> list[Pair]:
    return [
        paired(results, mine, other)
        for mine in results["cells"]
        for other in results["cells"]
        if mine["method"] in OURS and other["method"] not in OURS
        # To a model without positions noise on them means nothing.
        if other["method"] == "none" or other["perturbation"] == mine["perturbation"]
        if how_much_added(other) <= how_much_added(mine)
        if how_much_added(mine) or not is_longer(other)  # it is for what takes more time
    ]


def _noise_over_none(results: dict[str, Any]) -> list[Pair]:
    """Rows over themselves without noise on the coordinates."""
    silent = {named(cell): cell for cell in results["cells"] if not cell["perturbation"]}
    noisy = [cell for cell in results["cells"] if cell["perturbation"] and named(cell) in silent]
    return [paired(results, cell, silent[named(cell)]) for cell in noisy]


def how_much_added(cell: dict[str, Any]) -> int:
    """Of what can be added to any rotation."""
    return sum(name in cell["fields"] for name in ADDED)


def is_longer(cell: dict[str, Any]) -> bool:
    """Whether it was trained for more epochs than the others."""
    return bool(cell.get("longer", 1) != 1)


def table(results: dict[str, Any], found: Sequence[Pair] | None = None) -> str:
    """Accuracies, and the differences of these pairs."""
    explained = EXPLAINED if any(map(how_much_added, results["cells"])) else ""
    explained += FOR_LONGER if any(map(is_longer, results["cells"])) else ""
    text = explained + by_resolution(results, with_mean=True)
    found = pairs(results) if found is None else found
    if not found:
        return text
    uneven = len(counts_of_seeds(results)) > 1
    header = ["method", "over", "σ", *(["seeds"] if uneven else [])]
    header += [f"{usual_size(results)} px", "", "mean over resolutions", ""]
    alone = not all_share_noise(results)  # what is said of a row that shares its noise
    sure = _sure(found)
    lines = [
        [
            label(pair.mine, settings=alone),
            NO_NOISE if pair.is_of_noise else label(pair.other, settings=alone),
            f"{pair.mine['perturbation']:g}",
            *([str(pair.mean.seeds if pair.mean else 0)] if uneven else []),
            *interval(pair.trained, bold=at_size),
            *interval(pair.mean, bold=on_mean),
        ]
        for pair, (at_size, on_mean) in zip(found, sure, strict=True)
    ]
    unlike = any(
        pair.mine["method"] != pair.other["method"]
        and how_much_added(pair.mine) != how_much_added(pair.other)
        for pair in found
    )
    families = [*dict.fromkeys(pair.family for pair in found)]
    together = TOGETHER.format(", or all ".join(families) if families[1:] else "of the table")
    said = (together if any(map(any, sure)) else "") + (UNLIKE if unlike else "")
    silent = any(pair.is_of_noise and pair.mine["fields"] for pair in found)
    said += SEARCHED_WITH if silent else ""
    return f"{text}\n{CAUTION}{said}{rows(header, lines)}"


def _sure(found: Sequence[Pair]) -> list[list[bool]]:
    """Of each pair, whether its two differences remain when those of its family are asked at
    once."""
    sure: list[list[bool]] = [[] for _ in found]
    for family in {pair.family for pair in found}:
        places = [place for place, pair in enumerate(found) if pair.family == family]
        both = [each for p in places for each in (found[p].trained, found[p].mean)]
        remains = iter(decided_together(both))
        for place in places:
            sure[place] = [next(remains), next(remains)]
    return sure


def figure(results: dict[str, Any], found: Sequence[Pair] | None = None) -> Any:
    """Accuracy against resolution, with noise and without; below it the differences."""
    cells, found = results["cells"], pairs(results) if found is None else found
    noisy = {cell["perturbation"] for cell in cells if cell["method"] != "none"}
    sigmas = sorted(noisy or {0.0}, reverse=True)
    drawing, axes = new_figure(len(sigmas), 2 if found else 1, width=7.2, height=5.0)
    if found:  # a line a difference, and one for each row of ours
        most = max(
            len(_lines([p for p in found if p.mine["perturbation"] == s], results)) for s in sigmas
        )
        heights = (5.0, 1.0 + 0.27 * most)
        axes[0, 0].get_gridspec().set_height_ratios(heights)
        drawing.set_figheight(sum(heights))
    for column, sigma in enumerate(sigmas):
        top = axes[0, column]
        some = [c for c in cells if c["method"] == "none" or c["perturbation"] == sigma]
        resolutions(top, results, some, lambda cell, _: _style(cell, cells))
        top.set_title(f"perturbation {sigma:g}", fontsize=11)
        top.set_ylabel("top-1 accuracy, %")
        top.sharey(axes[0, 0])
        if found:
            some = [pair for pair in found if pair.mine["perturbation"] == sigma]
            draw_forest(axes[1, column], _lines(some, results), usual_size(results))
            axes[1, column].set_ylim(most - 0.4, -0.6)  # as far apart in all columns
    drawn = {line.get_label(): line for axis in axes[0] for line in axis.get_lines()}
    drawn = {name: line for name, line in drawn.items() if not name.startswith("_")}
    columns = 3 if len(sigmas) > 1 else 2  # of names that are long
    below = {"loc": "outside lower center", "ncols": columns, "frameon": False}
    drawing.legend(handles=[*drawn.values()], **below)
    told = spread_said(results, "bands")
    if found:
        told += f"{'; below: ' if told else 'below: '}differences"
        told += ", 95 % intervals" if spread_said(results, "") else ""
    drawing.suptitle(f"{results['data']}\n{told or 'one seed'}", fontsize=10)
    return drawing


def _style(cell: dict[str, Any], cells: list[dict[str, Any]]) -> dict[str, Any]:
    """A method's colour and mark; what shares them with rows before it is hollow, and dashed or,
    after other such rows, in other dashes."""
    names = [named(each) for each in cells if each["method"] == cell["method"]]
    before = [*dict.fromkeys(names)].index(named(cell))
    if not before:
        return of_method(cell)
    line = DASHES[min(before, len(DASHES)) - 1]
    return of_method(cell) | {"linestyle": line, "markerfacecolor": "white"}


def _lines(found: Sequence[Pair], results: dict[str, Any]) -> list[Line]:
    """What is over others, and below it each of those; or over what of itself, and below it each
    that is."""
    lines, before = [], None
    for pair in found:
        mine, other = _short(pair.mine), _short(pair.other)
        if not all_share_noise(results) and label(pair.other) != named(pair.other):
            other += ", noise shared"  # by the batch, unlike ours
        heading, line = f"{mine}:", f"over {other}"
        if pair.mine["method"] == pair.other["method"]:
            heading, line = "over itself with less:", mine
        if pair.is_of_noise:
            heading = f"over {NO_NOISE}:"
        if heading != before:
            lines.append(Line(heading, {}, None, None))
        before = heading
        style = {**_style(pair.mine, results["cells"]), "linestyle": "none"}
        style.pop("markerfacecolor", None)
        if style["marker"] == "x":  # hollow it would look the same
            style["marker"] = "X"
        lines.append(Line(line, style, pair.trained, pair.mean))
    return lines


def _short(cell: dict[str, Any]) -> str:
    return named(cell).split(" (")[0]
