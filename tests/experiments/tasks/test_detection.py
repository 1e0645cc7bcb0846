"""Detection: where a detector starts, what it learns, and how well it is judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import FROM_ZERO, raises_for
from PIL import Image
from safetensors.torch import save_file
from support.runs import Memory, same, stop_after, tiny, trainer_of, weights

from comrope.analysis import rotary_modules
from comrope.experiments.common.distributed import create_accelerator
from comrope.experiments.common.errors import UserError
from comrope.experiments.config import load_recipe
from comrope.experiments.data import scenes
from comrope.experiments.data.batches import Key
from comrope.experiments.export import export
from comrope.experiments.inspect import inspect_run
from comrope.experiments.runs.directory import read_result
from comrope.experiments.runs.log import read_log
from comrope.experiments.tasks import detection, task_of
from comrope.experiments.tasks.base import Step
from comrope.experiments.tasks.coco_metrics import METRICS
from comrope.experiments.tasks.images import ImageView
from comrope.experiments.training.evaluate import evaluate_run
from comrope.experiments.training.train import is_finished, train

pytest.importorskip("pycocotools")
pytest.importorskip("torchvision")
pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
METHODS = ("ape", *FROM_ZERO)
START = {"model__name": "vit_nano_patch4_24", "model__position": "ape", "evaluate__resolutions": 24}
SHORT = {
    "train.start_from": None,
    "train.epochs": 1,
    "train.batch_size": 16,
    "train.log_every": 1,
    "evaluate.every": 1,
}


def scenes_config(method: str = "comrope-ld", **fields):
    plain = method == "ape"
    own = {"model.position": method, "model.ape": not plain}
    own |= {"model.init": "normal" if plain else "zeros"}
    return load_recipe("scenes").with_overrides({**own, **fields})


def short(**fields: object):
    named = {name.replace("__", "."): value for name, value in fields.items()}
    return load_recipe("scenes").with_overrides({**SHORT, **named})


@pytest.fixture(scope="module")
def classifier(tmp_path_factory, one_thread):
    folder = tmp_path_factory.mktemp("classifier") / "run"
    train(tiny(**START, train__perturbation=0.0, train__epochs=1), folder, progress=False)
    return folder


@pytest.fixture(scope="module")
def batch():
    task = task_of(scenes_config())
    images = task.dataset(task.open().train, None)
    return task.collate([images[Key(0, place, place)] for place in range(4)])


@pytest.fixture
def few(monkeypatch):
    """Scenes, for what need not be learned."""
    monkeypatch.setattr(scenes, "SCENES", {"train": 64, "val": 16})


# Where it starts


def test_before_the_first_step_every_detector_is_that_of_ape_and_its_angles_learn(
    classifier, batch
):
    expected = None
    for method in METHODS:
        task = task_of(scenes_config(method, **{"train.start_from": str(classifier)}))
        model = task.build_model()
        report = task.initialize(model)
        assert report.left_out == ["cls_token", "head.bias", "head.weight"]
        torch.manual_seed(0)  # which proposals are learned from is drawn
        loss = task.loss(model.train(), batch, Step(0, 0, 0, CPU))
        expected = loss.detach() if expected is None else expected
        torch.testing.assert_close(loss.detach(), expected, rtol=1e-5, atol=1e-6)
        loss.backward()
        ropes = rotary_modules(model)
        assert len(ropes) == (0 if method == "ape" else 3)
        for rope in ropes.values():  # scales of zero angles, and bases of them, wait for those
            assert max(p.grad.abs().max() for p in rope.parameters()) > 1e-5


def test_the_backbone_has_the_weights_of_the_run(classifier):
    task = task_of(scenes_config(**{"train.start_from": str(classifier)}))
    model = task.build_model()
    task.initialize(model)
    own, theirs = task.backbone(model).state_dict(), weights(classifier)
    assert {name for name in own if name not in theirs} == {
        name for name in own if ".rope." in name
    }
    shared = own.keys() & theirs.keys()
    assert same({name: own[name] for name in shared}, {name: theirs[name] for name in shared})


def test_weights_of_timm_in_a_file(tmp_path):
    import timm

    sizes = {"embed_dim": 64, "depth": 3, "num_heads": 2, "img_size": 24, "patch_size": 4}
    theirs = timm.create_model("vit_tiny_patch16_224", in_chans=1, num_classes=5, **sizes)
    file = tmp_path / "model.safetensors"
    save_file(theirs.state_dict(), file)
    task = task_of(scenes_config(**{"train.start_from": str(file)}))
    model = task.build_model()
    assert "head.weight" in task.initialize(model).left_out
    vit = task.backbone(model)
    assert torch.equal(vit.blocks[2].mlp.fc1.weight, theirs.blocks[2].mlp.fc1.weight)
    tensors = theirs.state_dict()
    for wrong, named in (
        ({f"module.{name}": t for name, t in tensors.items()}, ""),
        ({name: t for name, t in tensors.items() if "blocks.2" not in name}, r"blocks\.2"),
        ({**tensors, "blocks.3.norm1.weight": torch.ones(64)}, r"blocks\.3"),
    ):
        save_file(wrong, file)
        with pytest.raises(UserError, match=rf"^train\.start_from: .*{named}"):
            task.initialize(model)
    file.write_bytes(b"no tensors")
    with raises_for("train.start_from", UserError):
        task.initialize(model)


def test_a_run_that_does_not_fit_is_named(classifier):
    fields = {"model.name": "vit_nano_patch8_24", "train.start_from": str(classifier)}
    task = task_of(scenes_config(**fields))
    with pytest.raises(UserError, match=r"^train\.start_from: .*patches\.proj\.weight"):
        task.initialize(task.build_model())


def test_heads_start_alike_on_every_backbone():
    heads = [
        {n: t for n, t in task_of(scenes_config(method)).build_model().state_dict().items()
         if not n.startswith("backbone.plain")}
        for method in ("ape", "comrope-ld")
    ]  # fmt: skip
    assert heads[0]
    assert same(*heads)


# How it is judged


class Oracle(torch.nn.Module):
    """Returns the given answers for any image; in place of a detector."""

    def __init__(self, detector, answers):
        super().__init__()
        self.transform, self.backbone = detector.transform, detector.backbone
        self.answers = list(answers)

    def forward(self, images):
        return [self.answers.pop(0) for _ in images]


def answers(source, shift=0.0):
    for index in range(len(source)):
        target = source.load(index)[1]
        yield {
            "boxes": target.boxes + shift,
            "labels": target.labels,
            "scores": torch.linspace(0.9, 0.8, len(target.labels)),
        }


def judged(task, source, found) -> dict:
    model = Oracle(task.build_model(), found)
    view = task.training_view
    return task.evaluate(model, task.validation(source), view, create_accelerator("cpu"))


def test_a_detector_that_finds_everything_has_all_and_one_beside_it_has_less():
    task = task_of(scenes_config())
    source = task.open(train=False).validation
    perfect = judged(task, source, answers(source))
    assert perfect["AP"] == pytest.approx(100)
    assert (perfect["images"], perfect["unreadable"]) == (len(source), 0)
    beside = judged(task, source, answers(source, shift=2.0))
    assert 5 < beside["AP"] < 60
    nothing = [{"boxes": torch.zeros(0, 4), "labels": torch.zeros(0), "scores": torch.zeros(0)}]
    assert judged(task, source, nothing * len(source))["AP"] == 0


def test_labels_become_the_categories_of_the_file(tmp_path):
    """They are numbered in the order of ids, and the file may leave some out."""
    annotations = [
        {"id": n, "image_id": 5, "category_id": category, "bbox": [10 * n, 5, 8, 9], "iscrowd": 0,
         "area": 72}
        for n, category in enumerate((30, 7))
    ]  # fmt: skip
    tree = {
        "images": [{"id": 5, "width": 40, "height": 20, "file_name": "a.png"}],
        "categories": [{"id": 30, "name": "cat"}, {"id": 7, "name": "dog"}],
        "annotations": annotations,
    }
    for split in ("train", "val"):
        (tmp_path / "annotations").mkdir(exist_ok=True)
        (tmp_path / "annotations" / f"instances_{split}.json").write_text(json.dumps(tree))
        (tmp_path / split).mkdir()
        Image.new("L", (40, 20)).save(tmp_path / split / "a.png")
    fields = {"data.name": "coco", "data.root": str(tmp_path), "data.num_classes": 2}
    task = task_of(scenes_config(**fields, **{"data.val_split": "val"}))
    source = task.open(train=False).validation
    assert judged(task, source, answers(source))["AP"] == pytest.approx(100)
    swapped = [{**a, "labels": 3 - a["labels"]} for a in answers(source)]
    assert judged(task, source, swapped)["AP"] == 0


def test_results_have_all_metrics_by_view():
    task = task_of(scenes_config(**{"evaluate.resolutions": (64,)}))
    assert task.views() == {"48": ImageView(48), "64": ImageView(64)}
    found = {**dict.fromkeys(METRICS, 1.0), "APl": None, "images": 3}
    source = SimpleNamespace(classes=["a"])
    result = task.summarize(source, {"48": found})
    assert result["AP"] == {"48": 1.0}
    assert set(result["figures"]["48"]) == set(METRICS)
    task.merge(result, {"64": found})
    assert set(result["AP"]) == set(result["figures"]) == {"48", "64"}
    assert "AP50" in task.describe("48", found)
    assert "–" in task.describe("48", found)


# CUDA graphs


@pytest.mark.parametrize(
    ("device", "processes", "parts", "records"),
    [("cpu", 1, 1, 0), ("cuda", 2, 1, 0), ("cuda", 1, 2, 0), ("cuda", 1, 1, 1)],
)
def test_the_backbone_is_recorded_only_where_it_can_be_replayed(
    monkeypatch, device, processes, parts, records
):
    """On a single GPU that trains whole batches."""
    recorded = []
    monkeypatch.setattr(detection, "replay_in_training", lambda *given: recorded.append(given))
    monkeypatch.setattr(torch, "zeros", lambda *size, device: torch.empty(size, device="meta"))
    fields = {"train.accumulate": parts, "train.precision": "no", "detect.graph": True}
    task = task_of(load_recipe("coco").with_overrides(fields))
    model = SimpleNamespace(backbone=SimpleNamespace(plain="the backbone"))
    accelerator = SimpleNamespace(device=torch.device(device), num_processes=processes)
    task.prepare(model, accelerator)
    assert [module for module, _ in recorded] == ["the backbone"] * records


# Training


@pytest.fixture(scope="module")
def run(tmp_path_factory, one_thread):
    """A detector of two steps."""
    folder = tmp_path_factory.mktemp("detector") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scenes, "SCENES", {"train": 16, "val": 8})
        train(short(train__batch_size=8), folder, progress=False)
    return folder


def test_a_run_is_evaluated_and_inspected_and_not_exported(run, tmp_path, monkeypatch):
    monkeypatch.setattr(scenes, "SCENES", {"train": 16, "val": 8})
    result = read_result(run)
    assert set(result["AP"]) == set(result["figures"]) == {"48"}
    assert (result["images"], result["steps"]) == (8, 2)
    found = evaluate_run(run, resolutions=(48, 64), progress=False)
    assert [entry["view"] for entry in found] == ["48", "64"]
    assert {name: found[0][name] for name in METRICS} == result["figures"]["48"]
    with raises_for("offsets", UserError):
        evaluate_run(run, offsets=(1.0,), progress=False)
    facts = inspect_run(run, tmp_path / "pictures")
    assert len(facts["layers"]) == 3
    assert all(layer["moved"] > 0 for layer in facts["layers"])
    with raises_for("run", UserError):
        export(run, "onnx", tmp_path / "model.onnx")


@pytest.mark.slow
def test_a_detector_learns(tmp_path):
    result = train(short(), tmp_path / "run", progress=False)
    assert set(result["figures"]["48"]) == set(METRICS)
    assert (result["images"], result["steps"]) == (96, 32)
    assert is_finished(short(), tmp_path / "run")
    records = [r["loss"] for r in read_log(tmp_path / "run" / "log.jsonl") if r["event"] == "train"]
    assert records[-1] < records[0]
    more = train(short(evaluate__resolutions=(64,)), tmp_path / "run", progress=False)
    assert set(more["AP"]) == {"48", "64"}


@pytest.mark.slow
def test_stopped_and_resumed_it_ends_with_the_same_weights(few, tmp_path):
    train(short(), tmp_path / "whole", progress=False)
    stop_after(2, short(), tmp_path / "run")
    train(short(), tmp_path / "run", progress=False)
    assert same(weights(tmp_path / "run"), weights(tmp_path / "whole"))
    train(short(train__seed=1), tmp_path / "other", progress=False)
    assert not same(weights(tmp_path / "other"), weights(tmp_path / "whole"))


@pytest.fixture
def outlined(tmp_path):
    """A few scenes as files in COCO's format, each digit with the outline of its box."""
    for split, is_training in (("train", True), ("val", False)):
        source = scenes.Scenes(train=is_training)
        (tmp_path / split).mkdir()
        tree = {**source.truth, "images": source.truth["images"][:8]}
        tree["annotations"] = [a for a in tree["annotations"] if a["image_id"] < 8]
        for annotation in tree["annotations"]:
            x, y, w, h = annotation["bbox"]
            annotation["segmentation"] = [[x, y, x + w, y, x + w, y + h, x, y + h]]
        for image in tree["images"]:
            image["file_name"] = f"{image['id']}.png"
            source.load(image["id"])[0].save(tmp_path / split / image["file_name"])
        (tmp_path / "annotations").mkdir(exist_ok=True)
        (tmp_path / "annotations" / f"instances_{split}.json").write_text(json.dumps(tree))
    return tmp_path


@pytest.mark.slow
def test_masks_are_learned_and_evaluated_by_the_same_loop(outlined):
    config = short(
        data__name="coco", data__root=str(outlined), data__val_split="val", detect__kind="mask",
        train__batch_size=4, data__workers=1, train__ema=0.5, train__accumulate=2,
        model__drop_path_rate=0.1,
    )  # fmt: skip
    trainer = trainer_of(config)
    try:
        trainer.fit()
        (found,) = trainer.finish().by_view.values()
    finally:
        trainer.close()
    assert set(found) >= {*METRICS, "masks"}
    assert set(found["masks"]) == set(METRICS)
    assert found["images"] == 8


@pytest.mark.slow
def test_metrics_of_every_epoch_are_logged(few):
    sink = Memory()
    trainer = trainer_of(short(train__epochs=3, train__batch_size=64), sink)
    trainer.fit()
    evaluations = [r for r in sink.records if r["event"] == "evaluation"]
    assert [record["epoch"] for record in evaluations] == [1, 2]
    assert set(METRICS) <= set(evaluations[0])


@pytest.mark.slow
def test_two_processes_find_what_one_finds(tmp_path):
    run = tmp_path / "run"
    train(short(), run, progress=False)

    def evaluated(*launcher):
        file = tmp_path / f"{len(launcher)}.json"
        command = [sys.executable, *launcher, "-m", "comrope", "eval", str(run), "--quiet"]
        done = subprocess.run(
            [*command, "--resolutions", "48", "--out", str(file)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(file.read_text())[0], done.stdout

    alone, said = evaluated()
    both, _ = evaluated("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    assert "AP50" in said
    for name in (*METRICS, "images"):
        assert both[name] == (None if alone[name] is None else pytest.approx(alone[name], abs=1e-6))
    assert alone["AP"] > 0


# On a GPU


def losses(folder):
    return [r["loss"] for r in read_log(folder / "log.jsonl") if r["event"] == "train"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("position", ["ape", "comrope-ld"])
def test_a_detector_with_a_recorded_backbone_learns_as_without(position, tmp_path, monkeypatch):
    """Stopped and resumed on the way, with an average of its weights and evaluated in between."""
    monkeypatch.setattr(scenes, "SCENES", {"train": 192, "val": 16})
    fields = {
        "model.position": position,
        "model.init": "normal",
        "train.start_from": None,
        "train.device": "auto",
        "train.precision": "no",
        "train.compile": True,
        "train.epochs": 2,
        "train.batch_size": 16,
        "train.log_every": 1,
        "train.ema": 0.9,
        "evaluate.every": 1,
    }
    config = load_recipe("scenes").with_overrides(fields)
    train(config, tmp_path / "plain", progress=False)
    recorded = config.with_overrides({"detect.graph": True})
    stop_after(9, recorded, tmp_path / "graph")
    train(recorded, tmp_path / "graph", progress=False)
    plain, graph = losses(tmp_path / "plain"), losses(tmp_path / "graph")
    assert len(plain) == len(graph) == 24
    # Rounding decides which proposals are kept later. test_cuda_graph.py compares gradients.
    assert graph[0] == pytest.approx(plain[0], rel=1e-3)
    assert graph[:4] == pytest.approx(plain[:4], rel=0.1)
    assert sum(graph[-6:]) == pytest.approx(sum(plain[-6:]), rel=0.1)
