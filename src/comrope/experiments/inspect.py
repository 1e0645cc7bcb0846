"""Numbers and figures of the position encoding that a model has learned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from comrope import analysis
from comrope import positions as coordinates
from comrope.experiments.common.errors import UserError
from comrope.experiments.common.figures import new_figure, save
from comrope.experiments.common.files import write_text
from comrope.experiments.config import Config
from comrope.experiments.runs.directory import RESULT
from comrope.experiments.tasks import task_of
from comrope.experiments.tasks.base import Coordinates
from comrope.experiments.training.evaluate import load_run
from comrope.rotary import RotaryEmbedding

__all__ = [
    "angle_elements",
    "angles_moved",
    "ape_variation",
    "at_the_start",
    "histogram",
    "inspect_run",
]

OFFSETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
FINE = (49, 49)


def angle_elements(model: nn.Module) -> Tensor:
    """Return the elements above the diagonals of all angle matrices, as in the paper's Tab. 6.

    Blocks that are zero for an axis by definition (ComRoPE-AP) are excluded.
    """
    found = []
    for rope in analysis.rotary_modules(model).values():
        matrices = rope.angle_matrices().detach().flatten(0, -3)
        size = matrices.shape[-1]
        row, column = torch.triu_indices(size, size, offset=1)
        upper = matrices[:, row, column]
        found.append(upper[upper.abs().sum(1) > 0].flatten())
    if not found:
        raise UserError("run: expected a model with angle matrices, got one without rotations")
    return torch.cat(found).float().cpu()


def histogram(elements: Tensor) -> dict[str, list[float]]:
    """Return the density of elements over equal bins, and the edges of the bins.

    The bins cover all elements; their number increases with the number of elements.
    """
    bins = min(121, 1 + 2 * round(len(elements) ** 0.4))
    reach = float(elements.abs().max()) or 1.0
    density, edges = np.histogram(elements.numpy(), bins=bins, range=(-reach, reach), density=True)
    return {"density": density.tolist(), "edges": edges.tolist()}


def at_the_start(config: Config) -> Any:
    """Return the model before its first step; with random weights if its start is missing."""
    task = task_of(config)
    model = task.build_model()
    start = config.train.start_from
    if start and (Path(start) / RESULT).is_file():  # the folder may have been moved
        task.initialize(model)
    return task.backbone(model)


def angles_moved(config: Config, model: nn.Module) -> dict[str, float]:
    """Return ||A - A_0|| / ||A_0|| for every layer, A_0 at the start; ||A|| if A_0 is zero."""
    start = analysis.rotary_modules(at_the_start(config))
    moved = {}
    for name, rope in analysis.rotary_modules(model).items():
        before = start[name].angle_matrices().detach()
        change = torch.linalg.vector_norm(rope.angle_matrices().detach().cpu() - before)
        size = torch.linalg.vector_norm(before)
        moved[name] = float(change / size if size > 0 else change)
    return moved


def ape_variation(model: Any) -> list[float]:
    """Return the standard deviation of absolute positions along each axis, relative to all."""
    codes = model.ape.codebook.detach().unflatten(0, model.ape.grid)
    return [float(codes.std(dim=axis).mean() / codes.std()) for axis in range(model.num_axes)]


def inspect_run(folder: Path, out: Path) -> dict[str, Any]:
    """Write numbers to ``inspect.json`` and figures to the same folder; return the numbers."""
    config, trained = load_run(folder)
    task = task_of(config)
    model: Any = task.backbone(trained)
    place = task.coordinates(trained)
    ropes = analysis.rotary_modules(model)
    facts: dict[str, Any] = {"run": str(folder), "position": config.model.position}
    pictures = []
    has_ape = getattr(model, "ape", None) is not None
    if not has_ape and not ropes:
        raise UserError(
            f"run: expected a position encoding, {folder} has {config.model.position!r}"
        )
    if has_ape:
        facts["ape_variation"] = ape_variation(model)
        name = "absolute" if ropes else "similarity"
        pictures.append(_save(_ape_maps(model), out, name))
    if ropes:
        facts["layers"] = _layers(config, model, ropes, place)
        if draw := SIMILARITY.get(len(place.scale)):
            pictures.append(_save(draw(ropes, place), out, "similarity"))
        pictures += [
            _save(_spectra(ropes, place), out, "spectra"),
            _save(_commutators(ropes), out, "commutators"),
            _save(_offset(ropes, place), out, "offset"),
            _save(_elements(model), out, "elements"),
        ]
    facts["pictures"] = [str(path) for path in pictures]
    write_text(out / "inspect.json", json.dumps(facts, indent=1) + "\n")
    return facts


def _layers(
    config: Config, model: nn.Module, ropes: dict[str, RotaryEmbedding], place: Coordinates
) -> list[dict[str, float | str]]:
    moved = angles_moved(config, model)
    return [
        {
            "layer": name,
            "moved": moved[name],
            "commutator": float(analysis.commutator_norms(rope).max()),
            "offset_sensitivity": analysis.offset_sensitivity(
                rope, place.positions, place.width, generator=torch.Generator().manual_seed(0)
            ),
            "frequency": float(_frequencies(rope, place).mean()),
        }
        for name, rope in ropes.items()
    ]


def _frequencies(rope: RotaryEmbedding, place: Coordinates) -> Tensor:
    """Return radians per unit along each axis, (N, planes of all heads)."""
    return place.scale.abs()[:, None] * analysis.axis_frequencies(rope).flatten(1)


def _save(figure: Any, out: Path, name: str) -> Path:
    save(figure, out / f"{name}.png")
    return out / f"{name}.png"


def _short(name: str) -> str:
    return f"layer {name.split('.')[1]}" if name.startswith("blocks.") else name


def _chosen(ropes: dict[str, RotaryEmbedding], count: int) -> list[tuple[str, RotaryEmbedding]]:
    """Return at most ``count`` layers, including the first and the last."""
    names = list(ropes)
    if len(names) > count:
        names = [names[round(i * (len(names) - 1) / (count - 1))] for i in range(count)]
    return [(name, ropes[name]) for name in names]


def _similarity(ropes: dict[str, RotaryEmbedding], place: Coordinates) -> Any:
    fine, center = place.scale * coordinates.grid(FINE), 0.5 * place.scale
    layers = _chosen(ropes, 4)
    heads = min(6, layers[0][1].num_heads)
    figure, axes = new_figure(heads, len(layers), width=2.0, height=2.0)
    for row, (name, rope) in zip(axes, layers, strict=True):
        maps = analysis.similarity_map(rope, fine, center)
        for head, axis in enumerate(row):
            image = axis.imshow(
                maps[head].reshape(FINE).numpy(),
                cmap="viridis",
                vmin=-0.3,
                vmax=1,
                extent=(0, 1, 1, 0),
            )
            axis.set(xticks=[], yticks=[])
        row[0].set_ylabel(_short(name))
    figure.colorbar(image, ax=axes, shrink=0.7, label="mean cos(phase)")
    figure.suptitle("Similarity to the centre, by head", fontsize=10)
    return figure


def _similarity_by_distance(ropes: dict[str, RotaryEmbedding], place: Coordinates) -> Any:
    layers = _chosen(ropes, 4)
    distances = place.positions - place.positions[:1]
    figure, axes = new_figure(len(layers), width=3.2, height=2.8)
    for axis, (name, rope) in zip(axes[0], layers, strict=True):
        for head in analysis.similarity_map(rope, distances, distances[0]):
            axis.plot(distances[:, 0], head, linewidth=1)
        axis.set_title(_short(name), fontsize=10)
        axis.set(xlabel=f"distance, {place.unit}s", ylim=(-1.05, 1.05))
        axis.grid(alpha=0.2)
    axes[0, 0].set_ylabel("mean cos(phase)")
    figure.suptitle("Similarity of a vector at two positions, by head", fontsize=11)
    return figure


SIMILARITY = {1: _similarity_by_distance, 2: _similarity}  # by the number of axes


def _ape_maps(model: Any) -> Any:
    grid = model.ape.grid if model.num_axes == 2 else (1, len(model.ape.codebook))
    codes = nn.functional.normalize(model.ape.codebook.detach(), dim=-1)
    places = torch.linspace(0, len(codes) - 1, 8).round().long()
    figure, axes = new_figure(4, 2, width=2.2, height=2.2)
    for axis, place in zip(axes.flat, places.tolist(), strict=True):
        image = axis.imshow(
            (codes @ codes[place]).reshape(grid).numpy(), cmap="viridis", vmin=-0.3, vmax=1
        )
        axis.set(xticks=[], yticks=[])
        axis.plot(place % grid[1], place // grid[1], "r+", markersize=9)
    figure.colorbar(image, ax=axes, shrink=0.7, label="cosine")
    figure.suptitle("Absolute positions: similarity to the marked patch", fontsize=11)
    return figure


def _spectra(ropes: dict[str, RotaryEmbedding], place: Coordinates) -> Any:
    """Draw the frequencies: of two axes against each other, otherwise sorted by axis."""
    layers = _chosen(ropes, 6)
    figure, axes = new_figure(len(layers), width=3.2, height=3.2)
    for axis, (name, rope) in zip(axes[0], layers, strict=True):
        axis.set_title(_short(name), fontsize=10)
        try:
            frequencies = place.scale[:, None] * rope.spectrum()[1].detach().flatten(1)
        except ValueError:  # LieRE: no common basis, so no pairs
            frequencies = None
        if frequencies is not None and len(frequencies) == 2:
            axis.plot(frequencies[1], frequencies[0], ".", markersize=3, alpha=0.6)
            reach = 1.1 * float(frequencies.abs().max()) or 1.0
            axis.set(xlabel="ω along x", ylabel="ω along y", aspect="equal")
            axis.set(xlim=(-reach, reach), ylim=(-reach, reach))
            axis.axhline(0, color="0.8", zorder=0)
            axis.axvline(0, color="0.8", zorder=0)
        else:
            every = _frequencies(rope, place)
            for number, own in enumerate(every):
                axis.plot(own.sort().values, label=f"axis {number}")
            scale = "log" if len(every) == 1 else "linear"  # of tokens they differ by powers of ten
            axis.set(xlabel="plane, sorted", ylabel="|ω|", yscale=scale)
            axis.legend(frameon=False, fontsize=8)
        axis.grid(alpha=0.2)
    figure.suptitle(f"Learned frequencies, radians per {place.unit}", fontsize=11)
    return figure


def _commutators(ropes: dict[str, RotaryEmbedding]) -> Any:
    figure, axes = new_figure(1, width=7.0, height=3.4)
    names = [_short(name).removeprefix("layer ") for name in ropes]
    norms = [analysis.commutator_norms(rope) for rope in ropes.values()]
    highest = [max(float(n.max()), 1e-10) for n in norms]
    axes[0, 0].bar(names, highest)
    axes[0, 0].axhline(1e-6, color="C3", linestyle="--", label="rounding, about")
    axes[0, 0].set(yscale="log", ylim=(1e-10, 2), xlabel="layer")
    axes[0, 0].set_ylabel("largest commutator norm")
    axes[0, 0].legend(frameon=False)
    figure.suptitle("||A_i A_j - A_j A_i|| / (||A_i|| ||A_j||): zero is relative", fontsize=11)
    return figure


def _offset(ropes: dict[str, RotaryEmbedding], place: Coordinates) -> Any:
    figure, axes = new_figure(1, width=7.0, height=3.8)
    positions, width = place.positions, place.width
    for name, rope in _chosen(ropes, 6):
        noise = torch.Generator()
        moves = [
            analysis.offset_sensitivity(rope, positions, o * width, generator=noise.manual_seed(0))
            for o in OFFSETS
        ]
        axes[0, 0].loglog(OFFSETS, [max(m, 1e-9) for m in moves], "o-", label=_short(name))
    axes[0, 0].set(xlabel=f"offset, {place.extent}", ylabel="largest change / spread")
    axes[0, 0].set_ylim(1e-8, 30)
    axes[0, 0].grid(alpha=0.25)
    axes[0, 0].legend(frameon=False, fontsize=8)
    figure.suptitle("Change of the scores when all tokens move", fontsize=11)
    return figure


def _elements(model: nn.Module) -> Any:
    elements = angle_elements(model)
    shape = histogram(elements)
    figure, axes = new_figure(2, width=4.6, height=3.4)
    for axis, scale in zip(axes[0], ("linear", "log"), strict=True):
        axis.stairs(shape["density"], shape["edges"], fill=True, alpha=0.6)
        axis.set(yscale=scale, xlabel="element of an angle matrix", ylabel=f"density ({scale})")
    figure.suptitle(f"Elements of the angle matrices, std {float(elements.std()):.3f}", fontsize=11)
    return figure
