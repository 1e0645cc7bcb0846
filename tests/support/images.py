"""Image folders, tars and shards of two classes, made for the tests."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

from comrope.experiments.config import load_recipe
from comrope.experiments.data.datasets import ImageDataset
from comrope.experiments.data.images import open_images
from comrope.experiments.data.transforms import evaluation_transform, training_transform

CLASSES = ("cat", "dog")


def make_folder(tmp_path: Path) -> Path:
    """Two classes of bright and dark images, in all modes and formats one meets."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 24), ("val", 8)):
        for number, name in enumerate(CLASSES):
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 100, (20, 30, 3), dtype=np.uint8) + 140 * number
                image = Image.fromarray(pixels.astype(np.uint8)).convert(("RGB", "L", "P")[i % 3])
                suffix = ("png", "jpg", "webp")[i % 3] if image.mode != "P" else "png"
                image.save(tmp_path / split / name / f"{i}.{suffix}")
    return tmp_path


def config_for(root: Path, **overrides):
    fields = {
        "model.name": "vit_nano_patch4_16",
        "data.root": str(root),
        "data.num_classes": 2,
        "data.workers": 0,
        "data.cache": False,
        "train.epochs": 2,
        "train.batch_size": 8,
        "train.precision": "no",
        "train.compile": False,
        "train.device": "cpu",
        "train.log_every": 1,
        "evaluate.resolutions": (16,),
        "evaluate.every": 1,
    }
    named = {name.replace("__", "."): value for name, value in overrides.items()}
    return load_recipe("imagenette").with_overrides({**fields, **named})


def spoil(root: Path, split: str) -> Path:
    bad = next((root / split / "dog").glob("3.*"))
    os.truncate(bad, bad.stat().st_size // 3)
    return bad


def tar_of(folder: Path, out: Path) -> None:
    """train.tar and val.tar of an image folder."""
    for split in ("train", "val"):
        with tarfile.open(out / f"{split}.tar", "w") as archive:
            archive.add(folder / split, arcname=".")


def write_tar(path: Path, members: dict[str, bytes]) -> Path:
    """A tar of some files, by their names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def picture(grey: int = 20, form: str = "png", size: tuple[int, int] = (4, 4), **options) -> bytes:
    """The file of an image of one grey."""
    return encoded(Image.new("L", size, grey), form, **options)


def write_folder(root: Path, files: dict[str, bytes]) -> Path:
    """An image folder of one good image per class, and some files of the training class dog."""
    for place in ("train/cat", "train/dog", "val/cat", "val/dog"):
        (root / place).mkdir(parents=True)
        (root / place / "good.png").write_bytes(picture(200))
    for name, content in files.items():
        (root / "train/dog" / name).write_bytes(content)
    return root


def encoded(image: Image.Image, form: str = "png", **options) -> bytes:
    """The file of an image."""
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def shards_of(folder: Path, out: Path) -> None:
    """WebDataset shards of ten samples, named as the usual ones of ImageNet are."""
    for split in ("train", "val"):
        files = sorted((folder / split).rglob("*.*"))
        for first in range(0, len(files), 10):
            name = f"set-{'validation' if split == 'val' else split}-{first // 10:04d}.tar"
            with tarfile.open(out / name, "w") as archive:
                for file in files[first : first + 10]:
                    stem = f"{file.parent.name}_{file.stem}"
                    archive.add(file, arcname=f"{stem}{file.suffix}")
                    label = str(CLASSES.index(file.parent.name)).encode()
                    info = tarfile.TarInfo(f"{stem}.cls")
                    info.size = len(label)
                    archive.addfile(info, io.BytesIO(label))


def open_folder(root, splits=("train", "val"), *, name="folder", **options):
    """Open the splits of an image folder, or of another layout of it."""
    options = {"train_split": "train", "num_classes": 2, **options}
    return open_images(name, str(root), splits, **options)


def contents(source) -> list[tuple[int, bytes]]:
    """Return class and pixels of every image."""
    return [(t, np.asarray(image).tobytes()) for image, t in map(source.load, range(len(source)))]


def training(channels: int = 3, size: int = 16, **options):
    """Return a transform that crops at random."""
    usual = {"scale": (0.3, 1.0), "ratio": (3 / 4, 4 / 3), "hflip": 0.0, "color_jitter": 0.0}
    usual |= {"auto_augment": None, "interpolation": "bilinear", **_levels(channels)}
    return training_transform((channels, size, size), **{**usual, **options})


def evaluation(channels: int = 3, size: int = 16, **options):
    """Return a transform without draws."""
    usual = {"interpolation": "bilinear", "crop_pct": 1.0, **_levels(channels)}
    return evaluation_transform((channels, size, size), **{**usual, **options})


def _levels(channels: int) -> dict[str, tuple[float, ...]]:
    return {"mean": (0.5,) * channels, "std": (0.2,) * channels}


def dataset_of(source, transform=None, **options) -> ImageDataset:
    """Return images as bytes (C, 16, 16), in training by default."""
    channels = options.get("channels", 3)
    train = options.setdefault("training", True)
    usual = {"seed": 0, "num_classes": 2, **options}
    return ImageDataset(source, transform or (training if train else evaluation)(channels), **usual)
