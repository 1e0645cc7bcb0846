"""COCO's files: whatever is wrong is one line, before training; what is left out is counted."""

from __future__ import annotations

import copy
import json

import pytest
from support.coco import SQUARE, TREE, changed, with_outline, write_coco
from support.faults import called, raises_line, refused

from comrope.experiments.data.coco import Coco
from comrope.experiments.runs.log import read_log

pytest.importorskip("pycocotools")
NAN, INF, HUGE = float("nan"), float("inf"), 10**400
TEXT = json.dumps(TREE)
FILE = "instances_train.json"


def annotated(name, value):
    """The second annotation with another value, and what the message names."""
    return changed(**{f"annotations__1__{name}": value}), f"{FILE}: annotation 2: {name}: "


def with_image(name, value):
    return changed(**{f"images__0__{name}": value}), f"{FILE}: image 7: {name}: "


def without(part, name):
    tree = copy.deepcopy(TREE)
    del tree[part][1][name]
    return tree


def twice(text):
    """Two values of a name in one object; JSON parsers take the last."""
    return TEXT.replace(text, f"{text}, {text}", 1)


FILES = {
    "empty": (b"", "JSON"),
    "cut off": (TEXT[:300], "JSON"),
    "two trees": (TEXT + TEXT, "JSON"),
    "single quotes": (TEXT.replace('"', "'"), "JSON"),
    "a comment": (TEXT.replace("{", "{ // no", 1), "JSON"),
    "compressed": (b"\x1f\x8b\x08\x00\x00\x00", "UTF-8"),
    "Latin-1": (TEXT.replace("cup", "café").encode("latin-1"), "UTF-8"),
    "UTF-16": (TEXT.encode("utf-16"), "UTF-8"),
    "a mark of the byte order": (TEXT.encode("utf-8-sig"), "BOM"),
    "zero bytes": (TEXT.encode() + bytes(5000), "JSON"),
    "deep lists": ("[" * 10**6, "inside each other"),
    "deep in an annotation": (TEXT.replace('"bbox": [', '"bbox": ' + "[" * 10**5, 1), "inside"),
    "10,000 digits": (TEXT.replace('"id": 7', '"id": 7' + "0" * 10**4), "digits"),
    "a list": ([], "images"),
    "null": (None, "images"),
    "no annotations": ({**TREE, "annotations": None}, "annotations: "),
    "images by id": ({**TREE, "images": {"7": TREE["images"][0]}}, "images: "),
    "no categories": ({"images": TREE["images"], "annotations": []}, "categories: "),
    "no images": ({**TREE, "images": [], "annotations": []}, "images"),
    "empty categories": ({**TREE, "categories": [], "annotations": []}, "categories"),
    "a name twice": (twice('"id": 1'), "'id' appears twice"),
    "two lists of images": (TEXT.replace("{", '{"images": [], ', 1), "'images' appears twice"),
    "an image of text": ({**TREE, "images": ["a.png"]}, "images[0]: "),
    "an annotation of null": ({**TREE, "annotations": [None]}, "annotations[0]: "),
    "a category of a list": ({**TREE, "categories": [["id", 1]]}, "categories[0]: "),
    "an image without id": (without("images", "id"), "images[1]: id: "),
    "an image without file": (without("images", "file_name"), "image 3: file_name: "),
    "an image without width": (without("images", "width"), "image 3: width: "),
    "a category without name": (without("categories", "name"), "category 2: name: "),
    "an annotation without id": (without("annotations", "id"), "annotations[1]: id: "),
    "an annotation without box": (without("annotations", "bbox"), "annotation 2: bbox: "),
    "an annotation without image": (without("annotations", "image_id"), "annotation 2: image_id: "),
    "an image twice": (changed(images__1__id=7), "images[1]: "),
    "a category twice": (changed(categories__1__id=90), "categories[1]: "),
    "an annotation twice": (changed(annotations__1__id=1), "annotations[1]: "),
    "a file twice": (changed(images__1__file_name="./a.png"), "image 3: file_name: "),
    "an id of text": (changed(images__0__id="7"), "images[0]: id: "),
    "an id that is a flag": (changed(annotations__0__id=True), "annotations[0]: id: "),
    "an id of 1.0": (changed(annotations__0__id=1.0), "annotations[0]: id: "),
    "an id below 0": (changed(categories__0__id=-1), "categories[0]: id: "),
    "an id of 2^63": (changed(annotations__0__id=2**63), "annotations[0]: id: "),
    "an id of 400 digits": (changed(annotations__0__id=HUGE), "annotations[0]: id: "),
    "a list of ids": (changed(annotations__0__id=[1]), "annotations[0]: id: "),
    "a class of a number": (changed(categories__0__name=3), "category 90: name: "),
    "a class of two lines": (changed(categories__0__name="a\nb"), "category 90: name: "),
    "half a character": (changed(categories__0__name="\ud800"), "category 90: name: "),
    "image_id of a list": annotated("image_id", [1]),
    "image_id of an object": annotated("image_id", {}),
    "image_id of a text": annotated("image_id", "7"),
    "image_id of a fraction": annotated("image_id", 7.0),
    "image_id of another file": annotated("image_id", 8),
    "image_id null": annotated("image_id", None),
    "category_id of a list": annotated("category_id", [2]),
    "category_id of a flag": annotated("category_id", True),
    "category_id of another file": annotated("category_id", 1),
    "category_id null": annotated("category_id", None),
    "bbox of 400 digits": annotated("bbox", [1, 2, HUGE, 3]),
    "bbox of NaN": annotated("bbox", [1, 2, 3, NAN]),
    "infinite bbox": annotated("bbox", [1, -INF, 3, 4]),
    "bbox of 1e300": annotated("bbox", [1, 2, 1e300, 4]),
    "bbox of texts": annotated("bbox", ["1", "2", "3", "4"]),
    "bbox of flags": annotated("bbox", [True, True, 3, 4]),
    "bbox of three": annotated("bbox", [1, 2, 3]),
    "bbox of two points": annotated("bbox", [[1, 2], [3, 4]]),
    "bbox by name": annotated("bbox", {"x": 1, "y": 2, "w": 3, "h": 4}),
    "bbox null": annotated("bbox", None),
    "iscrowd in words": annotated("iscrowd", "yes"),
    "iscrowd of text": annotated("iscrowd", "0"),
    "iscrowd 2": annotated("iscrowd", 2),
    "iscrowd -1": annotated("iscrowd", -1),
    "iscrowd NaN": annotated("iscrowd", NAN),
    "iscrowd of a list": annotated("iscrowd", [0]),
    "area below 0": annotated("area", -1),
    "area NaN": annotated("area", NAN),
    "infinite area": annotated("area", INF),
    "area of text": annotated("area", "600"),
    "area of a flag": annotated("area", True),
    "area of 400 digits": annotated("area", HUGE),
    "a file above": with_image("file_name", "../../x"),
    "a file elsewhere": with_image("file_name", "/etc/passwd"),
    "a file above on Windows": with_image("file_name", "..\\x"),
    "the folder as a file": with_image("file_name", "."),
    "no file name": with_image("file_name", ""),
    "a file name of a number": with_image("file_name", 7),
    "a file name of two lines": with_image("file_name", "a\n.png"),
    "a zero byte in a file name": with_image("file_name", "a\x00.png"),
    "half a character in a file name": with_image("file_name", "\udfff.png"),
    "a width of text": with_image("width", "100"),
    "a width of a fraction": with_image("width", 100.0),
    "a width of a flag": with_image("width", True),
    "a width of 0": with_image("width", 0),
    "a height of null": with_image("height", None),
    "a height below 0": with_image("height", -80),
    "a height of 400 digits": with_image("height", HUGE),
}  # fmt: skip


@pytest.mark.parametrize("how", FILES)
def test_a_wrong_file_is_one_line(how, tmp_path):
    content, named = FILES[how]
    root = write_coco(tmp_path, content)
    for outlines in (False, True):
        with raises_line(FILE, named):
            Coco(root, "train", outlines=outlines)


OUTLINES = {
    "NaN": [[5, 5, 25, 5, NAN, 25, 5, 25]],
    "infinite": [[5, 5, 25, 5, INF, 25, 5, 25]],
    "far outside": [[5, 5, 25, 5, -1e9, 25, 5, 25]],
    "uninitialised pixels": {"size": [80, 100], "counts": [1]},
    "no runs": {"size": [80, 100], "counts": []},
    "a text that does not end": {"size": [80, 100], "counts": "P"},
    "none": None,
}


@pytest.mark.parametrize("crowd", [0, 1])
@pytest.mark.parametrize("how", OUTLINES)
def test_a_wrong_outline_is_one_line(how, crowd, tmp_path):
    """Crowds have outlines too, which evaluation reads."""
    tree = with_outline(OUTLINES[how])
    tree["annotations"][0]["iscrowd"] = crowd
    root = write_coco(tmp_path, tree)
    with raises_line(f"{FILE}: annotation 1: segmentation: "):
        Coco(root, "train", outlines=True)


SMALL = (
    "scenes", "data.name=coco", "data.num_classes=2", "train.start_from=null", "train.epochs=2",
    "train.batch_size=2", "evaluate.every=1", "data.workers=0", "train.device=cpu", "--quiet",
)  # fmt: skip


def test_a_wrong_validation_file_stops_before_training(tmp_path):
    write_coco(tmp_path, TREE)
    run = ("train", *SMALL, "data.val_split=val", "--data", tmp_path, "--out", tmp_path / "run")
    for name, value in (("iscrowd", "yes"), ("area", NAN)):
        write_coco(tmp_path, annotated(name, value)[0], "val")
        refused(f"instances_val.json: annotation 2: {name}: ", *run)
    masks = (*run, "detect.kind=mask")
    write_coco(tmp_path, with_outline(SQUARE))
    write_coco(tmp_path, with_outline(OUTLINES["NaN"]), "val")
    refused("instances_val.json: annotation 1: segmentation: ", *masks)
    assert not (tmp_path / "run").exists()


def test_what_is_left_out_and_skipped_is_named_and_counted_when_quiet(tmp_path):
    for split in ("train", "val"):
        write_coco(tmp_path, TREE, split)
    (tmp_path / "val" / "b.png").write_bytes(b"")
    run = ("train", *SMALL, "data.val_split=val", "data.unreadable=skip")
    code, text = called(*run, "--data", tmp_path, "--out", tmp_path / "run")
    assert code == 0, text
    counts = {"crowds": 1, "boxes outside of their images or without area": 2}
    assert text.count("boxes outside of their images or without area: 2") == 1
    assert text.count(str(tmp_path / "val" / "b.png")) == 1  # in two evaluations
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["left_out"] == counts
    assert result["unreadable"] == {"training": 0, "validation": 1}
    records = [r for r in read_log(tmp_path / "run" / "log.jsonl") if r["event"] == "left_out"]
    assert {r["reason"]: (r["count"], r["first"]) for r in records} == {
        "crowds": (1, [5]),
        "boxes outside of their images or without area": (2, [3, 4]),
    }
    code, text = called("eval", tmp_path / "run", "data.unreadable=skip", "--quiet")
    assert code == 0, text
    assert text.count(str(tmp_path / "val" / "b.png")) == 1
