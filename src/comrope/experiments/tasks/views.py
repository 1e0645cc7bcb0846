"""How the validation set is looked at: its resolution; of clips, their frames and their length."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from comrope.experiments.common.errors import UserError
from comrope.experiments.config import TIMM, Config
from comrope.models import ViT

__all__ = ["View", "check_views", "resolution_of", "said", "usual_view", "views_of"]


class View(NamedTuple):
    resolution: int
    frames: int = 0  # of a clip; 0 of an image
    span: float = 1.0  # how much of a video a clip is taken from


def resolution_of(config: Config) -> tuple[int, int]:
    """The training resolution, as the model's name says, or timm."""
    name = config.model.name
    if name.startswith(TIMM):
        import timm

        known = timm.get_pretrained_cfg(name.removeprefix(TIMM))
        if known is None:
            raise UserError(f"model.name: timm has no {name.removeprefix(TIMM)!r}")
        return known.input_size[-2], known.input_size[-1]
    size = int(name.rsplit("_", 1)[1])
    return size, size


def usual_view(config: Config) -> View:
    """As it was trained."""
    if config.detects:
        return View(config.detect.image_size)
    return View(resolution_of(config)[0], config.data.frames)


def views_of(config: Config, resolutions: Sequence[int] | None = None) -> dict[str, View]:
    """By the names that they have in results: every resolution, and of a detector its own; then, as
    clips were trained but for one thing, other numbers of frames and shorter stretches of the
    video. Of some resolutions, if given, and of nothing else."""
    usual = usual_view(config)
    own = (usual.resolution,) if config.detects else ()
    wanted = (*own, *config.evaluate.resolutions) if resolutions is None else resolutions
    views = {str(r): usual._replace(resolution=r) for r in wanted}
    if usual.frames and resolutions is None:
        evaluate = config.evaluate
        views |= {f"{n} frames": usual._replace(frames=n) for n in evaluate.frames}
        views |= {f"{s:g} of the video": usual._replace(span=s) for s in evaluate.spans}
    return views


def said(name: str) -> str:
    """A view's name, for people."""
    return f"{name} px" if name.isdigit() else name


def check_views(model: ViT, views: Iterable[View]) -> None:
    """Raise unless the model's patches fit. (A detector pads.)"""
    for view in views if hasattr(model, "patches") else ():
        *tubelet, rows, columns = model.patches.patch_size
        for patch in (rows, columns):
            if view.resolution < patch or view.resolution % patch:
                raise UserError(
                    f"evaluate.resolutions: expected multiples of the patch size {patch}, "
                    f"got {view.resolution}"
                )
        for patch in tubelet:
            if view.frames < patch or view.frames % patch:
                raise UserError(
                    f"evaluate.frames: expected multiples of model.tubelet {patch}, "
                    f"got {view.frames}"
                )
