"""The comparison of all methods: accuracies, and differences with confidence intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from comrope.experiments.common.figures import new_figure, style_of
from comrope.experiments.studies.fair.pairs import (
    Pair,
    all_pairs,
    extension_pairs,
    num_extensions,
)
from comrope.experiments.studies.fair.rows import (
    CONTROL,
    EXTENSIONS,
    OURS,
    PATCH_UNITS,
    ROWS,
    extended_label,
    extended_rows,
    more_seeds,
    tuned,
)
from comrope.experiments.studies.plots import Line, accuracy_curves, draw_forest, method_style
from comrope.experiments.studies.stats import compare, holm
from comrope.experiments.studies.study import Brief, Preset, Results, Row, Study
from comrope.experiments.studies.tables import (
    NOTE_INTERVALS,
    NOTE_SEARCH,
    accuracy_by_resolution,
    describe_missing,
    describe_seeds,
    describe_spread,
    describe_validation,
    format_difference,
    format_mean,
    markdown_table,
    mean_over_views,
    row_label,
    row_name,
    seed_counts,
    shares_perturbation,
    short_name,
    training_size,
)

__all__ = ["STUDY", "brief_figure", "brief_table", "figure_of", "table_of"]

SEEDS_UNPERTURBED = 3  # at most, because rows with perturbation are the main ones
# On two CPU cores, a step of extended comrope-torus takes 1.2 to 1.3 times the time of vanilla RoPE
# (docs/results.md). Rows of vanilla RoPE with more epochs take about the same time in all.
MORE_EPOCHS = 1.25
NOTE_HOLM = "Bold: significant after Holm correction over all differences {}.\n\n"
NOTE_EXTENDED = (
    "*Rotated values*: values are rotated like queries and keys, and the outputs of attention are "
    "rotated back. *Extended*: rotated values and locality-biased heads, which attend to near "
    "patches at the start of training. The settings below include the initialization and learning "
    "rate of the angles.\n\n"
)
NOTE_EPOCHS = (
    "*1.25× epochs*: trained for longer than the others, for a comparison with rows "
    "that take more time a step.\n\n"
)
NOTE_EXTENSIONS = (
    "Any rotation can be extended. A difference from a baseline with the same extensions is that "
    "of the method and its settings; a difference from a baseline with fewer also contains the "
    "gain of the extensions.\n\n"
)
UNPERTURBED = "itself without perturbation"
DASHES = ("--", ":", "-.", (0, (6, 1, 1, 1, 1, 1)))


def rows(preset: Preset) -> list[Row]:
    """Return all methods with and without perturbation, extended, and with more epochs."""
    plain = [tuned(row, preset) for row in ROWS]
    every = [replace(row, perturbation=p) for row in plain for p in preset.perturbations]
    extended = [tuned(row, preset) for row in extended_rows()]
    cheap = [r for r in (*plain, *extended) if r.label in (PATCH_UNITS, extended_label("rope"))]
    longer = [replace(r, epochs=MORE_EPOCHS, label=f"{r.label}, 1.25× epochs") for r in cheap]
    found = [*every, *extended, *longer, tuned(CONTROL, preset)]
    return [r if r.perturbation else replace(r, max_seeds=SEEDS_UNPERTURBED) for r in found]


def table_of(results: Results, found: Sequence[Pair]) -> str:
    """Return accuracies by resolution, and the differences of pairs."""
    text = NOTE_EXTENDED if any(map(num_extensions, results["rows"])) else ""
    text += NOTE_EPOCHS if any(row["epochs"] != 1 for row in results["rows"]) else ""
    text += accuracy_by_resolution(results, with_mean=True)
    if not found:
        return text
    uneven = len(seed_counts(results)) > 1
    header = ["method", "compared with", "σ", *(["seeds"] if uneven else [])]
    header += [f"{training_size(results)} px", "", "mean over resolutions", ""]
    settings = not shares_perturbation(results)
    significant = _significant(found)
    lines = [
        [
            row_label(pair.mine, settings=settings),
            UNPERTURBED
            if pair.is_perturbation_effect
            else row_label(pair.other, settings=settings),
            f"{pair.mine['perturbation']:g}",
            *([str(pair.mean.seeds if pair.mean else 0)] if uneven else []),
            *format_difference(pair.trained, bold=at_size),
            *format_difference(pair.mean, bold=on_mean),
        ]
        for pair, (at_size, on_mean) in zip(found, significant, strict=True)
    ]
    notes = NOTE_INTERVALS
    if any(map(any, significant)):
        families = [*dict.fromkeys(pair.family for pair in found)]
        notes += NOTE_HOLM.format(", or all ".join(families) if families[1:] else "of the table")
    if any(
        pair.mine["method"] != pair.other["method"]
        and num_extensions(pair.mine) != num_extensions(pair.other)
        for pair in found
    ):
        notes += NOTE_EXTENSIONS
    if any(pair.is_perturbation_effect and pair.mine["fields"] for pair in found):
        notes += NOTE_SEARCH
    return f"{text}\n{notes}{markdown_table(header, lines)}"


def _significant(found: Sequence[Pair]) -> list[list[bool]]:
    """Return whether the two differences of each pair are significant in their family."""
    significant: list[list[bool]] = [[] for _ in found]
    for family in {pair.family for pair in found}:
        places = [place for place, pair in enumerate(found) if pair.family == family]
        both = [each for p in places for each in (found[p].trained, found[p].mean)]
        flags = iter(holm(both))
        for place in places:
            significant[place] = [next(flags), next(flags)]
    return significant


def figure_of(results: Results, found: Sequence[Pair]) -> Any:
    """Draw accuracy against resolution above differences, one column per perturbation."""
    every = results["rows"]
    some_sigmas = {row["perturbation"] for row in every if row["method"] != "none"}
    sigmas = sorted(some_sigmas or {0.0}, reverse=True)
    drawing, axes = new_figure(len(sigmas), 2 if found else 1, width=7.2, height=5.0)
    if found:  # one line per difference, and one heading for each of our rows
        most = max(
            len(_lines([p for p in found if p.mine["perturbation"] == s], results)) for s in sigmas
        )
        heights = (5.0, 1.0 + 0.27 * most)
        axes[0, 0].get_gridspec().set_height_ratios(heights)
        drawing.set_figheight(sum(heights))
    for column, sigma in enumerate(sigmas):
        top = axes[0, column]
        some = [r for r in every if r["method"] == "none" or r["perturbation"] == sigma]
        accuracy_curves(top, results, some, lambda row, _: _style(row, every))
        top.set_title(f"perturbation {sigma:g}", fontsize=11)
        top.set_ylabel("top-1 accuracy, %")
        top.sharey(axes[0, 0])
        if found:
            pairs = [pair for pair in found if pair.mine["perturbation"] == sigma]
            draw_forest(axes[1, column], _lines(pairs, results), training_size(results))
            axes[1, column].set_ylim(most - 0.4, -0.6)  # the same line height in all columns
    drawn = {line.get_label(): line for axis in axes[0] for line in axis.get_lines()}
    drawn = {name: line for name, line in drawn.items() if not name.startswith("_")}
    columns = 3 if len(sigmas) > 1 else 2  # the names are long
    below = {"loc": "outside lower center", "ncols": columns, "frameon": False}
    drawing.legend(handles=[*drawn.values()], **below)
    note = describe_spread(results, "bands")
    if found:
        note += f"{'; below: ' if note else 'below: '}differences"
        note += ", 95 % confidence intervals" if describe_spread(results, "") else ""
    drawing.suptitle(f"{results['data']}\n{note or 'one seed'}", fontsize=10)
    return drawing


def _style(row: Results, every: Sequence[Results]) -> dict[str, Any]:
    """Return the style of a method; further rows of a method are hollow and dashed."""
    names = [row_name(each) for each in every if each["method"] == row["method"]]
    before = [*dict.fromkeys(names)].index(row_name(row))
    if not before:
        return method_style(row)
    line = DASHES[min(before, len(DASHES)) - 1]
    return method_style(row) | {"linestyle": line, "markerfacecolor": "white"}


def _lines(found: Sequence[Pair], results: Results) -> list[Line]:
    """Return a heading and the differences below it, for each kind of difference."""
    lines, before = [], None
    for pair in found:
        mine, other = short_name(pair.mine), short_name(pair.other)
        if not shares_perturbation(results) and row_label(pair.other) != row_name(pair.other):
            other += ", shared perturbation"  # by the batch, unlike ours
        heading, line = f"{mine}:", f"over {other}"
        if pair.mine["method"] == pair.other["method"]:
            heading, line = "over itself with fewer extensions:", mine
        if pair.is_perturbation_effect:
            heading = f"over {UNPERTURBED}:"
        if heading != before:
            lines.append(Line(heading, {}, None, None))
        before = heading
        style = {**_style(pair.mine, results["rows"]), "linestyle": "none"}
        style.pop("markerfacecolor", None)
        if style["marker"] == "x":  # it has no hollow form
            style["marker"] = "X"
        lines.append(Line(line, style, pair.trained, pair.mean))
    return lines


def brief_table(results: Results) -> str:
    """Return one line per method, with differences from our extended method if it exists."""
    pairs = _brief_pairs(results)
    size, every = training_size(results), [str(r) for r in results["resolutions"]]
    settings = not shares_perturbation(results)

    def accuracy(row: Results | None) -> list[str]:
        if row is None:
            return ["–", "–"]
        return [format_mean(row["top1"][size], 1), format_mean(mean_over_views(row, every), 1)]

    header = ["method", f"{size} px", "mean", f"extended, {size} px", "extended, mean"]
    lines = [
        [row_label(row, settings=settings), *accuracy(row), *accuracy(extended)]
        for row, extended in pairs
    ]
    text = _describe_brief(results, pairs)
    ours = next((e for row, e in reversed(pairs) if e and row["method"] in OURS), None)
    if ours is not None:
        header += ["difference", "difference, extended"]
        for line, pair in zip(lines, pairs, strict=True):
            for other in pair:
                differs = other is not None and other is not ours
                found = compare(ours, other, every) if other and differs else None
                line.append(format_difference(found)[0])
        text += (
            f" *Difference*: {row_name(ours)}, minus the row, of the mean; "
            "paired by seed, with 95 % confidence intervals, not corrected for multiple tests."
        )
    return f"{text}\n\n{markdown_table(header, lines)}{describe_missing(results)}"


def brief_figure(results: Results) -> Any:
    """Draw the mean over resolutions without and with extensions, one line per method."""
    pairs, every = _brief_pairs(results), [str(r) for r in results["resolutions"]]
    drawing, axes = new_figure(1, width=7.6, height=1.3 + 0.33 * len(pairs))
    axis = axes[0, 0]
    for place, pair in enumerate(pairs):
        for extended, row in enumerate(pair):
            if row is None:
                continue
            found = mean_over_views(row, every)
            style = {**style_of(row["method"]), "linestyle": "none"}
            style |= {"markerfacecolor": "white"} if extended else {}
            height = place if pair[1] is None else place - 0.15 + 0.3 * extended
            axis.plot(found["values"], [height] * len(found["values"]), "|", color="0.4", ms=8)
            axis.errorbar(found["mean"], height, xerr=found["std"], capsize=3, ms=7, **style)
    axis.set_yticks(range(len(pairs)), [short_name(row) for row, _ in pairs])
    axis.set(xlabel="top-1 accuracy, %, mean over resolutions", ylim=(len(pairs) - 0.5, -0.5))
    axis.grid(alpha=0.25)
    axis.set_title(
        f"{results['data']}\n"
        "filled: alone; hollow: with rotated values, locality bias\n"
        "ticks: seeds; bars: ± one standard deviation",
        fontsize=10,
    )
    return drawing


def _brief_pairs(results: Results) -> list[tuple[Results, Results | None]]:
    """Return rows with perturbation and no extension, each with its extended row or None."""
    sigma = max(row["perturbation"] for row in results["rows"])
    found = [r for r in results["rows"] if r["method"] == "none" or r["perturbation"] == sigma]
    extended = {
        id(pair.other): pair.mine
        for pair in extension_pairs({**results, "rows": found}, len(EXTENSIONS))
    }
    return [(row, extended.get(id(row))) for row in found if not num_extensions(row)]


def _describe_brief(results: Results, pairs: Sequence[tuple[Results, Results | None]]) -> str:
    some = [row for pair in pairs for row in pair if row is not None]
    sigma = max(row["perturbation"] for row in some)
    seeds = describe_seeds({"rows": some})
    seeds = "One seed." if seeds == "one seed" else f"Mean ± standard deviation of {seeds}."
    return (
        f"Top-1 accuracy, %, {describe_validation(results)}: {results['data']}, perturbation of "
        f"the coordinates σ = {sigma:g}. {seeds} *Mean*: over "
        f"{len(results['resolutions'])} resolutions. *Extended*: with rotated values and "
        "locality bias, which any rotation can have."
    )


STUDY = Study(
    name="comparison",
    title="Position encodings compared",
    seeds=more_seeds,
    rows=rows,
    table=lambda results: table_of(results, all_pairs(results)),
    figure=lambda results: figure_of(results, all_pairs(results)),
    brief=Brief(brief_table, brief_figure),
)
