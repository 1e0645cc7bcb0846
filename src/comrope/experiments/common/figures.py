"""Create and save figures; colour and marker of every method."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from comrope.experiments.common.files import write_files
from comrope.methods import METHODS

__all__ = ["STYLES", "new_figure", "save", "style_of"]

# The same in every figure. The markers distinguish the methods without colour too.
STYLES: dict[str, dict[str, Any]] = {
    "none": {"color": "0.6", "marker": "."},
    "ape": {"color": "0.35", "marker": "x"},
    "rope": {"color": "#0072B2", "marker": "s"},
    "rope-mixed": {"color": "#56B4E9", "marker": "D"},
    "liere": {"color": "#D55E00", "marker": "^"},
    "comrope-ap": {"color": "#E69F00", "marker": "v"},
    "comrope-ld": {"color": "#009E73", "marker": "o"},
    "comrope-torus": {"color": "#CC79A7", "marker": "P"},
}
# Of methods that have none above, by their position in METHODS.
MORE_STYLES: tuple[dict[str, Any], ...] = (
    {"color": "#882255", "marker": "*"},
    {"color": "#332288", "marker": "<"},
    {"color": "#999933", "marker": ">"},
    {"color": "#661100", "marker": "h"},
)


def style_of(method: str) -> dict[str, Any]:
    """Return colour and marker of a method, which may have no entry in ``STYLES``."""
    if method in STYLES:
        return STYLES[method]
    others = [name for name in METHODS if name not in STYLES]
    return MORE_STYLES[others.index(method) % len(MORE_STYLES)]


def new_figure(columns: int, rows: int = 1, *, width: float = 5.4, height: float = 4.3) -> Any:
    """Return a figure and its axes (rows, columns), each of ``width`` by ``height`` inches."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    size = (width * columns, height * rows)
    return plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)


def save(figure: Any, path: Path) -> None:
    """Write a figure as PNG and close it."""
    from matplotlib import pyplot as plt

    write_files({path: lambda file: figure.savefig(file, dpi=150, format="png")})
    plt.close(figure)
