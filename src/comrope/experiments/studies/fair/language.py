"""Language modelling: what learned rotations add to the best fixed frequencies.

The reference of every row is vanilla RoPE with the base that a search on held-out text found for
the context of training (``language_search``), with rotated values if the row has them.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import comrope
from comrope import scaling
from comrope.analysis import rotary_modules
from comrope.experiments.common.figures import new_figure, style_of
from comrope.experiments.config import Config
from comrope.experiments.studies.measure import evaluating
from comrope.experiments.studies.plots import curve
from comrope.experiments.studies.stats import compare, holm
from comrope.experiments.studies.study import (
    Measurement,
    Preset,
    Results,
    Row,
    Scale,
    Study,
    packaged,
)
from comrope.experiments.studies.tables import (
    describe_seeds,
    format_difference,
    format_mean,
    markdown_table,
    row_name,
)
from comrope.experiments.tasks.language import TextView
from comrope.experiments.tasks.token_scores import position_edges

__all__ = ["BASE", "DEMO", "SCALES", "STUDY", "Kind", "learned_rows", "rope_row", "searched"]

BASE = 10000.0  # the usual one
SCALES = {
    "demo": Scale("language", "Python's standard library, bytes, GPT-nano, context 256, 75 steps"),
    "tiny": Scale("language", "Python's standard library, bytes, GPT-nano, context 256"),
    "small": Scale("language_small", "Python's standard library, bytes, GPT-tiny, context 512"),
    "paper": Scale("language_paper", "FineWeb-Edu, GPT-2's tokens, GPT-small, context 1,024"),
}
DEMO = {"language.epoch_sequences": 1200, "language.validation_bytes": 65536}
VALUES, SUFFIX = "model.rotate_values", ", rotated values"
METRIC = "bits_per_byte"
QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)
LONGER = 4  # times the context of training, for scalings at evaluation and for differences
NAMES = {"rope": "RoPE", "rope-mixed": "RoPE-Mixed", "comrope-ld": "ComRoPE-LD"}
NOTE = (
    "Bits per byte of held-out text, lower is better, by context length. Every view scores the "
    "same bytes. *from base*: the initial frequencies of learned rotations. *shared*: one set of "
    "frequencies for all heads and layers. *p-RoPE*: a quarter of the planes, the slowest, do not "
    "rotate.\n\n"
)
NOTE_DIFFERENCES = (
    "Differences in bits per byte, paired by seed: their mean and 95 % confidence interval "
    "(Student's t); negative is better. Bold: significant after Holm correction over all "
    "differences of the table.\n\n"
)


class Kind(NamedTuple):
    """A way to learn frequencies."""

    method: str
    shared: bool = False  # by all heads and layers

    @property
    def name(self) -> str:
        return NAMES.get(self.method, self.method) + (", shared" if self.shared else "")


KINDS = (
    Kind("rope-mixed"), Kind("rope-mixed", True), Kind("comrope-ld"), Kind("comrope-torus")
)  # fmt: skip


def searched(preset: Preset) -> dict[str, Any]:
    """Return what a search found at a preset: "base", and "rates" by the name of a row."""
    found = packaged("fair/language.yaml").get(SCALES[preset.name].recipe) or {}
    return {"base": found.get("base", BASE), "rates": found.get("rates", {})}


def rope_row(base: float, **changes: Any) -> Row:
    """Return the row of vanilla RoPE with a base."""
    fields = (("model.base", base),)
    return Row("rope", 0.0, fields=fields, label=f"RoPE, base {base:,.10g}", **changes)


def learned_rows(base: float, rates: dict[str, float]) -> list[Row]:
    """Return the rows whose rotations start with the frequencies of a base.

    Args:
        base: The base.
        rates: Factors on the learning rate of the angles, by the name of a row; others have that of
            the recipe.
    """
    found = []
    for kind in KINDS:
        label = f"{kind.name}, from base {base:,.10g}"
        fields: dict[str, Any] = {"model.base": base}
        if kind.shared:
            fields["model.share_rotations"] = "both"
        if label in rates:
            fields["optim.angle_lr_scale"] = rates[label]
        found.append(Row(kind.method, 0.0, label=label).with_fields(fields))
    return found


def rows(preset: Preset) -> list[Row]:
    """Return every rotation from both bases, without and with rotated values; and no positions."""
    own = searched(preset)
    bases = [*dict.fromkeys((BASE, own["base"]))]
    p_rope = rope_row(BASE).with_fields({"model.rotated_share": 0.75}, label="p-RoPE, 0.75")
    plain = [*map(rope_row, bases), p_rope]
    if preset.name == "demo":
        plain += learned_rows(bases[-1], own["rates"])[2:3]
    else:
        plain += [row for base in bases for row in learned_rows(base, own["rates"])]
    values = [row.with_fields({VALUES: True}, label=row.label + SUFFIX) for row in plain]
    found = [Row("none", 0.0), *plain, *(values if preset.name != "demo" else values[1:2])]
    return [row.with_fields(DEMO) for row in found] if preset.name == "demo" else found


def seeds(preset: Preset) -> int:
    return {"demo": 1, "tiny": 5}.get(preset.name, preset.seeds)


def measure(config: Config, folder: Path) -> dict[str, Any]:
    """Return the wavelengths of a trained run, and bits per byte with scaled rotations.

    Returns:
        "wavelengths": quantiles over all planes, in contexts of training. "scaled": bits per byte
        at ``LONGER`` contexts, by the name of the scaling.
    """
    context, factor = config.language.context, float(LONGER)
    view = TextView(LONGER * context)
    kinds = {"NTK": scaling.NTK(factor), "YaRN": scaling.YaRN(factor, float(context))}
    with evaluating(config, folder) as evaluate:
        found: dict[str, Any] = {"wavelengths": _wavelengths(evaluate.model, context), "scaled": {}}
        for name, kind in kinds.items() if found["wavelengths"] else ():
            with comrope.scaled(evaluate.model, kind):
                found["scaled"][name] = evaluate(view=view)["bits_per_byte"]
    return found


@torch.no_grad()
def _wavelengths(model: nn.Module, context: int) -> dict[str, float]:
    """Return quantiles of the wavelengths of all planes, in contexts; empty without rotations."""
    ropes = rotary_modules(model).values()
    if not ropes:
        return {}
    speeds = torch.cat([rope.spectrum()[1].flatten().double().abs().cpu() for rope in ropes])
    found = (2 * torch.pi / speeds.clamp_min(1e-9) / context).quantile(speeds.new_tensor(QUANTILES))
    return dict(zip(map(str, QUANTILES), found.tolist(), strict=True))


def table(results: Results) -> str:
    """Return bits per byte by length, wavelengths and scalings, and the differences of rows."""
    lengths = _lengths(results)
    trained, longer = str(results["recipe"]["language"]["context"]), _longer(results)
    lines = [
        [row_name(row), *(format_mean(row[METRIC][length], 3) for length in lengths)]
        for row in results["rows"]
    ]
    text = NOTE + markdown_table(["row", *(f"{length} tokens" for length in lengths)], lines)
    text += _table_of_frequencies(results, longer)
    pairs = _pairs(results)
    found = [
        [compare(mine, other, [view], METRIC, lower_is_better=True) for view in (trained, longer)]
        for mine, other in pairs
    ]
    significant = iter(holm([each for both in found for each in both]))
    lines = [
        [
            row_name(mine),
            row_name(other),
            *(
                cell
                for each in both
                for cell in format_difference(each, bold=next(significant), digits=3)
            ),
        ]
        for (mine, other), both in zip(pairs, found, strict=True)
    ]
    header = ["row", "compared with", f"{trained} tokens", "", f"{longer} tokens", ""]
    return f"{text}\n{NOTE_DIFFERENCES}{markdown_table(header, lines)}" if pairs else text


def _table_of_frequencies(results: Results, longer: str) -> str:
    lines = [
        [
            row_name(row),
            *(f"{row['wavelengths'][str(q)]['mean']:.3g}" for q in QUANTILES),
            format_mean(row[METRIC][longer], 3),
            *(format_mean(row["scaled"][name], 3) for name in ("NTK", "YaRN")),
        ]
        for row in results["rows"]
        if row.get("wavelengths")
    ]
    names = ("shortest", "25 %", "median", "75 %", "longest")
    header = ["row", *names, f"{longer} tokens", "NTK", "YaRN"]
    return (
        "\nWavelengths of all planes after training, in training contexts. Bits per byte at "
        f"{longer} tokens, also with rotations scaled by {LONGER} in evaluation.\n\n"
        + markdown_table(header, lines)
    )


def _lengths(results: Results) -> list[str]:
    return [*results["rows"][0][METRIC]]


def _longer(results: Results) -> str:
    return str(LONGER * results["recipe"]["language"]["context"])


def _rotates_values(row: Results) -> bool:
    return bool(row["fields"].get(VALUES))


def _pairs(results: Results) -> list[tuple[Results, Results]]:
    """Return every row with the reference, then rows with rotated values with those without."""
    rows = [row for row in results["rows"] if row["method"] != "none"]
    by_name = {row_name(row): row for row in rows}
    reference = {}
    for row in rows:  # the last base is the one that was searched
        if row["method"] == "rope" and "model.rotated_share" not in row["fields"]:
            reference[_rotates_values(row)] = row
    found = [
        (row, reference[_rotates_values(row)])
        for row in rows
        if reference.get(_rotates_values(row), row) is not row
    ]
    plain = [(row, by_name.get(row_name(row).removesuffix(SUFFIX))) for row in rows]
    return found + [(row, other) for row, other in plain if other is not None and other is not row]


def figure(results: Results) -> Any:
    """Draw bits per byte against length and against position, without and with rotated values."""
    groups = [
        [row for row in results["rows"] if _rotates_values(row) == rotated]
        for rotated in (False, True)
    ]
    groups = [group for group in groups if group]
    drawing, axes = new_figure(len(groups), 2, width=6.2, height=4.2)
    lengths = _lengths(results)
    context = results["recipe"]["language"]["context"]
    for column, group in enumerate(groups):
        above, below = axes[:, column]
        for row in group:
            style = _style(row, results)
            curve(above, [*map(int, lengths)], [row[METRIC][n] for n in lengths], **style)
            xs, means = _by_position(row, lengths[-1])
            below.plot(xs, means, linewidth=1.5, **{**style, "marker": ""})
        for axis in (above, below):
            axis.set_xscale("log", base=2)
            axis.axvline(context, color="0.8", zorder=0, linewidth=1)
            axis.grid(alpha=0.25)
        above.set_title(
            "with rotated values" if column else "queries and keys rotated", fontsize=10
        )
        above.set(xlabel="context length in evaluation, tokens", ylabel="bits per byte")
        below.set(xlabel=f"position in a context of {lengths[-1]} tokens", ylabel="bits per token")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    drawing.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=4,
        fontsize=8,
        frameon=False,
        handlelength=4,
    )
    drawing.suptitle(
        f"{results['data']}\n{describe_seeds(results)}, band: ± one standard deviation; grey line: "
        "the training context",
        fontsize=10,
    )
    return drawing


def _style(row: Results, results: Results) -> dict[str, Any]:
    """Return the method's colour; dashed for the searched base, pale for shared or p-RoPE."""
    bases = [*dict.fromkeys(r["fields"].get("model.base", BASE) for r in results["rows"])]
    fields = row["fields"]
    pale = "model.share_rotations" in fields or "model.rotated_share" in fields
    dashed = fields.get("model.base", BASE) == bases[-1] != bases[0]
    return {
        **style_of(row["method"]),
        "label": row_name(row).removesuffix(SUFFIX),
        "linestyle": "--" if dashed else "-",
        "alpha": 0.45 if pale else 1.0,
    }


def _by_position(row: Results, length: str) -> tuple[list[float], list[float]]:
    """Return the middle of every bin of positions, and the mean bits over seeds."""
    edges = position_edges(int(length))
    every = [run["figures"][length]["bits_by_position"] for run in row["runs"]]
    bins = [
        (max(1.0, (low * (high - 1)) ** 0.5), statistics.fmean(values))
        for low, high, values in zip(edges, edges[1:], zip(*every, strict=True), strict=False)
        if None not in values
    ]
    return [x for x, _ in bins], [y for _, y in bins]


STUDY = Study(
    name="language",
    title="Language modelling: learned rotations and the best fixed frequencies",
    task="language",
    scales=SCALES,
    seeds=seeds,
    rows=rows,
    measurement=Measurement(
        "rotations", measure, needs_data=True, averaged=("wavelengths", "scaled")
    ),
    table=table,
    figure=figure,
)
