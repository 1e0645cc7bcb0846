"""Language modelling: what learned rotations add to the best fixed frequencies.

The reference of every row is vanilla RoPE with the base that a search on held-out text found for
the context of training (``language_search``), with rotated values if the row has them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import comrope
from comrope import scaling
from comrope.analysis import rotary_modules
from comrope.experiments.config import Config
from comrope.experiments.studies.fair.language_figure import figure
from comrope.experiments.studies.fair.language_pairs import (
    BASE,
    LONGER,
    METRIC,
    SUFFIX,
    VALUES,
    compared_views,
    lengths_of,
    pairs_of,
)
from comrope.experiments.studies.measure import evaluating
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
    format_difference,
    format_mean,
    markdown_table,
    row_name,
)
from comrope.experiments.tasks.language import TextView

__all__ = ["DEMO", "SCALES", "STUDY", "Kind", "learned_rows", "rope_row", "searched"]

SCALES = {
    "demo": Scale("language", "Python's standard library, bytes, GPT-nano, context 256, 75 steps"),
    "tiny": Scale("language", "Python's standard library, bytes, GPT-nano, context 256"),
    "small": Scale("language_small", "Python's standard library, bytes, GPT-tiny, context 512"),
    "paper": Scale("language_paper", "FineWeb-Edu, GPT-2's tokens, GPT-small, context 1,024"),
}
DEMO = {"language.epoch_sequences": 1200, "language.validation_bytes": 65536}
QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)
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
    lengths = lengths_of(results)
    trained, longer = compared_views(results)
    lines = [
        [row_name(row), *(format_mean(row[METRIC][length], 3) for length in lengths)]
        for row in results["rows"]
    ]
    text = NOTE + markdown_table(["row", *(f"{length} tokens" for length in lengths)], lines)
    text += _table_of_frequencies(results, longer)
    lines = [
        [
            row_name(pair.mine),
            row_name(pair.other),
            *(
                cell
                for each, bold in zip(pair.differences, pair.significant, strict=True)
                for cell in format_difference(each, bold=bold, digits=3)
            ),
        ]
        for pair in pairs_of(results)
    ]
    header = ["row", "compared with", f"{trained} tokens", "", f"{longer} tokens", ""]
    return f"{text}\n{NOTE_DIFFERENCES}{markdown_table(header, lines)}" if lines else text


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
