"""The study of rotated values, and the scale that CPUs train."""

from __future__ import annotations

import pytest

from comrope.experiments.common.errors import UserError
from comrope.experiments.common.figures import save
from comrope.experiments.config import decisive, load_recipe
from comrope.experiments.studies import PRESETS, STUDIES
from comrope.experiments.studies.fair import comparison, rows, values
from comrope.experiments.studies.plan import make_plan
from comrope.experiments.studies.reproduce import _described, reproduce
from comrope.experiments.training.evaluate import build_model
from experiments.results import cell_of, finish_runs, results_of

pytestmark = pytest.mark.usefixtures("one_thread")
TINY = PRESETS["tiny"]


def test_every_row_stands_beside_itself(tmp_path):
    rows = make_plan(STUDIES["values"], TINY, tmp_path).rows
    methods = {"rope": "vanilla RoPE", "rope-mixed": "RoPE-Mixed", "liere": "LieRE",
               "comrope-torus": "comrope-torus"}  # fmt: skip
    assert [(cell.method, cell.name) for cell in rows] == [
        (method, name)
        for method, said in methods.items()
        for name in ("", f"{said}, values too", f"{said}, values and near")
    ]
    configs = [decisive(some[0]) for some in rows.values()]
    for plain, turned, near in zip(configs[::3], configs[1::3], configs[2::3], strict=True):
        assert _differences(plain, turned) == {"model.rotate_values": (False, True)}
        moved = {"model.locality_bias": (0.0, 4.0)}
        if plain["model.position"] != "rope":  # what learns begins and learns otherwise then
            moved["model.init"] = ("rope-random-axes", "rope")
            moved["optim.angle_lr_scale"] = (1.0, 10.0)
        assert _differences(turned, near) == moved
    assert {len(some) for some in rows.values()} == {5}


def _differences(one, other):
    return {name: (one[name], other[name]) for name in one if one[name] != other[name]}


def test_all_start_with_the_same_frequencies_and_nothing_is_searched(tmp_path, monkeypatch):
    found = {"imagenette32": {"every row": {"optim.lr": 0.5}, "liere": {"model.base": 7}}}
    monkeypatch.setattr(rows, "packaged", {"fair/tuned.yaml": found}.__getitem__)
    recipe = load_recipe("imagenette32")
    for configs in make_plan(STUDIES["values"], TINY, tmp_path).rows.values():
        assert configs[0].optim.lr == recipe.optim.lr
        assert configs[0].model.base == 100
        assert (configs[0].model.init == "normal") == (configs[0].model.position == "rope")


def test_a_model_with_rotated_values_is_built():
    config = load_recipe("imagenette32").with_overrides({"model.rotate_values": True})
    assert all(block.attn.rotate_values for block in build_model(config).blocks)
    with pytest.raises(UserError, match="model: rotate_values: expected False"):
        build_model(config.with_overrides({"model.position": "ape"}))
    timm = {"model.name": "timm:vit_tiny_patch16_224", "train.perturbation": 0}
    with pytest.raises(UserError, match=r"model\.rotate_values: a model of timm decides it"):
        build_model(config.with_overrides(timm))
    near = load_recipe("imagenette32").with_overrides({"model.locality_bias": 4.0})
    assert all(block.attn.qkv.bias.any() for block in build_model(near).blocks)
    with pytest.raises(UserError, match=r"model\.locality_bias: a model of timm decides it"):
        build_model(near.with_overrides(timm))


def test_the_table_says_what_values_add_and_what_ours_is_over_the_others(tmp_path):
    def cell(method, level, **about):
        return cell_of({s: {"8": level, "16": level + s} for s in range(3)}, method, **about)

    too = {"name": "it, values too", "fields": {"model.rotate_values": True}}
    cells = [cell("rope", 50.0), cell("rope", 52.0, **too)]
    cells += [cell("comrope-torus", 51.0), cell("comrope-torus", 54.0, **too)]
    results = results_of(cells)
    told = [(p.mine["name"], p.mine["method"], p.other["name"], p.other["method"], p.mean.mean)
            for p in values.pairs(results)]  # fmt: skip
    assert told == [
        ("it, values too", "rope", "", "rope", 2.0),
        ("it, values too", "comrope-torus", "", "comrope-torus", 3.0),
        ("", "comrope-torus", "", "rope", 1.0),
        ("it, values too", "comrope-torus", "it, values too", "rope", 2.0),
    ]
    text = values.table(results)
    assert "rotated back" in text
    assert "over a baseline that has less" not in text
    assert "over a baseline that has less" in comparison.table(results)
    plain = results_of([cells[0], cells[2]])
    assert "rotated back" not in comparison.table(plain)
    assert "over a baseline that has less" not in comparison.table(plain)
    save(values.figure(results), tmp_path / "figure.png")


def test_runs_that_are_kept_are_gathered(tmp_path):
    finish_runs(tmp_path, "values", lambda config, _: 50.0 + config.model.rotate_values,
                preset="tiny")  # fmt: skip
    found = reproduce("values", preset="tiny", out=tmp_path, seeds=2, gather=True, progress=False)
    assert found["data"] == "Imagenette, ViT-nano/4 trained at 32 px"
    assert [cell["top1"]["32"]["mean"] for cell in found["cells"]] == [50.0, 51.0, 51.0] * 4


def test_another_model_is_called_by_its_name_and_that_of_its_data():
    study, preset = STUDIES["video"], PRESETS["small"]
    usual = load_recipe("gesture5")
    assert _described(usual, study, preset, {}) == "gesture5, the paper's 3D ViT at 112 px"
    other = usual.with_overrides({"model.name": "vit_nanovideo_patch16_64"})
    runs = {"cells": [{"runs": [{"data_root": "elsewhere/swipes"}, {"data_root": "swipes"}]}]}
    assert _described(other, study, preset, runs) == "swipes, vit_nanovideo_patch16_64"
    assert _described(other, study, preset, {}) == "ucf101, vit_nanovideo_patch16_64"


@pytest.mark.parametrize(
    "name", ["classification", "offset", "block-size", "perturbation", "comparison", "ablation"]
)
def test_all_models_of_the_scale_that_cpus_train_can_be_made(name, tmp_path):
    for configs in make_plan(STUDIES[name], TINY, tmp_path).rows.values():
        build_model(configs[0])


@pytest.mark.parametrize("name", ["video", "detection", "finetune", "backwards"])
def test_what_it_does_not_have_is_said(name, tmp_path):
    with pytest.raises(UserError, match=r"preset: .* expected one of demo, small, paper"):
        reproduce(name, preset="tiny", out=tmp_path, gather=True)
