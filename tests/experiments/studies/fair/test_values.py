"""The study of the extensions, one by one."""

from __future__ import annotations

from support.studies import finish_runs, plan_of, results_of, row_of

from comrope.experiments.common.figures import save
from comrope.experiments.config import decisive, load_recipe
from comrope.experiments.studies import STUDIES
from comrope.experiments.studies.fair import rows, values
from comrope.experiments.studies.fair.rows import EXTENSIONS
from comrope.experiments.studies.reproduce import reproduce

STUDY = STUDIES["values"]


def test_every_rotation_has_three_rows_that_differ_in_extensions():
    plan = plan_of("values", "tiny").rows
    methods = {"rope": "vanilla RoPE", "rope-mixed": "RoPE-Mixed", "liere": "LieRE",
               "comrope-torus": "comrope-torus"}  # fmt: skip
    assert [(row.method, row.label) for row in plan] == [
        (method, label)
        for method, name in methods.items()
        for label in ("", f"{name}, rotated values", f"{name}, extended")
    ]
    configs = [decisive(some[0]) for some in plan.values()]
    for plain, rotated, extended in zip(configs[::3], configs[1::3], configs[2::3], strict=True):
        assert _differences(plain, rotated) == {EXTENSIONS[0]: (False, True)}
        changed = {EXTENSIONS[1]: (0.0, 4.0)}
        if plain["model.position"] != "rope":  # learned angles start and learn differently then
            changed["model.init"] = (plain["model.init"], "rope")
            changed["optim.angle_lr_scale"] = (1.0, 10.0)
        assert _differences(rotated, extended) == changed
    assert {len(some) for some in plan.values()} == {5}


def _differences(one, other):
    return {name: (one[name], other[name]) for name in one if one[name] != other[name]}


def test_all_start_with_the_same_frequencies_and_nothing_is_searched(monkeypatch):
    found = {"imagenette32": {"every row": {"optim.lr": 0.5}, "liere": {"model.base": 7}}}
    monkeypatch.setattr(rows, "packaged", {"fair/tuned.yaml": found}.__getitem__)
    recipe = load_recipe("imagenette32")
    for configs in plan_of("values", "tiny").rows.values():
        assert configs[0].optim.lr == recipe.optim.lr
        assert configs[0].model.base == 100
        assert (configs[0].model.init == "normal") == (configs[0].model.position == "rope")


def test_the_table_has_the_effect_of_each_extension_and_ours_over_equal_baselines(tmp_path):
    def row(method, level, **about):
        return row_of({s: {"8": level, "16": level + s} for s in range(3)}, method, **about)

    rotated = {"label": "rotated values", "fields": {EXTENSIONS[0]: True}}
    some = [row("rope", 50.0), row("rope", 52.0, **rotated)]
    some += [row("comrope-torus", 51.0), row("comrope-torus", 54.0, **rotated)]
    results = results_of(some)
    found = [(p.mine["label"], p.mine["method"], p.other["label"], p.other["method"], p.mean.mean)
             for p in values.pairs(results)]  # fmt: skip
    assert found == [
        ("rotated values", "rope", "", "rope", 2.0),
        ("rotated values", "comrope-torus", "", "comrope-torus", 3.0),
        ("", "comrope-torus", "", "rope", 1.0),
        ("rotated values", "comrope-torus", "rotated values", "rope", 2.0),
    ]
    unequal = "gain of the extensions"  # of which there is no pair here
    assert unequal not in STUDY.table(results)
    assert unequal in STUDIES["comparison"].table(results)
    save(STUDY.figure(results), tmp_path / "figure.png")


def test_kept_runs_are_gathered(tmp_path):
    finish_runs(tmp_path, "values", lambda config, _: 50.0 + config.model.rotate_values,
                preset="tiny")  # fmt: skip
    found = reproduce("values", preset="tiny", out=tmp_path, seeds=2, gather=True, progress=False)
    assert found["data"] == "Imagenette, ViT-nano/4 trained at 32 px"
    assert [row["top1"]["32"]["mean"] for row in found["rows"]] == [50.0, 51.0, 51.0] * 4
