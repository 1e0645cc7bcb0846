"""What every task has unless it says otherwise."""

from __future__ import annotations

import pytest
import torch
from helpers import raises_for
from support.toy import curve
from torch import nn

from comrope.experiments.common.distributed import create_accelerator
from comrope.experiments.common.errors import UserError
from comrope.experiments.runs.directory import WEIGHTS
from comrope.experiments.tasks import task_of
from comrope.experiments.tasks.base import Probe, Step, compile_blocks
from comrope.experiments.training.train import train
from comrope.models import ViT


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("patches.proj.weight", 0),
        ("cls_token", 0),
        ("ape.codebook", 0),
        ("model.pos_embed", 0),
        ("model.patch_embed.proj.bias", 0),
        ("blocks.0.attn.qkv.weight", 1),
        ("backbone.plain.vit.blocks.11.mlp.fc1.bias", 12),
        ("norm.weight", None),
        ("head.weight", None),
        ("roi_heads.box_head.fc6.weight", None),
        ("my_blocks.0.weight", None),
    ],
)
def test_layers_by_the_names_of_parameters(name, layer):
    assert task_of(curve()).layer_of(name) == layer


def test_there_is_one_view_and_no_probe():
    task, model = task_of(curve()), nn.Linear(1, 1)
    assert list(task.views()) == ["all"]
    with raises_for("resolutions", UserError):
        task.views([12])
    task.check_probe(model, Probe())
    with raises_for("offsets", UserError):
        task.check_probe(model, Probe(0.5))


def test_batches_and_validation_are_those_of_the_configuration():
    task = task_of(curve(train__accumulate=2, evaluate__batch_size=6))
    source = task.open()
    batches = [batch.inputs for batch in task.training_loader(
        source.train, task.training_batches(len(source.train), process=1, processes=2)
    )]  # fmt: skip
    assert {len(batch) for batch in batches} == {8 // (2 * 2)}
    assert len(batches) == 2 * 2 * len(source.train) // 8
    shares = [task.validation(source.validation, process=n, processes=2) for n in range(2)]
    found = [batch for share in shares for batch in share.batches(task.training_view)]
    assert {len(batch.inputs) for batch in found} == {3}
    assert sum(int((~batch.targets.isnan()).sum()) for batch in found) == 20
    assert task.open(train=False).train is None


def test_the_result_has_the_headline_of_every_view():
    task = task_of(curve())
    result = task.summarize(None, {"all": {"error": 3.0, "points": 9}})
    assert result == {"error": {"all": 3.0}}
    task.merge(result, {"more": {"error": 4.0}})
    assert result == {"error": {"all": 3.0, "more": 4.0}}
    assert task.log_values({"error": 3.0, "points": 9}) == {"error": 3.0}
    assert task.describe("all", {"error": 3.0}).split() == ["all", "3.00", "‰"]


def test_a_run_starts_from_another_of_the_same_shapes(tmp_path):
    train(curve(), tmp_path / "first", progress=False)
    task = task_of(curve(train__start_from=str(tmp_path / "first"), train__seed=1))
    model = task.build_model()
    assert task.initialize(model).new == []
    loaded = task_of(curve()).build_model()
    assert not torch.equal(model[0].weight, loaded[0].weight)
    (tmp_path / "first" / WEIGHTS).unlink()
    with raises_for("train.start_from", UserError):
        task.initialize(model)


def test_a_model_without_rotations_has_no_positions_and_no_blocks():
    task = task_of(curve())
    model = task.build_model()
    assert task.position_parameters(model) == 0
    assert list(task.blocks(model)) == []
    vit = ViT(img_size=8, patch_size=4, embed_dim=16, depth=2, num_heads=2)
    assert list(task.blocks(vit)) == list(vit.blocks)
    assert task.position_parameters(vit) == sum(
        p.numel() for n, p in vit.named_parameters() if ".rope." in n
    )


def test_coordinates_are_those_of_the_patches():
    task = task_of(curve())
    vit = ViT(img_size=8, patch_size=4, embed_dim=16, depth=1, num_heads=2, axis_scale=(1, 3))
    place = task.coordinates(vit)
    assert place.positions.tolist() == [[0.25, 0.75], [0.25, 2.25], [0.75, 0.75], [0.75, 2.25]]
    assert place.scale.tolist() == place.width.tolist() == [1, 3]
    with raises_for("run", UserError, naming="curve"):
        task.coordinates(task.build_model())


def test_blocks_are_compiled_one_by_one(monkeypatch):
    compiled = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: compiled.append(self))
    vit = ViT(img_size=8, patch_size=4, embed_dim=16, depth=2, num_heads=2)
    task = task_of(curve())
    plain, limit = task.build_model(), torch._dynamo.config.recompile_limit
    with torch._dynamo.config.patch(recompile_limit=limit):  # monkeypatch would delete it
        task.compile(vit)
        assert compiled == list(vit.blocks)
        compiled.clear()
        task.compile(plain)
        assert compiled == [plain]
        compile_blocks(vit.blocks)
        assert torch._dynamo.config.recompile_limit > limit
    assert torch._dynamo.config.recompile_limit == limit


def test_a_step_learns_on_its_device():
    task, accelerator = task_of(curve()), create_accelerator("cpu")
    source = task.open().train
    batch = next(iter(task.training_loader(source, task.training_batches(len(source)))))
    loss = task.loss(task.build_model(), batch, Step(0, 0, 0, accelerator.device))
    assert loss.requires_grad
    assert loss.ndim == 0
