"""What a trained model has learned about positions, as numbers and as pictures."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import raises_for
from support.runs import finetuned, tiny
from support.toy import curve

from comrope import analysis
from comrope.experiments.common.errors import UserError
from comrope.experiments.config import load_recipe, to_yaml
from comrope.experiments.inspect import (
    angle_elements,
    angles_moved,
    ape_variation,
    at_the_start,
    histogram,
    inspect_run,
)
from comrope.experiments.runs.directory import write_finished
from comrope.experiments.tasks import task_of

pytestmark = pytest.mark.usefixtures("one_thread")
ROTARY = {f"{name}.png" for name in ("similarity", "spectra", "commutators", "offset", "elements")}


def finished(folder: Path, config, change=lambda model: None) -> Path:
    """What a finished run leaves, without the training: its initial weights, changed."""
    model = task_of(config).build_model()
    with torch.no_grad():
        change(model)
    write_finished(folder, to_yaml(config), model.state_dict(), {})
    return folder


def grow(model) -> None:
    for rope in analysis.rotary_modules(model).values():
        for parameter in rope.parameters():
            parameter.mul_(1.5)


@pytest.mark.parametrize(
    ("method", "pictures"),
    [("ape", {"similarity.png"}), ("liere", ROTARY), ("comrope-ld", ROTARY)],
)
def test_pictures_and_numbers_of_a_run(method, pictures, tmp_path):
    run = finished(tmp_path / "run", tiny(model__position=method), grow)
    facts = inspect_run(run, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").glob("*.png")} == pictures
    assert {Path(path).name for path in facts["pictures"]} == pictures
    assert json.loads((tmp_path / "out" / "inspect.json").read_text()) == facts
    if method == "ape":
        assert all(0.3 < share < 1.5 for share in facts["ape_variation"])
        return
    assert len(facts["layers"]) == 3
    for layer in facts["layers"]:
        assert layer["frequency"] > 0
        assert layer["moved"] > 0.1
        commutes = method == "comrope-ld"
        assert (layer["commutator"] < 1e-5) == commutes
        assert (layer["offset_sensitivity"] < 1e-3) == commutes


def test_absolute_positions_have_a_picture_of_their_own_beside_rotations(tmp_path):
    run = finished(tmp_path / "run", tiny(model__ape=True))
    facts = inspect_run(run, tmp_path / "out")
    assert {Path(p).name for p in facts["pictures"]} == {"absolute.png"} | ROTARY


def test_the_scale_of_the_axes_is_seen(tmp_path):
    """On one axis LieRE's rotations commute; on three they do not."""
    found = {}
    for name, scale in (("three", ()), ("one", (0, 0, 1))):
        fields = {"model.name": "vit_nanovideo_patch4_12", "data.frames": 4,
                  "model.axis_scale": scale}  # fmt: skip
        config = load_recipe("moving", "liere").with_overrides(fields)
        facts = inspect_run(finished(tmp_path / name, config), tmp_path / f"{name}-out")
        found[name] = max(layer["offset_sensitivity"] for layer in facts["layers"])
        assert "similarity.png" not in {Path(p).name for p in facts["pictures"]}
    assert found["three"] > 0.1
    assert found["one"] < 1e-3


def test_how_far_angles_moved(tmp_path):
    config = tiny(model__position="liere")
    assert set(angles_moved(config, at_the_start(config)).values()) == {0.0}
    model = task_of(config).build_model()
    with torch.no_grad():
        grow(model)
    assert list(angles_moved(config, model).values()) == pytest.approx([0.5] * 3)


def test_angles_of_a_finetuned_run_moved_from_its_start_if_that_exists(tmp_path):
    start = finished(tmp_path / "ap", tiny(model__position="comrope-ap"), grow)
    config = finetuned(start, "comrope-ap", model__ape=False)
    model = at_the_start(config)
    assert set(angles_moved(config, model).values()) == {0.0}
    start.rename(tmp_path / "elsewhere")
    assert min(angles_moved(config, model).values()) > 0.1


def test_elements_are_those_above_the_diagonals():
    model = task_of(tiny(model__position="liere", model__block_size=4)).build_model()
    matrices = torch.cat([
        rope.angle_matrices().detach().flatten(0, -3)
        for rope in analysis.rotary_modules(model).values()
    ])  # fmt: skip
    elements = angle_elements(model)
    assert len(elements) == 6 * len(matrices)
    assert float(elements.square().sum()) == pytest.approx(float(matrices.square().sum()) / 2)
    with raises_for("run", UserError):
        angle_elements(torch.nn.Linear(1, 1))


def test_a_histogram_is_a_density():
    shape = histogram(torch.randn(1000))
    density, edges = np.array(shape["density"]), np.array(shape["edges"])
    assert len(edges) == len(density) + 1
    assert edges[0] == -edges[-1]
    assert float((density * np.diff(edges)).sum()) == pytest.approx(1)
    assert histogram(torch.zeros(4))["edges"][-1] == 1


def test_variation_along_each_axis():
    model = task_of(tiny(model__position="ape")).build_model()
    with torch.no_grad():
        rows = torch.arange(3.0).repeat_interleave(3)  # the same along columns
        model.ape.codebook.copy_(rows[:, None].expand(-1, 64))
    along_rows, along_columns = ape_variation(model)
    assert along_rows == pytest.approx(1, abs=0.3)
    assert along_columns == 0


def test_models_without_positions_are_refused(tmp_path):
    for name, config in {
        "none": tiny(model__position="none"),
        "curve": curve(),
    }.items():
        run = finished(tmp_path / name, config)
        with raises_for("run", UserError):
            inspect_run(run, tmp_path / "out")
