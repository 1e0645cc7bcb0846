"""Compare the methods at initialization: similarity maps, and scores under a shift of the image.

python examples/similarity.py [--out out/similarity.png]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import comrope
from comrope import analysis

GRID = (14, 14)  # the patches of ViT-B/16 at 224
OFFSETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)  # in image widths


def build() -> dict[str, comrope.RotaryEmbedding]:
    """Return the rotation of one ViT-B layer for each method; vanilla RoPE in patch units."""
    torch.manual_seed(0)
    return {
        name: comrope.RotaryEmbedding(
            name,
            num_heads=12,
            head_dim=64,
            block_size=8,
            base=100.0 if name == "rope" else None,
            position_scale=GRID if name == "rope" else None,
        )
        for name in comrope.METHODS
    }


def print_table(ropes: dict[str, comrope.RotaryEmbedding]) -> None:
    positions = comrope.grid(GRID)
    x, y = torch.rand(64, 2), torch.rand(64, 2)
    print(f"\n{'method':14} {'parameters':>10} {'commutator':>11} {'RoPE eq.':>10} "
          f"{'scores move by, after an offset of':>36}")  # fmt: skip
    print(f"{'':14} {'per layer':>10} {'norm':>11} {'error':>10} {'1':>12} {'10':>11} {'100':>11}")
    for name, rope in ropes.items():
        count = sum(p.numel() for p in rope.parameters())
        moves = [analysis.offset_sensitivity(rope, positions, o) for o in (1.0, 10.0, 100.0)]
        print(f"{name:14} {count:10,} {analysis.commutator_norms(rope).max().item():11.1e} "
              f"{analysis.rope_equation_error(rope, x, y).max().item():10.1e} "
              f"{moves[0]:12.1e} {moves[1]:11.1e} {moves[2]:11.1e}")  # fmt: skip
    print("\nfloat32; offsets in image widths; scores move by: largest change / standard deviation")


def draw(ropes: dict[str, comrope.RotaryEmbedding], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure = plt.figure(figsize=(12.5, 7.4), layout="constrained")
    rows = figure.add_gridspec(2, 1, height_ratios=[1.5, 1])
    _draw_maps(figure.add_subfigure(rows[0]), ropes)
    _draw_offsets(figure.add_subfigure(rows[1]).subplots(), ropes)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=130)


def _draw_maps(figure, ropes) -> None:  # type: ignore[no-untyped-def]
    fine, center = comrope.grid((57, 57)), torch.tensor([0.5, 0.5])
    axes = figure.subplots(2, len(ropes), sharex=True, sharey=True)
    for column, (name, rope) in enumerate(ropes.items()):
        for row, offset in enumerate((0.0, 1.0)):
            similarity = analysis.similarity_map(rope, fine + offset, center + offset)[0]
            image = axes[row, column].imshow(
                similarity.view(57, 57), cmap="viridis", vmin=-0.2, vmax=1, extent=(0, 1, 1, 0)
            )
            axes[row, column].set(xticks=[0, 1], yticks=[0, 1])
        axes[0, column].set_title(name, fontsize=12)
    axes[0, 0].set_ylabel("no shift")
    axes[1, 0].set_ylabel("shift: one image width")
    figure.colorbar(image, ax=axes, shrink=0.7, label="mean cos(phase)", pad=0.01)
    figure.suptitle("Similarity to the image centre at initialization, one head", fontsize=13)


def _draw_offsets(axis, ropes) -> None:  # type: ignore[no-untyped-def]
    positions = comrope.grid(GRID)
    styles = ("k-", "C0--", "C3-o", "C1-.", "C2:", "C4-")
    for (name, rope), style in zip(ropes.items(), styles, strict=True):
        moves = [analysis.offset_sensitivity(rope, positions, offset) for offset in OFFSETS]
        axis.loglog(OFFSETS, moves, style, label=name, linewidth=2)
    axis.set_title("Change of the attention scores under a shift (float32)", fontsize=13)
    axis.set_xlabel("shift, in image widths")
    axis.set_ylabel("largest change / std of scores")
    axis.grid(alpha=0.3)
    axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/similarity.png"))
    args = parser.parse_args()
    ropes = build()
    print_table(ropes)
    draw(ropes, args.out)
    print(f"picture: {args.out}")


if __name__ == "__main__":
    main()
