"""Detection as something to train: where it starts, what it learns, what it is told it found."""

from __future__ import annotations

import json

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from support.runs import same, tiny, weights

from comrope.analysis import rotary_modules
from comrope.experiments.common.errors import UserError
from comrope.experiments.config import load_recipe
from comrope.experiments.data.batches import Key
from comrope.experiments.data.boxes import BoxedImages, collate_boxes, open_boxed
from comrope.experiments.tasks.detection import begin_detector, detection_loss, find, score
from comrope.experiments.tasks.views import View
from comrope.experiments.training.evaluate import build_model, vit_of
from comrope.experiments.training.optim import parameter_groups
from comrope.experiments.training.train import train
from comrope.models import create_model

CPU = torch.device("cpu")
METHODS = ("ape", "rope-mixed", "liere", "comrope-ap", "comrope-ld", "comrope-torus")
START = {"model__name": "vit_nano_patch4_24", "model__position": "ape", "evaluate__resolutions": 24}


def config(method="comrope-ld", **fields):
    plain = method == "ape"
    own = {"model.position": method, "model.ape": not plain}
    own |= {"model.init": "normal" if plain else "zeros"}
    return load_recipe("scenes").with_overrides({**own, **fields})


@pytest.fixture(scope="module")
def classifier(tmp_path_factory, one_thread):
    folder = tmp_path_factory.mktemp("classifier") / "run"
    train(tiny(**START, train__perturbation=0.0, train__epochs=1), folder, progress=False)
    return folder


@pytest.fixture(scope="module")
def batch():
    settings = config()
    images = BoxedImages(open_boxed(settings)[0], settings, train=True)
    return collate_boxes([images[Key(0, place, place)] for place in range(4)])


def losses(model, batch):
    torch.manual_seed(0)  # which proposals are learned from is drawn
    return detection_loss(model, batch, CPU)


def test_before_the_first_step_every_detector_is_that_of_ape_and_its_angles_learn(
    classifier, batch
):
    wanted = None
    for method in METHODS:
        settings = config(method, **{"train.start_from": str(classifier)})
        model = build_model(settings)
        begun = begin_detector(vit_of(model), settings)
        assert begun["left_out"] == ["cls_token", "head.bias", "head.weight"]
        loss = losses(model.train(), batch)
        wanted = loss.detach() if wanted is None else wanted
        torch.testing.assert_close(loss.detach(), wanted, rtol=1e-5, atol=1e-6)
        loss.backward()
        ropes = rotary_modules(model)
        assert len(ropes) == (0 if method == "ape" else 3)
        for rope in ropes.values():  # scales of zero angles, and bases of them, wait for those
            assert max(p.grad.abs().max() for p in rope.parameters()) > 1e-5


def test_the_backbone_has_the_weights_of_the_run(classifier):
    settings = config(**{"train.start_from": str(classifier)})
    vit = vit_of(build_model(settings))
    begin_detector(vit, settings)
    own, theirs = vit.state_dict(), weights(classifier)
    assert {name for name in own if name not in theirs} == {
        name for name in own if ".rope." in name
    }
    assert same({name: own[name] for name in own if name in theirs},
                {name: theirs[name] for name in theirs if name in own})  # fmt: skip


def test_weights_of_timm_in_a_file(tmp_path):
    import timm

    sizes = {"embed_dim": 64, "depth": 3, "num_heads": 2, "img_size": 24, "patch_size": 4}
    theirs = timm.create_model("vit_tiny_patch16_224", in_chans=1, num_classes=5, **sizes)
    file = tmp_path / "model.safetensors"
    save_file(theirs.state_dict(), file)
    settings = config(**{"train.start_from": str(file)})
    vit = vit_of(build_model(settings))
    begun = begin_detector(vit, settings)
    assert "head.weight" in begun["left_out"]
    assert torch.equal(vit.blocks[2].mlp.fc1.weight, theirs.blocks[2].mlp.fc1.weight)
    for wrong, told in (
        ({f"module.{k}": v for k, v in theirs.state_dict().items()}, "is missing"),
        (
            {k: v for k, v in theirs.state_dict().items() if "blocks.2" not in k},
            "blocks.2.* is mis",
        ),
        (
            {**theirs.state_dict(), "blocks.3.norm1.weight": torch.ones(64)},
            "blocks.3.* has no place",
        ),
    ):
        save_file(wrong, file)
        with pytest.raises(UserError, match=rf"does not fit: .*{told}"):
            begin_detector(vit, settings)
    file.write_bytes(b"no tensors")
    with pytest.raises(UserError, match=r"train\.start_from: .*model\.safetensors cannot be read"):
        begin_detector(vit, settings)


def test_a_run_that_does_not_fit_is_named(classifier):
    settings = config(**{"model.name": "vit_nano_patch8_24", "train.start_from": str(classifier)})
    with pytest.raises(UserError, match=r"does not fit: .*patches\.proj\.weight has shape"):
        begin_detector(vit_of(build_model(settings)), settings)


def test_the_rate_falls_from_layer_to_layer_downwards():
    settings = config(**{"optim.layer_decay": 0.5, "optim.angle_lr_scale": 3.0})
    model = build_model(settings)
    groups = parameter_groups(settings, model)
    scale = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    named = dict(model.named_parameters())
    assert len(scale) == len(named)
    vit = "backbone.plain.vit"
    wanted = {
        f"{vit}.patches.proj.weight": 1 / 16,
        f"{vit}.ape.codebook": 1 / 16,
        f"{vit}.blocks.0.mlp.fc1.weight": 1 / 8,
        f"{vit}.blocks.2.mlp.fc1.weight": 1 / 2,
        f"{vit}.norm.weight": 1,
        "roi_heads.box_predictor.cls_score.weight": 1,
        "backbone.pyramid.levels.1.0.weight": 1,
    }
    assert {name: scale[id(named[name])] for name in wanted} == wanted
    angle = next(name for name in named if "blocks.1.attn.rope" in name)
    assert (scale[id(named[angle])], decay[id(named[angle])]) == (3 / 4, 0)
    assert decay[id(named["roi_heads.box_predictor.cls_score.weight"])] == 0.05
    usual = parameter_groups(config(), model)
    assert {group["lr_scale"] for group in usual} == {1.0}


def test_a_classifier_has_layers_too():
    settings = tiny(optim__layer_decay=0.5)
    model = create_model("vit_nano_patch4_12", in_chans=1, num_classes=10)
    groups = parameter_groups(settings, model)
    scale = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    assert scale[id(model.head.weight)] == 1
    assert scale[id(model.cls_token)] == 1 / 16


class Oracle(torch.nn.Module):
    """Finds what it is told to, whatever it sees; in place of a detector."""

    def __init__(self, answers):
        super().__init__()
        self.inner, self.answers = build_model(config()), list(answers)

    def __getattr__(self, name):
        return getattr(super().__getattr__("inner"), name) if name in ("transform", "backbone") \
            else super().__getattr__(name)  # fmt: skip

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


def evaluated(source, found, view=48):
    settings = config()
    images = BoxedImages(source, settings, train=False)
    batches = (collate_boxes([images[Key(0, i, i)]]) for i in range(len(source)))
    accelerator = Accelerator(cpu=True)
    return score(*find(Oracle(found), settings, batches, source, View(view), accelerator),
                 source, accelerator)  # fmt: skip


def test_who_finds_everything_has_all_and_who_is_beside_it_has_less():
    source = open_boxed(config(), train=False)[1]
    perfect = evaluated(source, answers(source))
    assert perfect["AP"] == pytest.approx(100)
    assert perfect["images"] == len(source)
    beside = evaluated(source, answers(source, shift=2.0))
    assert 5 < beside["AP"] < 60
    nothing = [{"boxes": torch.zeros(0, 4), "labels": torch.zeros(0), "scores": torch.zeros(0)}]
    assert evaluated(source, nothing * len(source))["AP"] == 0


def test_labels_become_the_categories_of_the_file(tmp_path):
    from experiments.test_coco import TREE

    (tmp_path / "annotations").mkdir()
    (tmp_path / "val").mkdir()
    (tmp_path / "annotations" / "instances_val.json").write_text(json.dumps(TREE))
    from PIL import Image

    for name, size in (("a.png", (100, 80)), ("b.png", (60, 60))):
        Image.new("L", size).save(tmp_path / "val" / name)
    from comrope.experiments.data.coco import Coco

    source = Coco(tmp_path, "val", "L")
    found = evaluated(source, answers(source))
    # The four that COCO counts as well: what is outside or empty is there, and cannot be found.
    assert 0 < found["AP"] <= 100
