"""The comparison for a reader with two minutes: methods as they are, and with what can be added."""

from __future__ import annotations

from typing import Any

from comrope.experiments.studies.beyond import OURS
from comrope.experiments.studies.comparison import how_much_added
from comrope.experiments.studies.markdown import (
    all_share_noise,
    interval,
    label,
    named,
    number,
    over_views,
    rows,
    seeds_said,
    usual_size,
    validated_on,
)
from comrope.experiments.studies.paired import compare, decided_together

__all__ = ["table"]

Cell = dict[str, Any]


def table(results: dict[str, Any]) -> str:
    """A row a method, with noise; if one of ours has what can be added, how far it is ahead."""
    sigma = max(cell["perturbation"] for cell in results["cells"])
    cells = [c for c in results["cells"] if c["method"] == "none" or c["perturbation"] == sigma]
    plain, full = ([c for c in cells if bool(how_much_added(c)) == more] for more in (False, True))
    # Of the two readings of vanilla RoPE, both of one method, it is the second that has more.
    last = {cell["method"]: cell for cell in plain}
    with_more = {id(last[cell["method"]]): cell for cell in full if cell["method"] in last}
    pairs = [(cell, with_more.get(id(cell))) for cell in plain]
    ours = next((cell for cell in reversed(full) if cell["method"] in OURS), None)
    size, every = usual_size(results), [str(r) for r in results["resolutions"]]
    alone = not all_share_noise(results)

    def accuracy(cell: Cell | None) -> list[str]:
        if cell is None:
            return ["–", "–"]
        return [number(cell["top1"][size], 1), number(over_views(cell, every), 1)]

    header = ["method", f"{size} px", "mean", f"with both, {size} px", "mean"]
    lines = [
        [label(cell, settings=alone), *accuracy(cell), *accuracy(more)] for cell, more in pairs
    ]
    told = _told(results, cells, sigma)
    if ours is not None:
        header += ["ours over it", "over it with both"]
        others = [c if c is not ours else None for pair in pairs for c in pair]
        found = [None if c is None else compare(ours, c, every) for c in others]
        said = [
            f"**{interval(each)[0]}**" if sure else interval(each)[0]
            for each, sure in zip(found, decided_together(found), strict=True)
        ]
        lines = [[*line, *said[2 * i : 2 * i + 2]] for i, line in enumerate(lines)]
        told += (
            f" *Ours*: {named(ours)}; differences of the mean, seed by seed, with 95 % intervals; "
            "bold, what remains when all of them are asked at once (Holm's correction)."
        )
    missing = "; ".join(results.get("missing") or ())
    text = f"{told}\n\n{rows(header, lines)}"
    return f"{text}\nNot run yet: {missing}.\n" if missing else text


def _told(results: dict[str, Any], cells: list[Cell], sigma: float) -> str:
    """What the numbers are."""
    seeds = seeds_said({"cells": cells})
    seeds = "One seed." if seeds == "one seed" else f"Mean ± standard deviation of {seeds}."
    return (
        f"Top-1, %, {validated_on(results)}: {results['data']}, noise on the coordinates σ = "
        f"{sigma:g}. {seeds} *Mean*: over {len(results['resolutions'])} resolutions. *With both*: "
        "values turn besides queries and keys, and heads start near; any rotation can have that."
    )
