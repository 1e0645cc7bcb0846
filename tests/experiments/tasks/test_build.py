"""Models from a configuration: ViTs of comrope, and timm's with rotations swapped in."""

from __future__ import annotations

import pytest
import timm
import torch
from helpers import raises_for
from safetensors.torch import save_file
from support.images import config_for
from support.runs import same, stop_after, tiny, weights

from comrope.analysis import rotary_modules
from comrope.experiments.common import memory
from comrope.experiments.common.errors import UserError
from comrope.experiments.config import load_recipe
from comrope.experiments.inspect import inspect_run
from comrope.experiments.tasks import task_of
from comrope.experiments.tasks.build import build_vit, training_resolution
from comrope.experiments.tasks.images import ImageView
from comrope.experiments.training.evaluate import evaluate_run, load_run
from comrope.experiments.training.train import train

pytestmark = pytest.mark.usefixtures("one_thread")
ABSOLUTE_POSITIONS = 101 * 64  # of timm's test_vit


@pytest.fixture
def timm_file(tmp_path, monkeypatch) -> dict[str, torch.Tensor]:
    """Weights as the hub would have them."""
    torch.manual_seed(7)
    tensors = timm.create_model("test_vit").state_dict()
    save_file(tensors, tmp_path / "hub.safetensors")
    asked = lambda repo, file: str(tmp_path / "hub.safetensors")  # noqa: E731
    monkeypatch.setattr("huggingface_hub.hf_hub_download", asked)
    return tensors


def from_timm(folder, **options):
    fields = {"model__name": "timm:test_vit", "train__start_from": "timm:test_vit.r160_in1k",
              "model__init": "zeros", "model__ape": True, "train__perturbation": 0.0,
              "train__epochs": 1, "train__batch_size": 16, "evaluate__resolutions": (160,),
              "evaluate__every": 0, "train__checkpoint_every": 100}  # fmt: skip
    return config_for(folder, **{**fields, **options})


def test_fields_reach_the_vit_by_their_names():
    config = tiny(
        model__axis_scale=(2.0, 3.0),
        model__class_token=False,
        model__global_pool="avg",
        model__drop_path_rate=0.2,
        model__block_size=4,
        model__rotate_values=True,
        model__layer_scale=0.1,
        data__num_classes=7,
    )
    built = build_vit(config)
    assert (built.axis_scale, built.num_prefix_tokens) == ((2.0, 3.0), 0)
    assert built.head.out_features == 7
    assert built.blocks[-1].scale1.gamma.eq(0.1).all()
    rope = built.blocks[0].attn.rope
    assert (rope.method.block_size, built.blocks[0].attn.rotate_values) == (4, True)
    assert task_of(config).build_model().arguments() == built.arguments()


def test_fields_of_rotations_are_not_for_absolute_positions():
    config = tiny(model__position="ape", model__block_size=4, model__init="zeros")
    assert not rotary_modules(build_vit(config))


def test_options_of_rotations_reach_ours_and_those_of_timm():
    options = {
        "model__position": "comrope-torus", "model__shared_heads": True,
        "model__init": "rope", "model__base": 50.0,
    }  # fmt: skip
    of_timm = from_timm("unused", **options, model__rotated_share=0.5)
    built = [
        task_of(tiny(**options, model__log_frequencies=True)).build_model(),
        task_of(of_timm).build_model(),
    ]
    for model, log in zip(built, (True, False), strict=True):
        method = next(iter(rotary_modules(model).values())).method
        assert (method.shared_heads, method.log_frequencies, method.init.base) == (True, log, 50)
        assert method.init.rotated_share == (1.0 if log else 0.5)
        assert method.P.shape[0] == 1
    tiny(model__position="comrope-torus", model__rotated_share=None)
    with raises_for("model.rotated_share", UserError):
        tiny(model__rotated_share=1.5)


def test_fields_of_other_models_are_refused():
    for field, value in (("share_rotations", "heads"), ("attention_temperature", "log")):
        with raises_for(f"model.{field}", UserError):
            build_vit(tiny(**{f"model__{field}": value}))


def test_initial_weights_are_a_function_of_the_seed():
    one, other = (task_of(tiny(train__seed=seed)).build_model().state_dict() for seed in (0, 1))
    torch.manual_seed(99)
    assert same(task_of(tiny()).build_model().state_dict(), one)
    assert not same(one, other)


def test_the_training_resolution_is_in_the_name():
    assert training_resolution("vit_base_patch16_224") == (224, 224)
    assert training_resolution("timm:test_vit") == (160, 160)
    with raises_for("model.name", UserError):
        training_resolution("timm:no_such_model")


@pytest.mark.parametrize("method", ["comrope-ld", "ape"])
def test_a_model_of_timm_starts_unchanged(method, folder, timm_file):
    options = {"model__init": "normal"} if method == "ape" else {}
    config = from_timm(folder, model__position=method, model__ape=method != "ape", **options)
    task = task_of(config)
    model = task.build_model().eval()
    assert task.initialize(model).left_out == []
    theirs = timm.create_model("test_vit").eval()
    theirs.load_state_dict(timm_file)
    images = torch.randn(2, 3, 160, 160)
    ours = model.model.forward_features(images)
    torch.testing.assert_close(ours, theirs.forward_features(images), rtol=1e-4, atol=1e-4)
    assert model(images).shape == (2, 2)  # a head of its own
    angles = sum(p.numel() for r in rotary_modules(model).values() for p in r.parameters())
    assert (angles > 0) == (method != "ape")
    assert task.position_parameters(model) == ABSOLUTE_POSITIONS + angles


def test_a_model_of_timm_without_its_absolute_positions(folder, timm_file):
    task = task_of(from_timm(folder, model__ape=False))
    model = task.build_model()
    report = task.initialize(model)
    assert report.left_out == ["model.pos_embed"]
    assert "model.ape" in report.note()
    assert not model.model.pos_embed.any()
    assert task.position_parameters(model) < ABSOLUTE_POSITIONS


def test_positions_of_a_model_of_timm_are_its_own():
    model = task_of(from_timm("unused")).build_model()
    assert model.patches.grid_shape((160, 320)) == (10, 20)
    place = model.token_positions((10, 20))
    assert place.shape == (1 + 200, 2)
    assert place.min() >= 0
    assert place.max() <= 1
    task_of(from_timm("unused")).check_view(model, ImageView(176))


@pytest.mark.slow
def test_a_model_of_timm_is_trained_resumed_loaded_and_inspected(
    folder, timm_file, tmp_path, monkeypatch
):
    config = from_timm(folder)
    result = train(config, tmp_path / "whole", progress=False)
    assert result["steps"] == 3
    assert not torch.equal(
        weights(tmp_path / "whole")["model.blocks.0.attn.qkv.weight"],
        timm_file["blocks.0.attn.qkv.weight"],
    )
    stop_after(1, config, tmp_path / "parts")
    monkeypatch.delattr("huggingface_hub.hf_hub_download")  # it is not asked again
    train(config, tmp_path / "parts", progress=False)
    assert same(weights(tmp_path / "parts"), weights(tmp_path / "whole"))
    _, model = load_run(tmp_path / "whole")
    assert task_of(config).position_parameters(model) == result["position_parameters"]
    assert inspect_run(tmp_path / "whole", tmp_path / "pictures")["layers"]
    with raises_for("offsets", UserError):
        evaluate_run(tmp_path / "whole", offsets=(0.5,), progress=False)


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"model__name": "timm:no_such_model"}, "model.name"),
        ({"train__perturbation": 1.0}, "train.perturbation"),
        ({"model__global_pool": "avg"}, "model.global_pool"),  # timm decides it
        ({"model__name": "timm:resnet18"}, "model.name"),  # no plain ViT
        ({"model__position": "none"}, "model"),
    ],
)
def test_models_of_timm_that_cannot_be_built(options, argument, folder):
    with raises_for(argument, UserError):
        task_of(from_timm(folder, **options)).build_model()


@pytest.mark.parametrize(
    "options",
    [{"model__position": "comrope"}, {"model__name": "vit_x_patch4_12"}, {"model__init": "ones"},
     {"model__position": "comrope-ld", "model__log_frequencies": True},
     {"model__position": "rope", "model__shared_heads": True},
     {"model__position": "comrope-ld", "model__rotated_share": 0.5}],
)  # fmt: skip
def test_arguments_that_the_vit_refuses_are_errors_of_the_section(options):
    with raises_for("model", UserError):
        task_of(tiny(**options)).build_model()


def test_the_papers_video_model():
    model = task_of(load_recipe("ucf101", "comrope-ap", 1.0)).build_model()
    assert (model.train_grid, len(model.blocks)) == ((8, 14, 14), 8)
    rope = model.blocks[0].attn.rope.method
    assert (rope.head_dim, rope.num_heads, rope.num_axes) == (48, 8, 3)


@pytest.mark.parametrize(
    ("argument", "fields"),
    [
        ("data.num_classes", {"data.num_classes": 1000}),
        ("model.name", {"model.name": "vit_nano_patch256_256"}),
        ("model.name", {"model.name": "vit_nano_patch4_512", "model.position": "ape"}),
        ("model.name", {"model.name": "vit_nano_patch4_512", "model.ape": True}),
    ],
)
def test_weights_that_no_machine_has_memory_for_are_refused(argument, fields, monkeypatch):
    monkeypatch.setattr(memory, "total_memory", lambda device: 100_000)
    build_vit(tiny())
    with raises_for(argument, UserError):
        build_vit(tiny().with_overrides(fields))
