"""What ViTDet does with the one map of a plain backbone: windows to attend in, and a pyramid."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import torch
from timm.layers import LayerNorm2d
from torch import Tensor, nn

from comrope import _checks

__all__ = ["LEVELS", "SimplePyramid", "windowed_attention"]

LEVELS = ("0", "1", "2", "3")  # each of twice the stride of the one before; "pool" is the fifth
FINEST = (4, 2, 1)  # how much larger than the map of the backbone the first may be


class SimplePyramid(nn.Module):
    """A map (B, in_channels, H, W) of stride p to maps of strides p / 4, p / 2, p, 2 p and 4 p.

    They are named "0" to "3" and "pool", as the detectors of torchvision want them, and have
    ``out_channels`` each. ``finest`` 2 or 1 begins at p / 2 or p instead, for small patches, where
    p / 4 would cost much and show little. Odd sizes are halved downwards, and upwards in "pool":
    for exact strides H and W are multiples of 4, 8 or 16.
    """

    def __init__(self, in_channels: int, out_channels: int = 256, *, finest: int = 4) -> None:
        super().__init__()
        width = _checks.integer("in_channels", in_channels, 4)
        self.out_channels = _checks.integer("out_channels", out_channels, 1)
        if finest not in FINEST:
            raise ValueError(f"finest: expected one of 4, 2, 1, got {finest!r}")
        first = FINEST.index(finest)
        self.least = 2 ** (first + 1)  # patches that the coarsest but one makes one of
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
        if min(x.shape[-2:]) < self.least:  # there would be nothing left of it
            raise ValueError(
                f"x: expected a map of at least {self.least} x {self.least} patches, "
                f"got {tuple(x.shape)}"
            )
        maps = OrderedDict((name, level(x)) for name, level in self.levels.items())
        maps["pool"] = nn.functional.max_pool2d(maps["3"], kernel_size=1, stride=2)
        return maps


def _doubled(before: int, after: int) -> nn.Module:
    """Twice the size of the map."""
    return nn.ConvTranspose2d(before, after, kernel_size=2, stride=2)


def _mixed(before: int, after: int) -> list[nn.Module]:
    """1 x 1 and 3 x 3 convolutions; the norms behind them have their biases."""
    return [
        nn.Conv2d(before, after, kernel_size=1, bias=False),
        LayerNorm2d(after),
        nn.Conv2d(after, after, kernel_size=3, padding=1, bias=False),
        LayerNorm2d(after),
    ]


def windowed_attention(
    q: Tensor, k: Tensor, v: Tensor, grid: tuple[int, int], window: int
) -> Tensor:
    """Attention among the tokens of each window of a map, (B, heads, T, D) each, T = H W.

    q and k are rotated before the map is cut, so that positions are those in the whole of it.
    The map is up to four parts, each of windows of one size: the whole ones, those that its right
    and lower ends cut off, and the corner.
    """
    maps = [x.unflatten(2, grid) for x in (q, k, v)]  # (B, heads, H, W, D)
    rows = []
    for top, bottom, height in _stretches(grid[0], window):
        row = []
        for left, right, width in _stretches(grid[1], window):
            part = (x[:, :, top:bottom, left:right] for x in maps)
            queries, keys, values = (_cut(x, height, width) for x in part)
            mixed = nn.functional.scaled_dot_product_attention(queries, keys, values)
            counts = ((bottom - top) // height, (right - left) // width)
            row.append(_joined(mixed, counts, (height, width)))
        rows.append(torch.cat(row, dim=3))
    return torch.cat(rows, dim=2).flatten(2, 3)


def _stretches(size: int, window: int) -> Iterator[tuple[int, int, int]]:
    """Where whole windows begin and end along an axis, and what is left; the size of each."""
    whole = size - size % window
    if whole:
        yield 0, whole, window
    if whole < size:
        yield whole, size, size - whole


def _cut(x: Tensor, height: int, width: int) -> Tensor:
    """A map (B, heads, H, W, D) to windows (B n, heads, height width, D)."""
    x = x.unflatten(3, (-1, width)).unflatten(2, (-1, height))  # (B, heads, n, h, n', w, D)
    return x.permute(0, 2, 4, 1, 3, 5, 6).flatten(4, 5).flatten(0, 2)


def _joined(x: Tensor, counts: tuple[int, int], sides: tuple[int, int]) -> Tensor:
    """What ``_cut`` has cut, in one piece again."""
    x = x.unflatten(2, sides).unflatten(0, (-1, *counts))  # (B, n, n', heads, h, w, D)
    return x.permute(0, 3, 1, 4, 2, 5, 6).flatten(4, 5).flatten(2, 3)
