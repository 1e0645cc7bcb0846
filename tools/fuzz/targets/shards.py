"""WebDataset shards: archives of images and classes, read by place."""

from __future__ import annotations

import random
import tarfile
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

from comrope.experiments.common.errors import UserError
from comrope.experiments.data import shards
from fuzz.judge import require
from fuzz.oracles import read_tar
from fuzz.samples import judge_samples
from fuzz.target import Target
from fuzz.tars import IMAGES, archive, mutate_archive, picture

__all__ = ["Fuzz"]


class Pool:
    """A pool of this process only."""

    def __init__(self, *_: Any) -> None:
        pass

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def map(self, call: Callable[[Any], Any], items: Iterable[Any], *_: Any) -> list[Any]:
        return [call(item) for item in items]


class Fuzz(Target):
    suffix = ".tar"
    errors = (UserError,)

    def seeds(self) -> list[bytes]:
        members = [
            member
            for number in range(3)
            for member in ((f"s{number}.png", picture(number)), (f"s{number}.cls", b"%d" % number))
        ]
        long = [(f"{'x' * 120}.jpg", picture(0, "JPEG")), (f"{'x' * 120}.cls", b"1")]
        return [
            archive(members),
            archive([("a", None), *((f"a/{name}", content) for name, content in members[:2])]),
            archive(long, tarfile.PAX_FORMAT),
            archive(long, tarfile.GNU_FORMAT),
        ]

    def examine(self, data: bytes) -> bool:
        root = self.folder / "data"
        root.mkdir(exist_ok=True)
        file = root / "train.tar"
        file.write_bytes(data)
        with (
            self.watched(),
            mock.patch.object(shards, "create_pool", Pool),
        ):
            answer = self.ask(lambda: shards.Shards(str(root), "train", "RGB"), file)
            if not answer.accepted:
                return False
            source = answer.value
            targets = judge_samples(source, file)
        about = read_tar(data)
        if not about.plain:
            return True
        require(about.ended, "silent: an archive without its end", len(source))
        files = [name for name, _, _ in about.files]
        require(len(set(files)) == len(files), "silent: a name appears twice", files)
        images = {name for name in files if name.lower().endswith(IMAGES)}
        require(len(source) >= len({_stem(n) for n in images}), "silent: fewer images", images)
        classes = {
            _stem(name): data[first : first + size]
            for name, first, size in about.files
            if name.endswith(".cls")
        }
        for number, target in targets.items():
            key = source.name(number).removeprefix(f"{file}: ")
            require(int(classes[key]) == target, "silent: another class", key)
        return True

    def mutate(self, data: bytes, rng: random.Random) -> bytes:
        return mutate_archive(data, rng)


def _stem(name: str) -> str:
    folder, _, base = name.rpartition("/")
    return f"{folder}/{base.partition('.')[0]}".lstrip("/")
