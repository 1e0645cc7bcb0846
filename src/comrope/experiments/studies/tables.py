"""Results as Markdown: ours, and the paper's figures beside them, said to be of other data."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from comrope.experiments.studies import LABELS
from comrope.experiments.studies.markdown import (
    by_resolution,
    class_token_said,
    fields_said,
    interval,
    label,
    named,
    number,
    rows,
    seeds_said,
    usual_size,
    validated_on,
)
from comrope.experiments.studies.stats import compare

__all__ = ["ELSEWHERE", "below", "beside_the_papers", "made_elsewhere", "rows", "table"]

# Studies whose table and figure have a file of their own, which stands on this one: which.
ELSEWHERE = {
    "block-size": "paper.sweeps",
    "perturbation": "paper.sweeps",
    "video": "paper.video",
    "backwards": "backwards",
    "detection": "paper.detection",
    "comparison": "fair.comparison",
    "tuning": "fair.tuning",
    "ablation": "ablation",
    "values": "fair.values",
    "units": "units",
    "angles": "angles",
}

TELL_THEMSELVES = ("tuning", "ablation")  # what their rows set


def made_elsewhere(name: str, what: str) -> Callable[[dict[str, Any]], Any]:
    """The ``table`` or ``figure`` of such a study."""
    module = importlib.import_module(f"comrope.experiments.studies.{ELSEWHERE[name]}")
    return getattr(module, what)


def table(name: str, results: dict[str, Any]) -> str:
    """The whole of table.md."""
    body = _body(name)(results)
    where = f" ({results['where']} of the paper)" if results["where"] else ""
    seeds = {"": "", "one seed": " One seed."}
    said = seeds_said(results)
    several = f" Mean ± standard deviation of {said}."
    if name == "angles":  # of all planes of all of them at once
        several = f" {said}."
    if name not in TELL_THEMSELVES:
        body += _settings_said(results)
    missing = "; ".join(results.get("missing") or ())
    body += f"\nNot run yet: {missing}.\n" if missing else ""
    told = f"Ours: {results['data']}.{seeds.get(said, several)}\n\n{body}"
    return f"# {results['title']}{where}\n\n{below(told, results)}"


def below(text: str, results: dict[str, Any]) -> str:
    """A table, and under it how it was made."""
    machine = results["machine"]
    made = f"{machine['device']}, torch {machine['torch']}, {machine['date']}"
    return f"{text}\n`{results['command']}`, {made}\n"


def _settings_said(results: dict[str, Any]) -> str:
    """Fields that rows set: those that all have alike, and row by row."""
    cells = results.get("cells", ())
    sets = [set(cell.get("fields", {}).items()) for cell in cells]
    common = set.intersection(*sets) if len(sets) > 1 else set()
    told = []
    if common:
        alike = {
            name: value for name, value in cells[0]["fields"].items() if (name, value) in common
        }
        told.append(f"all rows: {fields_said(alike)}")
    own = {
        named(cell): {n: v for n, v in cell.get("fields", {}).items() if (n, v) not in common}
        for cell in cells
    }
    told += [f"{name}: {fields_said(fields)}" for name, fields in own.items() if fields]
    return f"\nBesides the recipe's settings: {'; '.join(told)}.\n" if told else ""


def _body(name: str) -> Callable[[dict[str, Any]], str]:
    if name in ELSEWHERE:
        return made_elsewhere(name, "table")
    return {
        "classification": beside_the_papers,
        "offset": _offset,
        "distribution": _distribution,
        "finetune": _finetune,
        "cost": _cost,
    }[name]


def beside_the_papers(
    results: dict[str, Any], study: str = "classification", *, with_mean: bool = False
) -> str:
    """Accuracy by resolution, ours and the paper's."""
    ours = by_resolution(results, with_mean=with_mean)
    return f"{ours}\n{_paper_by_resolution(results, study)}"


def _paper_by_resolution(results: dict[str, Any], study: str) -> str:
    paper = results["paper"][study]
    wanted = {(c["method"], f"{c['perturbation']:g}") for c in results["cells"]}
    lines = [
        [LABELS[method], sigma, *(f"{v:.2f}" for v in values)]
        for method, by_sigma in paper["top1"].items()
        for sigma, values in by_sigma.items()
        if (method, sigma) in wanted
    ]
    if not lines:
        return ""
    # The paper's ratios of resolution to training resolution are those of our columns.
    header = ["method", "σ", *(f"{r} px" for r in paper["resolutions"])]
    other = "" if results["preset"] == "paper" else ", on another data set"
    return (
        f"The paper's{other} ({paper['data']} trained at "
        f"{paper['trained_at']} px, blocks of 8):\n\n{rows(header, lines)}"
    )


def _offset(results: dict[str, Any]) -> str:
    rhos = list(results["cells"][0]["offset"])
    lines = []
    for cell in results["cells"]:
        curve = cell["offset"]
        moved = max(
            abs(run["offset"][rho] - run["offset"]["0"]) for run in cell["runs"] for rho in rhos
        )
        name = f"{label(cell)}{class_token_said(cell)}"
        lines.append([name, *(number(curve[rho]) for rho in rhos), f"{moved:.2f}"])
    header = ["method", *(f"ρ = {rho}" for rho in rhos), "largest change"]
    return (
        f"Top-1 accuracy, %, at {results['trained_at']} px, when the coordinates of every image "
        "are moved by N(0, ρ²) image widths; the largest change over ρ and seeds, in points.\n\n"
        + rows(header, lines)
        + "\nThe paper shows this as a figure without numbers: LieRE decays, ComRoPE stays.\n"
    )


def _distribution(results: dict[str, Any]) -> str:
    paper = results["paper"]["distribution"]
    lines = [
        [
            label(cell),
            str(cell["block_size"]),
            number(cell["std"], 3),
            f"{paper['std'][cell['method']][str(cell['block_size'])]:.3f}",
        ]
        for cell in results["cells"]
    ]
    header = ["method", "block", "ours", f"paper ({paper['data']})"]
    return (
        "Standard deviation of the elements above the diagonals of all angle matrices after "
        f"training.\n\n{rows(header, lines)}"
    )


def _finetune(results: dict[str, Any]) -> str:
    paper, resolutions = results["paper"]["finetune"], [str(r) for r in results["resolutions"]]
    size, cells = usual_size(results), results["cells"]
    unswapped = next((c for c in cells if c["finetuned"] and c["method"] == "ape"), None)
    starts = {"ape": "none", "rope": "vanilla RoPE's"}
    names = [label(cell) if cell["finetuned"] else "before" for cell in cells]
    lines = []
    for name, cell in zip(names, cells, strict=True):
        printed = paper["top1"].get(cell["method"]) if cell["finetuned"] else None
        lines.append(
            [
                name,
                starts.get(cell["method"], "zero"),
                number(cell["top1"][size]),
                *_over(cell, unswapped, [size]),
                *([] if len(resolutions) == 1 else _over(cell, unswapped, resolutions)),
                "–" if printed is None else f"{printed:.2f}",
            ]
        )
    header = ["method", "angles at the start", f"{size} px", "over APE", ""]
    header += [*([] if len(resolutions) == 1 else ["over APE, mean over resolutions", ""])]
    header += ["the paper's"]
    text = _how_finetuned(results) + rows(header, lines)
    if len(resolutions) == 1:
        return text
    by_size = [
        [name, *(number(cell["top1"][r], 1) for r in resolutions)]
        for name, cell in zip(names, cells, strict=True)
    ]
    header = ["method", *(f"{r} px" for r in resolutions)]
    return f"{text}\nBy evaluation resolution:\n\n{rows(header, by_size)}"


def _how_finetuned(results: dict[str, Any]) -> str:
    optim, train = results["recipe"]["optim"], results["recipe"]["train"]
    first = results.get("pretraining")
    start = f"`{train['start_from']}`,"
    if first is not None:
        start = f"a model trained with APE for {first['train']['epochs']} epochs (*before*), and"
    other = "" if results["preset"] == "paper" else "another model and data set, "
    return (
        f"Top-1 accuracy, %, {validated_on(results)}: of {start} after {train['epochs']} more with "
        f"each method on top of its APE. Learning rate {optim['lr']:g}, of the angles "
        f"{optim['lr'] * optim['angle_lr_scale']:g}. *Over APE*: the difference from no rotation, "
        "seed by seed, and its 95 % interval (Student's t). The paper's figures are of "
        f"{other}{results['paper']['finetune']['data']}, after 4 epochs.\n\n"
    )


def _over(
    cell: dict[str, Any], unswapped: dict[str, Any] | None, sizes: Sequence[str]
) -> list[str]:
    """Two columns, of differences seed by seed: both of a seed start from the same weights."""
    if unswapped is None or cell is unswapped or not cell["finetuned"]:
        return ["–", "–"]
    return interval(compare(cell, unswapped, sizes))


def _cost(results: dict[str, Any]) -> str:
    paper = results["paper"]
    parameters = [
        [
            LABELS[row["method"]],
            str(row["block_size"]) if row["method"] != "ape" else "–",
            f"{row['parameters']:,}",
            row["formula"] or "–",
            "–" if row["expected"] is None else f"{row['expected']:,}",
        ]
        for row in results["parameters"]
    ]
    header = ["method", "block", "counted", "paper's formula", "its value"]
    text = f"Extra parameters of {results['counted_for']}.\n\n{rows(header, parameters)}\n"
    epochs = paper["cost"]["minutes_per_epoch"]
    checks = paper["cost"]["seconds_of_validation"]
    lines = [
        [
            LABELS[row["method"]],
            str(row["block_size"]) if row["error"] is not None else "–",
            f"{row['train_ms']:.1f}",
            f"{row['train_ratio']:.2f}",
            f"{row['inference_ms']:.1f}",
            f"{row['inference_ratio']:.2f}",
            f"{row['error']:.0e}" if row["error"] is not None else "–",
            _paper_ratio(epochs, row),
            _paper_ratio(checks, row),
        ]
        for row in results["times"]
    ]
    header = ["method", "block", "train step, ms", "÷ vanilla", "inference, ms", "÷ vanilla"]
    header += ["error", "paper: train", "paper: inference"]
    return text + (
        f"Time of {results['timed']}; medians. *Error*: of the logits "
        "against the block-wise matrix exponential in float32, checked before in the same run.\n"
        f"The paper's ratios are of other hardware ({paper['cost']['data']}).\n\n"
        + rows(header, lines)
    )


def _paper_ratio(times: dict[str, dict[str, float]], row: dict[str, Any]) -> str:
    found = times.get(row["method"], {}).get(str(row["block_size"]))
    return "–" if found is None else f"{found / times['rope']['2']:.2f}"
