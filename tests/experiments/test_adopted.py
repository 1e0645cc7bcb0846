"""Models of timm in our training: started, trained, resumed, refused."""

from __future__ import annotations

import pytest
import timm
import torch
from safetensors.torch import save_file
from support.images import config_for
from support.runs import same, weights

from comrope.analysis import rotary_modules
from comrope.experiments.common.errors import UserError
from comrope.experiments.inspect import inspect_run
from comrope.experiments.tasks.init_from import begin_with
from comrope.experiments.training.evaluate import build_model, load_run
from comrope.experiments.training.train import train
from experiments.test_resume import stop_after


@pytest.fixture
def timm_file(tmp_path, monkeypatch) -> dict[str, torch.Tensor]:
    """Weights as the hub would have them."""
    torch.manual_seed(7)
    tensors = timm.create_model("test_vit").state_dict()
    save_file(tensors, tmp_path / "hub.safetensors")
    asked = lambda repo, file: str(tmp_path / "hub.safetensors")  # noqa: E731
    monkeypatch.setattr("huggingface_hub.hf_hub_download", asked)
    return tensors


def adopted(folder, **options):
    fields = {"model__name": "timm:test_vit", "train__start_from": "timm:test_vit.r160_in1k",
              "model__init": "zeros", "model__ape": True, "train__perturbation": 0.0,
              "train__epochs": 1, "train__batch_size": 16, "evaluate__resolutions": (160,),
              "evaluate__every": 0, "train__checkpoint_every": 100}  # fmt: skip
    return config_for(folder, **{**fields, **options})


@pytest.mark.parametrize("method", ["comrope-ld", "ape"])
def test_a_model_of_timm_starts_as_it_was(method, folder, timm_file):
    config = adopted(folder, model__position=method, model__ape=method != "ape")
    if method == "ape":
        config = config.with_overrides({"model.init": "normal"})
    model = build_model(config).eval()
    begin_with(model, config)
    theirs = timm.create_model("test_vit").eval()
    theirs.load_state_dict(timm_file)
    images = torch.randn(2, 3, 160, 160)
    ours = model.model.forward_features(images)
    torch.testing.assert_close(ours, theirs.forward_features(images), rtol=1e-4, atol=1e-4)
    assert model(images).shape == (2, 2)  # a head of its own
    assert len(rotary_modules(model)) == (6 if method != "ape" else 0)


def test_a_model_of_timm_is_trained_resumed_and_loaded(folder, timm_file, tmp_path, monkeypatch):
    config = adopted(folder)
    result = train(config, tmp_path / "whole", progress=False)
    assert result["steps"] == 3
    assert not torch.equal(
        weights(tmp_path / "whole")["model.blocks.0.attn.qkv.weight"],
        timm_file["blocks.0.attn.qkv.weight"],
    )
    stop_after(1, config, tmp_path / "parts", monkeypatch)
    monkeypatch.delattr("huggingface_hub.hf_hub_download")  # it is not asked again
    train(config, tmp_path / "parts", progress=False)
    assert same(weights(tmp_path / "parts"), weights(tmp_path / "whole"))
    assert load_run(tmp_path / "whole")[1].position_parameters() > 101 * 64
    assert inspect_run(tmp_path / "whole", tmp_path / "pictures")["layers"]


def test_a_model_of_timm_without_its_absolute_positions(folder, timm_file):
    config = adopted(folder, model__ape=False)
    model = build_model(config)
    assert begin_with(model, config)["left_out"] == ["model.pos_embed"]
    assert not model.model.pos_embed.any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model__name": "timm:no_such_model"}, "model.name: timm has no 'no_such_model'"),
        ({"train__perturbation": 1.0}, "train.perturbation: expected 0"),
        ({"model__global_pool": "avg"}, "model.global_pool: a model of timm decides it"),
        ({"model__name": "timm:resnet18"}, "model.name: resnet18 is none of timm's plain ViTs"),
        ({"model__position": "none"}, "model: method: expected one of"),
    ],
)
def test_models_of_timm_that_cannot_be_adopted(options, message, folder):
    with pytest.raises(UserError, match=message):
        build_model(adopted(folder, **options))
