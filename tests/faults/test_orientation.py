"""The orientation in EXIF data: applied if asked for, otherwise images are as stored."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image
from support.boxes import one_image
from support.faults import raises_line
from support.images import config_for, encoded, open_folder, picture, write_folder, write_tar

from comrope.experiments.config import load_recipe
from comrope.experiments.data.images import CachedImages
from comrope.experiments.data.pictures import decode
from comrope.experiments.tasks import task_of

UPRIGHT = Image.new("RGB", (16, 32))
UPRIGHT.paste((255, 0, 0), (0, 0, 8, 16))  # above on the left
UPRIGHT.paste((0, 0, 255), (8, 16, 16, 32))
AS_STORED = {  # how a camera stores an upright image with an orientation
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


def stored(orientation: int, form: str) -> tuple[bytes, Image.Image]:
    """The file of an image with an orientation, and its pixels as stored."""
    method = AS_STORED.get(orientation)
    image = UPRIGHT if method is None else UPRIGHT.transpose(method)
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if form == "WEBP" else {}
    content = encoded(image, form, exif=exif, **options)
    return content, Image.open(io.BytesIO(content)).convert("RGB")


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", [0, *AS_STORED, 9, 200])
def test_the_orientation_is_applied_if_asked_for(orientation, form, tmp_path):
    content, image = stored(orientation, form)
    root = write_folder(tmp_path, {"a.png": content})
    for source, wanted in (
        (open_folder(root, ["train"])[0], image),
        (open_folder(root, ["train"], exif=True)[0], UPRIGHT),
        (CachedImages(open_folder(root, ["train"], exif=True)[0]), UPRIGHT),
    ):
        found = source.load([source.name(i)[-5:] for i in range(len(source))].index("a.png"))[0]
        assert found.size == wanted.size
        off = np.abs(np.asarray(found).astype(int) - np.asarray(wanted).astype(int))
        assert off.mean() < 12  # JPEG is not exact


def test_shards_and_tars_apply_it(tmp_path):
    content, image = stored(6, "PNG")
    write_tar(tmp_path / "train.tar", {"a.png": content, "a.cls": b"0"})
    write_tar(tmp_path / "val.tar", {"cat/a.png": content})
    for name, split in (("shards", "train"), ("folder", "val")):
        for exif, wanted in ((False, image), (True, UPRIGHT)):
            (source,) = open_folder(tmp_path, [split], name=name, num_classes=1, exif=exif)
            assert source.load(0)[0].tobytes() == wanted.tobytes()


def test_sizes_of_coco_are_those_of_the_image_that_is_used(tmp_path):
    """Annotations are of stored images, as in most tools, or of upright ones."""
    content, image = stored(6, "PNG")
    for exif, wanted, other in ((False, image, UPRIGHT), (True, UPRIGHT, image)):
        found, target = one_image(tmp_path, content, *wanted.size, exif=exif).load(0)
        assert found.tobytes() == wanted.tobytes()
        assert target.boxes.tolist() == [[1, 1, 6, 6]]
        with pytest.raises(ValueError, match="as annotated"):
            one_image(tmp_path, content, *other.size, exif=exif).load(0)


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("holdout", [0.0, 0.5])
def test_the_field_of_the_configuration_applies_it(cache, holdout, tmp_path):
    content, image = stored(6, "PNG")
    root = write_folder(tmp_path, {})
    for path in root.glob("*/*/good.png"):
        path.write_bytes(content)
    fields = {"data__cache": cache, "data__holdout": holdout}
    for exif, wanted in ((False, image), (True, UPRIGHT)):
        config = config_for(root, data__exif_orientation=exif, **fields)
        for source in task_of(config).open():
            assert source.load(0)[0].tobytes() == wanted.tobytes()
    assert task_of(config_for(root)).config.data.exif_orientation is False


def test_clips_have_no_such_field():
    with raises_line("data.exif_orientation: "):
        task_of(load_recipe("moving").with_overrides(["data.exif_orientation=true"]))


def test_damaged_orientations_are_named_only_if_they_matter():
    content = picture(9, "jpeg", exif=b"Exif\0\0no header of a TIFF")
    assert decode(content, "RGB").size == (4, 4)
    with pytest.raises(ValueError, match=r"data\.exif_orientation"):
        decode(content, "RGB", exif=True)


def test_a_deep_image_is_turned_too():
    exif = Image.Exif()
    exif[0x0112] = 6
    content = encoded(Image.fromarray(np.full((4, 6), 40_000, np.uint16)), exif=exif)
    assert (decode(content, "RGB").size, decode(content, "RGB", exif=True).size) == ((6, 4), (4, 6))
    assert np.unique(np.asarray(decode(content, "RGB", exif=True))) == 156
