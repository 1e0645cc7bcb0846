"""Detectors of torchvision on a plain ViT. Boxes, scores and anchors are computed in float32."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torchvision.models import detection
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.rpn import AnchorGenerator
from torchvision.models.detection.transform import GeneralizedRCNNTransform, resize_boxes
from torchvision.ops import poolers

from comrope import _checks
from comrope.models.detection.backbone import PlainBackbone, check_images
from comrope.models.detection.pyramid import LEVELS, SimplePyramid
from comrope.models.vit import ViT

__all__ = ["ANCHOR_SIZES", "detector"]

KINDS = ("mask", "box")
ANCHOR_SIZES = (32, 64, 128, 256, 512)  # in pixels, one per level
ANCHOR_RATIOS = (0.5, 1.0, 2.0)
BOX_GRID, MASK_GRID = 7, 14  # samples along each side of a box, for the heads


class _Features(nn.Module):
    """Backbone and pyramid, in the form that torchvision's detectors require."""

    def __init__(
        self, backbone: PlainBackbone, pyramid: SimplePyramid, coarsest_stride: int
    ) -> None:
        super().__init__()
        self.plain, self.pyramid = backbone, pyramid
        self.out_channels, self.coarsest_stride = pyramid.out_channels, coarsest_stride

    def forward(self, x: Tensor) -> OrderedDict[str, Tensor]:
        """Return maps in float32.

        Anchors have the dtype of the maps, and bfloat16 has no odd integers above 256.
        """
        maps = self.pyramid(self.plain(x))
        return OrderedDict((name, level.float()) for name, level in maps.items())


class Resize(GeneralizedRCNNTransform):
    """torchvision's resizing with antialiasing, so that small objects do not vanish.

    An image that already has its size is unchanged.
    """

    def resize(
        self, image: Tensor, target: dict[str, Tensor] | None = None
    ) -> tuple[Tensor, dict[str, Tensor] | None]:
        before = image.shape[-2:]
        smaller = self.torch_choice(self.min_size) if self.training else self.min_size[-1]
        scale = min(smaller / min(before), self.max_size / max(before))
        size = [max(1, round(scale * side)) for side in before]
        if size == [*before]:
            return image, target
        mode: dict[str, Any] = {"mode": "bilinear", "align_corners": False, "antialias": True}
        image = nn.functional.interpolate(image[None], size, **mode)[0]
        if target is not None:
            target["boxes"] = resize_boxes(target["boxes"], [*before], size)
            if "masks" in target:
                masks = target["masks"][:, None].float()
                target["masks"] = nn.functional.interpolate(masks, size)[:, 0].byte()
        return image, target


def _in_float32(module: nn.Module, inputs: Any, output: Any) -> Any:
    """Convert outputs to float32, as a forward hook.

    torchvision decodes boxes and scores in the dtype of the heads' outputs, and bfloat16 is too
    coarse for that.
    """
    if isinstance(output, Tensor):
        return output.float()
    return type(output)(_in_float32(module, inputs, part) for part in output)


def detector(
    kind: str = "mask",
    *,
    vit: ViT,
    num_classes: int,
    window: int = 14,
    global_blocks: Iterable[int] | None = None,
    scale: str = "relative",
    image_size: int = 1024,
    anchor_sizes: Iterable[float] = ANCHOR_SIZES,
    finest_stride: int | None = None,
    out_channels: int = 256,
    head_channels: int = 1024,
    **options: Any,
) -> nn.Module:
    """Create torchvision's ``MaskRCNN`` ("mask") or ``FasterRCNN`` ("box") on a plain ViT.

    Args:
        kind: ``"mask"`` or ``"box"``.
        vit, window, global_blocks, scale: As in ``PlainBackbone``. Patches of ``vit`` are square,
            and their size is a multiple of four, so that strides are whole pixels.
        num_classes: Background included, as torchvision counts: 91 for COCO's own labels. Label 0
            is the background.
        image_size: Length in pixels that the longer side of every image is resized to.
        anchor_sizes: Of anchors, in pixels of the resized image, one per level of the pyramid.
        finest_stride: Stride in pixels of the finest level: a quarter (default), a half or the
            whole of a patch. Strides double from level to level.
        out_channels: Of every level of the pyramid.
        head_channels: Of the box head.
        options: Other options of torchvision's class, such as ``min_size`` and ``max_size`` in
            place of ``image_size``, ``image_mean`` or ``image_std``.
    """
    _checks.one_of("kind", kind, KINDS)
    _checks.integer("num_classes", num_classes, 2)
    _checks.integer("image_size", image_size, 1)
    check_images(vit)
    patch, *others = vit.patches.patch_size
    if others != [patch] or patch % 4:
        raise ValueError(
            f"vit: expected square patches of a multiple of 4 pixels, got {vit.patches.patch_size}"
        )
    finest = patch // 4 if finest_stride is None else finest_stride
    if finest not in (patch // 4, patch // 2, patch):
        raise ValueError(
            f"finest_stride: expected {patch // 4}, {patch // 2} or {patch}, a quarter, a half or "
            f"the whole of a patch, got {finest_stride!r}"
        )
    sizes = tuple((int(size),) for size in anchor_sizes)
    if len(sizes) != len(LEVELS) + 1:
        raise ValueError(
            f"anchor_sizes: expected {len(LEVELS) + 1}, one per level, got {len(sizes)}"
        )
    defaults: dict[str, Any] = {
        "min_size": image_size,
        "max_size": image_size,
        "size_divisible": 16 * finest,  # the coarsest stride: all levels fit the image exactly
        "rpn_anchor_generator": AnchorGenerator(sizes, (ANCHOR_RATIOS,) * len(sizes)),
        "box_roi_pool": _roi_pool(finest, BOX_GRID),
    }
    if kind == "mask":
        defaults["mask_roi_pool"] = _roi_pool(finest, MASK_GRID)
    backbone = PlainBackbone(vit, window=window, global_blocks=global_blocks, scale=scale)
    pyramid = SimplePyramid(backbone.out_channels, out_channels, finest=patch // finest)
    features = _Features(backbone, pyramid, coarsest_stride=16 * finest)
    build: Any = detection.MaskRCNN if kind == "mask" else detection.FasterRCNN
    model = build(features, num_classes, **{**defaults, **options})
    return _adapted(model, num_classes, out_channels, head_channels)


def _adapted(model: Any, num_classes: int, out_channels: int, head_channels: int) -> nn.Module:
    """Set our resizing, a box head of the given width, and float32 after the heads."""
    usual, heads = model.transform, model.roi_heads
    model.transform = Resize(
        usual.min_size,
        usual.max_size,
        usual.image_mean,
        usual.image_std,
        size_divisible=usual.size_divisible,
    )
    heads.box_head = TwoMLPHead(BOX_GRID**2 * out_channels, head_channels)
    heads.box_predictor = FastRCNNPredictor(head_channels, num_classes)
    for module in (model.rpn.head, heads.box_predictor, heads.mask_predictor):
        if module is not None:
            module.register_forward_hook(_in_float32)
    return model


def _roi_pool(finest: int, output_size: int) -> nn.Module:
    """Create RoI pooling with the strides of the levels.

    By default torchvision infers them in the first call, wrongly if padding makes images much
    larger.
    """
    pool = poolers.MultiScaleRoIAlign(list(LEVELS), output_size, sampling_ratio=2)
    pool.scales = [1 / (finest * 2**level) for level in range(len(LEVELS))]
    first = round(math.log2(finest))
    pool.map_levels = poolers.initLevelMapper(first, first + len(LEVELS) - 1)
    return pool
