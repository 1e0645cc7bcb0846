"""Tables of ``comrope bench gpt``: tokens per second, and what the study of languages costs."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from comrope.experiments.config import load_recipe
from comrope.experiments.studies.fair.language import SCALES, STUDY
from comrope.experiments.studies.fair.language_search import STUDY as SEARCH
from comrope.experiments.studies.study import PRESETS, Results
from comrope.experiments.studies.tables import markdown_table

__all__ = ["gpt_hours", "gpt_tokens"]

PRESET = "paper"
ROWS_OF = "tiny"  # its rows have both starts, as those of PRESET after a search


def gpt_tokens(results: Results) -> str:
    """Return the table of tokens per second of a training step, by row."""
    sizes, machine = results["setting"]["gpt"], results["machine"]
    lines = [
        [
            name,
            f"{step['ms']:.2f} ± {(step['high'] - step['low']) / 2:.2f}",
            f"{_tokens_per_second(results, step):,.0f}",
            *(f"{1 / step['of'][label]:.3f}" for label in ("rope", "none")),
        ]
        for name, step in _steps(results).items()
    ]
    header = ["", "step, ms", "tokens/s", "÷ vanilla RoPE", "÷ no positions"]
    title = next(row["part"] for row in results["rows"] if row["suite"] == "gpt")
    command = re.sub(r" --(?:out \S+|quiet)", "", results["command"])
    return (
        f"{markdown_table(header, lines)}\n{title}, compiled, vocabulary of "
        f"{sizes['vocab_size']:,}: forward and backward, without the optimizer. Medians ± half the "
        "distance of the quartiles. Ratios of speeds are from times in the same rounds; *vanilla "
        f"RoPE* is `rope`. `{command}`, {machine['device']}, torch {machine['torch']}, triton "
        f"{machine['triton']}, {machine['date']}.\n"
    )


def gpt_hours(results: Results) -> str:
    """Return the table of GPU hours of the study of languages and its search at ``paper``."""
    config = load_recipe(SCALES[PRESET].recipe)
    tokens = config.train.epochs * config.language.epoch_sequences * config.language.context
    hours = {
        name: tokens / _tokens_per_second(results, step) / 3600
        for name, step in _steps(results).items()
    }
    gpus, lines = (1, 8, 64), []
    for study, label in ((STUDY, "the study"), (SEARCH, "its search")):
        counts = Counter(row.method for row in study.rows(PRESETS[ROWS_OF]))
        counts = Counter({m: study.seeds(PRESETS[PRESET]) * n for m, n in counts.items()})
        if study is STUDY:
            lines += [
                [f"a run: {method}", "1", *(f"{hours[method] / n:.2g}" for n in gpus)]
                for method in counts
            ]
        total = sum(count * hours[method] for method, count in counts.items())
        cells = (f"{counts.total()}", *(f"{total / n:.3g}" for n in gpus))
        lines.append([f"**{label}**", *(f"**{cell}**" for cell in cells)])
    header = ["hours", "runs", *(f"{n} GPU{'s' * (n > 1)}" for n in gpus)]
    machine = results["machine"]
    return (
        f"{markdown_table(header, lines)}\nComputed, not run: hours = {tokens:,} tokens of a run / "
        "(tokens per second of one GPU × GPUs × 3,600), with both starts of learned rotations. "
        "Rows with rotated values are counted like those without. "
        f"{machine['device']}, torch {machine['torch']}, {machine['date']}.\n"
    )


def _steps(results: Results) -> dict[str, dict[str, Any]]:
    """Return the compiled training steps of the suite, by the name of their row."""
    return {
        row["name"]: row["measures"]["step"]
        for row in results["rows"]
        if row["suite"] == "gpt" and row["measures"] and row["compiled"]
    }


def _tokens_per_second(results: Results, step: dict[str, Any]) -> float:
    sizes = results["setting"]["gpt"]
    return 1e3 * float(sizes["batch"] * sizes["context"]) / float(step["ms"])
