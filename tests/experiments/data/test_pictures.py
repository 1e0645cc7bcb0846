"""The decoder of images: formats, sources and modes. tests/faults has what is damaged."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image
from support.images import encoded, picture

from comrope.experiments.data.pictures import FORMATS, MAX_PIXELS, SUFFIXES, convert, decode


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_is_decoded_from_every_source(form, tmp_path):
    content = picture(20, form)
    path = tmp_path / "image"  # whatever its name
    path.write_bytes(content)
    for source in (content, path, str(path), io.BytesIO(content)):
        for mode in ("L", "RGB"):
            image = decode(source, mode)
            assert (image.mode, image.size) == (mode, (4, 4))
            assert np.abs(np.asarray(image).astype(int) - 20).max() <= 1


def test_formats_have_the_suffixes_that_pillow_gives_them():
    registered = Image.registered_extensions()
    for form, suffixes in FORMATS.items():
        assert {registered[suffix] for suffix in suffixes} == {form}
    assert len(set(SUFFIXES)) == len(SUFFIXES)


def test_the_file_is_closed_and_the_image_is_not(tmp_path):
    (tmp_path / "a.png").write_bytes(picture())
    image = decode(tmp_path / "a.png", "L")
    (tmp_path / "a.png").unlink()
    assert np.asarray(image).tolist() == [[20] * 4] * 4


def test_decoded_images_are_converted_by_the_same_rules():
    deep = Image.fromarray(np.array([[0, 128, 129, 257, 40_000, 65_535]], np.uint16))
    assert np.asarray(convert(deep, "L")).tolist() == [[0, 0, 1, 1, 156, 255]]
    for mode in ("I", "F"):
        with pytest.raises(ValueError, match=f"mode {mode}"):
            convert(Image.new(mode, (2, 2)), "L")
    with pytest.raises(ValueError, match="mode F"):
        convert(Image.new("F", (2, 2)), "RGB")


def test_sixteen_bits_become_the_nearest_of_eight():
    values = np.arange(65_536, dtype=np.uint16).reshape(256, 256)
    found = np.asarray(decode(encoded(Image.fromarray(values)), "L"))
    assert np.array_equal(found, np.round(values / 257))


def test_the_pixel_limit_is_where_pillow_would_warn():
    assert MAX_PIXELS == Image.MAX_IMAGE_PIXELS
