"""The parts of ViTDet around a plain backbone: attention in windows, and a feature pyramid.

Shapes: B batch, H x W patches, T = H W, D channels per head.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import torch
from timm.layers import LayerNorm2d
from torch import Tensor, nn

from comrope import _checks

__all__ = ["LEVELS", "SimplePyramid", "windowed_attention"]

LEVELS = ("0", "1", "2", "3")  # strides double from level to level; "pool" is the fifth
FINEST = (4, 2, 1)  # possible sizes of the first level, relative to the backbone's map


class SimplePyramid(nn.Module):
    """Turn a map (B, in_channels, H, W) of stride p into maps of stride p / 4, p / 2, p, 2 p, 4 p.

    They are named "0" to "3" and "pool", as torchvision's detectors require. Odd sizes are rounded
    down, in "pool" up: for exact strides H and W are multiples of 4, 8 or 16.

    Args:
        in_channels: Of the backbone's map.
        out_channels: Of every level.
        finest: 4 for a first stride of p / 4; 2 or 1 for p / 2 or p, which cost less and suit small
            patches.
    """

    def __init__(self, in_channels: int, out_channels: int = 256, *, finest: int = 4) -> None:
        super().__init__()
        width = _checks.integer("in_channels", in_channels, 4)
        self.out_channels = _checks.integer("out_channels", out_channels, 1)
        if finest not in FINEST:
            raise ValueError(f"finest: expected one of 4, 2, 1, got {finest!r}")
        first = FINEST.index(finest)
        self.least = 2 ** (first + 1)  # smallest map with at least one entry in level "3"
        half, quarter = width // 2, width // 4
        resized: list[tuple[list[nn.Module], int]] = [
            (
                [_doubled(width, half), LayerNorm2d(half), nn.GELU(), _doubled(half, quarter)],
                quarter,
            ),
            ([_doubled(width, half)], half),
            ([], width),
            ([nn.MaxPool2d(2)], width),
            ([nn.MaxPool2d(4)], width),
            ([nn.MaxPool2d(8)], width),
        ]
        chosen = resized[first : first + len(LEVELS)]
        self.levels = nn.ModuleDict(
            {
                name: nn.Sequential(*resize, *_mixed(channels, self.out_channels))
                for name, (resize, channels) in zip(LEVELS, chosen, strict=True)
            }
        )

    def forward(self, x: Tensor) -> OrderedDict[str, Tensor]:
        """Return the levels by name."""
        if min(x.shape[-2:]) < self.least:
            raise ValueError(
                f"x: expected a map of at least {self.least} x {self.least} patches, "
                f"got {tuple(x.shape)}"
            )
        maps = OrderedDict((name, level(x)) for name, level in self.levels.items())
        maps["pool"] = nn.functional.max_pool2d(maps["3"], kernel_size=1, stride=2)
        return maps


def _doubled(before: int, after: int) -> nn.Module:
    """Double the size of a map."""
    return nn.ConvTranspose2d(before, after, kernel_size=2, stride=2)


def _mixed(before: int, after: int) -> list[nn.Module]:
    """Return 1 x 1 and 3 x 3 convolutions without biases, which the norms after them have."""
    return [
        nn.Conv2d(before, after, kernel_size=1, bias=False),
        LayerNorm2d(after),
        nn.Conv2d(after, after, kernel_size=3, padding=1, bias=False),
        LayerNorm2d(after),
    ]


def windowed_attention(
    q: Tensor, k: Tensor, v: Tensor, grid: tuple[int, int], window: int
) -> Tensor:
    """Attend within each window of a map: q, k and v (B, heads, T, D) to (B, heads, T, D).

    q and k are rotated before, with positions in the whole map. The map has up to four parts with
    windows of one size each: the full windows, the narrower ones at the right edge, the shorter
    ones at the lower edge, and the corner.
    """
    maps = [x.unflatten(2, grid) for x in (q, k, v)]  # (B, heads, H, W, D)
    rows = []
    for top, bottom, height in _spans(grid[0], window):
        row = []
        for left, right, width in _spans(grid[1], window):
            part = (x[:, :, top:bottom, left:right] for x in maps)
            queries, keys, values = (_cut(x, height, width) for x in part)
            mixed = nn.functional.scaled_dot_product_attention(queries, keys, values)
            counts = ((bottom - top) // height, (right - left) // width)
            row.append(_joined(mixed, counts, (height, width)))
        rows.append(torch.cat(row, dim=3))
    return torch.cat(rows, dim=2).flatten(2, 3)


def _spans(size: int, window: int) -> Iterator[tuple[int, int, int]]:
    """Yield (start, end, window size) of the full windows along an axis, and of the rest."""
    end = size - size % window
    if end:
        yield 0, end, window
    if end < size:
        yield end, size, size - end


def _cut(x: Tensor, height: int, width: int) -> Tensor:
    """Cut a map (B, heads, H, W, D) into windows (B n, heads, height width, D)."""
    x = x.unflatten(3, (-1, width)).unflatten(2, (-1, height))  # (B, heads, n, h, n', w, D)
    return x.permute(0, 2, 4, 1, 3, 5, 6).flatten(4, 5).flatten(0, 2)


def _joined(x: Tensor, counts: tuple[int, int], sides: tuple[int, int]) -> Tensor:
    """Undo ``_cut``."""
    x = x.unflatten(2, sides).unflatten(0, (-1, *counts))  # (B, n, n', heads, h, w, D)
    return x.permute(0, 3, 1, 4, 2, 5, 6).flatten(4, 5).flatten(2, 3)
