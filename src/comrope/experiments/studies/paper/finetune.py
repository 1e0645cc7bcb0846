"""Tab. 4: fine-tuning with rotations, added to a model that was pre-trained with APE."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from comrope.experiments.common.figures import new_figure, style_of
from comrope.experiments.config import starts_at_zero
from comrope.experiments.studies.stats import compare
from comrope.experiments.studies.study import (
    PRESETS,
    Preset,
    Results,
    Row,
    Scale,
    Start,
    Study,
    method_label,
)
from comrope.experiments.studies.tables import (
    describe_spread,
    describe_validation,
    format_difference,
    format_mean,
    markdown_table,
    row_label,
    training_size,
)

__all__ = ["STUDY"]

SCALES = {
    name: Scale(f"{PRESETS[name].recipe}_finetune", PRESETS[name].data)
    for name in ("demo", "small", "paper")
}


def rows(preset: Preset) -> list[Row]:
    """Return rows without perturbation, because the pre-trained model had none."""
    return [Row(m, perturbation=0.0, finetuned=True) for m in preset.methods]


def table(results: Results) -> str:
    paper, resolutions = results["paper"]["finetune"], [str(r) for r in results["resolutions"]]
    size, found = training_size(results), results["rows"]
    baseline = next((r for r in found if r["finetuned"] and r["method"] == "ape"), None)
    names = [row_label(row) if row["finetuned"] else "before" for row in found]
    several = len(resolutions) > 1
    lines = []
    for name, row in zip(names, found, strict=True):
        printed = paper["top1"].get(row["method"]) if row["finetuned"] else None
        lines.append(
            [
                name,
                _start_of_angles(row["method"]),
                format_mean(row["top1"][size]),
                *_over(row, baseline, [size]),
                *(_over(row, baseline, resolutions) if several else []),
                "–" if printed is None else f"{printed:.2f}",
            ]
        )
    header = ["method", "angles at the start", f"{size} px", "over APE", ""]
    header += [*(["over APE, mean over resolutions", ""] if several else []), "the paper's"]
    text = _describe(results) + markdown_table(header, lines)
    if not several:
        return text
    by_size = [
        [name, *(format_mean(row["top1"][r], 1) for r in resolutions)]
        for name, row in zip(names, found, strict=True)
    ]
    header = ["method", *(f"{r} px" for r in resolutions)]
    return f"{text}\nBy evaluation resolution:\n\n{markdown_table(header, by_size)}"


def _describe(results: Results) -> str:
    optim, train = results["recipe"]["optim"], results["recipe"]["train"]
    first = results.get("pretraining")
    start = f"`{train['start_from']}`,"
    if first is not None:
        start = f"a model trained with APE for {first['train']['epochs']} epochs (*before*), and"
    other = "" if results["preset"] == "paper" else "another model and data set, "
    return (
        f"Top-1 accuracy, %, {describe_validation(results)}: of {start} after {train['epochs']} "
        f"more with each method on top of its APE. Learning rate {optim['lr']:g}, of the angles "
        f"{optim['lr'] * optim['angle_lr_scale']:g}. *Over APE*: the difference from no rotation, "
        "paired by seed, with its 95 % confidence interval (Student's t). The paper's numbers are "
        f"of {other}{results['paper']['finetune']['data']}, after 4 epochs.\n\n"
    )


def _start_of_angles(method: str) -> str:
    words = {"ape": "none", "rope": "vanilla RoPE's"}
    return words.get(method) or ("zero" if starts_at_zero(method) else "random")


def _over(row: Results, baseline: Results | None, sizes: Sequence[str]) -> list[str]:
    """Return the two columns of a difference; both runs of a seed start from the same weights."""
    if baseline is None or row is baseline or not row["finetuned"]:
        return ["–", "–"]
    return format_difference(compare(row, baseline, sizes))


def figure(results: Results) -> Any:
    """Draw accuracy at the training resolution, one line per method; to the right the paper's."""
    drawing, axes = new_figure(2, width=5.6, height=3.6)
    before = [row for row in results["rows"] if not row["finetuned"]]
    after = [row for row in results["rows"] if row["finetuned"]]
    size = str(results["trained_at"])
    size = size if size in after[0]["top1"] else next(iter(after[0]["top1"]))
    ours, theirs = axes[0]
    for place, row in enumerate(after):
        found, style = row["top1"][size], style_of(row["method"])
        ours.plot(found["values"], [place] * len(found["values"]), "|", color="0.4", markersize=9)
        ours.errorbar(found["mean"], place, xerr=found["std"], capsize=3, markersize=7, **style)
    for row in before:
        start = row["top1"][size]["mean"]
        ours.axvline(start, color="0.5", linestyle="--", linewidth=1, label="before")
        ours.legend(frameon=False, fontsize=9)
    ours.set_title(f"ours: {results['data']}", fontsize=10)
    paper = results["paper"]["finetune"]
    for place, row in enumerate(after):
        if row["method"] in paper["top1"]:
            theirs.plot(
                paper["top1"][row["method"]], place, markersize=7, **style_of(row["method"])
            )
    theirs.set_title(f"the paper: {paper['data']}", fontsize=10)
    names = [method_label(row["method"], short=True) for row in after]
    ours.set_yticks(range(len(names)), names)
    theirs.set_yticks(range(len(names)), [])
    for axis in axes[0]:
        axis.set(xlabel="top-1 accuracy, %", ylim=(len(names) - 0.5, -0.5))
        axis.grid(alpha=0.25)
    spread = describe_spread(results, "bar")
    spread = f" ({spread})" if spread else ""
    epochs = results["recipe"]["train"]["epochs"]
    drawing.suptitle(
        f"After {epochs} epochs on top of a model trained with APE{spread}", fontsize=11
    )
    return drawing


STUDY = Study(
    name="finetune",
    title="Fine-tuning a model that was pre-trained with APE",
    where="Tab. 4",
    scales=SCALES,
    start=Start(Row("ape", perturbation=0.0), decides=("model.ape", "model.init")),
    rows=rows,
    table=table,
    figure=figure,
)
