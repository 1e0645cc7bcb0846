"""Archives of image folders: a folder for each class."""

from __future__ import annotations

import random
import tarfile
from pathlib import PurePosixPath

import timm.data  # before the reader is watched, because it loads libraries  # noqa: F401

from comrope.experiments.common.errors import UserError
from comrope.experiments.data.images import open_images
from fuzz.judge import require
from fuzz.oracles import read_tar
from fuzz.samples import judge_samples
from fuzz.target import Target
from fuzz.tars import archive, mutate_archive, picture

__all__ = ["Fuzz"]

SUFFIXES = (".jpg", ".png", ".webp", ".bmp")
MEMBERS = [
    ("cat", None),
    ("cat/0.png", picture(0)),
    ("cat/1.jpg", picture(1, "JPEG")),
    ("dog/0.png", picture(2)),
]


class Fuzz(Target):
    suffix = ".tar"
    errors = (UserError,)

    def seeds(self) -> list[bytes]:
        within = [(f"./train/{name}", content) for name, content in MEMBERS]
        return [
            archive(MEMBERS),
            archive(within),
            archive([(f"{'x' * 90}/{name}", content) for name, content in MEMBERS]),
            archive(MEMBERS, tarfile.PAX_FORMAT),
        ]

    def examine(self, data: bytes) -> bool:
        root = self.folder / "data"
        root.mkdir(exist_ok=True)
        file = root / "train.tar"
        file.write_bytes(data)
        with self.watched():
            answer = self.ask(
                lambda: open_images(
                    "folder", str(root), ["train"], train_split="train", num_classes=2
                ),
                root,
            )
            if not answer.accepted:
                return False
            (source,) = answer.value
            judge_samples(source, root)
        about = read_tar(data)
        if about.plain:
            require(about.ended, "silent: an archive without its end", len(source))
            files = [name for name, _, _ in about.files]
            require(len(set(files)) == len(files), "silent: a name appears twice", files)
            images = {name for name in files if name.endswith(SUFFIXES)}
            images = {name for name in images if PurePosixPath(name).parent.name}
            require(len(source) >= len(images), "silent: fewer images", sorted(images))
        return True

    def mutate(self, data: bytes, rng: random.Random) -> bytes:
        return mutate_archive(data, rng)
