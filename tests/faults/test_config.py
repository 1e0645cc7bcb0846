"""Values of fields that mean nothing, or fail later: refused in one line before a run begins."""

from __future__ import annotations

import pytest
from support.faults import called, refused

RUNS = {
    "digits": ("model.name=vit_nano_patch4_12", "train.epochs=1", "evaluate.resolutions=12"),
    "moving": ("train.epochs=1", "evaluate.resolutions=12"),
    "scenes": ("train.start_from=null", "train.epochs=1"),
}
# Of digits, unless another recipe is named. The field comes first in the message, unless it is
# given.
REFUSED = (
    # would fail after training
    "augment.crop_pct=100", "augment.crop_pct=1e-9", "evaluate.resolutions=[200000]",
    "evaluate.resolutions=[12,65536]", "evaluate.resolutions=13", "evaluate.resolutions=[]",
    # would fail before or in the first step, with a traceback
    "augment.interpolation=x", "augment.auto_augment=x", "augment.auto_augment=rand-mx",
    "augment.auto_augment=rand-m9-n99999", "augment.auto_augment=rand-m9.5", "augment.smoothing=2",
    "model.drop_path_rate=2", "augment.scale=[nan,1]", "augment.scale=.nan,1", "optim.lr=1e300",
    "optim.angle_lr_scale=1e300", "data.num_classes=1000000000",
    "model.name=vit_nano_patch99999_12",
    "model.name=vit_nano_patch4_99999", "model.name=vit_nano_patch5_12",
    "model.name=vit_nano_patch0_12", "model.name=vit_nano_patch4_0",
    "model.name=vit_nano_patch4_" + "9" * 5000, "model.name=vit_nano_patch\uff14_12",
    "model.name=vit_nano_patch4_65536",
    "optim.name=adan", "optim.name=adahessian", "optim.name=adamx", "optim.schedule=plateau",
    "data.name=a/../../b", "optim.betas=[1" + "0" * 400 + ",0]",
    # mean nothing
    "train.ema=1", "train.ema=2", "train.ema=0", "optim.warmup_ratio=2", "optim.clip_grad=0",
    "model.drop_path_rate=1", "data.std=[-1]", "data.std=[0]", "data.std=[.inf]", "data.mean=[127]",
    "augment.scale=[-1,1]", "augment.scale=[0,0]", "augment.scale=[2,3]", "augment.scale=[1,0.1]",
    "augment.ratio=[1.5,0.5]", "augment.smoothing=1", "augment.mixup=1e308", "augment.cutmix=-1",
    "augment.hflip=1.5", "augment.erase=2", "model.axis_scale=[0,0]", "model.axis_scale=[1,-1]",
    "model.block_size=1", "model.base=0", "model.spread=.inf", "train.perturbation=1e30",
    "optim.betas=[0.9,1]", "optim.betas=[0.9]", "optim.min_lr=1", "optim.weight_decay=-1",
    "data.holdout=1", "train.seed=-1", "train.seed=1e3", "train.seed=010", "train.seed=1:30",
    "train.keep=0", "data.workers=1e9",
    # another type, or no value of any field
    "train.epochs=[1]", "train.epochs={a: 1}", "train.epochs=true", "train.epochs=2001-99-99",
    "train.epochs=!!python/object/apply:os.system [id]", "train.epochs=!!int x",
    "train.epochs=" + "[" * 3000, "train.epochs=&a [*a]", "train.epochs=" + "9" * 5000,
    "train.compile=maybe", "data.mean=[[0.5]]", "data.mean=[" + "0," * 100_000 + "0]",
    "data.root=a\0b", "data.root=a\nb", "data.root=\udcff", "data.root=" + "a" * 5000,
    "options.a=.nan", "options.a=[1]",
)  # fmt: skip
OF_OTHERS = (
    ("moving", "evaluate.spans=0"), ("moving", "evaluate.spans=[0.5,.nan]"),
    ("moving", "evaluate.frames=0"), ("moving", "evaluate.frames=100000"),
    ("moving", "augment.crop_pct=100"), ("moving", "data.frames=-4"),
    ("scenes", "detect.jitter=[2,1]"), ("scenes", "detect.jitter=[0,1]"),
    ("scenes", "detect.jitter=[.nan,1]"), ("scenes", "detect.anchors=[8,12,16,20,-24]"),
    ("scenes", "detect.image_size=99999999"), ("scenes", "evaluate.resolutions=[65536]"),
)  # fmt: skip
CASES = [("digits", override) for override in REFUSED] + [*OF_OTHERS]


def short(text: str) -> str:
    return ascii(text[:60])[1:-1]


@pytest.mark.parametrize(("recipe", "override"), CASES, ids=[f"{r} {short(o)}" for r, o in CASES])
def test_it_is_refused_before_anything_is_written(recipe, override, tmp_path):
    out, name = tmp_path / "run", override.partition("=")[0]
    line = refused(name, "train", recipe, *RUNS[recipe], override, "--out", out, "--quiet")
    assert line.startswith(f"comrope: {name}: ")
    assert len(line) < 600
    assert not out.exists()


@pytest.mark.parametrize(
    "override",
    ["", "=", "train.epochs", "=3", ".=1", "a.b=1", "train.=1", "train=1", "train={epochs: 1}",
     "options.=1", "é=1", "train.epochs.x=1", "X" * 100_000, "[" * 3000 + "=1", "a\nb=1"],
    ids=short,
)  # fmt: skip
def test_overrides_of_no_field_are_refused(override, tmp_path):
    line = refused("", "train", "digits", override, "--out", tmp_path / "run", "--quiet")
    assert len(line) < 600
    assert "no such field" in line or "expected a field and its value" in line


@pytest.mark.parametrize(
    ("argument", "options"),
    [
        ("--resolutions", ["--resolutions", value])
        for value in ("", "x", "12,,12", "-12", "0", "1.5", "12;24", "nan", "9" * 5000,
                      "[12", "12\n24", "\uff11\uff12", "[[12]]", "200000", "true", "1_000_000")
    ] + [
        ("--offsets", ["--offsets", value])
        for value in ("", "x", "-1", "nan", "inf", ".inf", "1e300", "1,nan", "1e9", "[1", "0,,1")
    ] + [
        ("evaluate.resolutions", ["--resolutions", "13"]),
        ("evaluate.resolutions", ["--resolutions", "65536"]),
        ("augment.crop_pct", ["augment.crop_pct=100"]),
        ("data.std", ["data.std=0"]),
    ],
)  # fmt: skip
def test_values_of_an_evaluation_are_refused(argument, options, trained):
    line = refused(argument, "eval", trained, *options, "--quiet")
    assert line.startswith(f"comrope: {argument}: ")
    assert len(line) < 600


@pytest.mark.parametrize(
    ("argument", "options"),
    [
        ("methods", ["--methods", "x"]),
        ("methods", ["--methods", "X" * 5000]),
        ("methods", ["--methods", "ape,\n"]),
        ("preset", ["--preset", "[" * 3000]),
        ("train.epochs", ["train.epochs=" + "[" * 3000]),
        ("cluster", ["--cluster", "x\ny"]),
        *(
            ("cluster-options", ["--cluster", "local", "--cluster-options", value])
            for value in ("x", "=", "x=1", "nodes=0", "nodes=-1", "nodes=1e9", "mem_gb=nan",
                          "mem_gb=-1", "mem_gb=inf", "timeout_min=0", "timeout_min=[1]",
                          "cpus_per_task=1.5", "cpus_per_task=" + "9" * 5000, "gpus_per_node=é")
        ),
    ],
)  # fmt: skip
def test_options_of_a_study_are_refused(argument, options, tmp_path):
    pytest.importorskip("submitit")
    line = refused(argument, "reproduce", "classification", *options, "--out", tmp_path / "out")
    assert line.startswith(f"comrope: {argument}: ")
    assert len(line) < 600
    assert not (tmp_path / "out").exists()


def test_too_many_seeds_are_refused(tmp_path):
    for option in ("--seeds", "--per-gpu"):
        code, text = called("reproduce", "classification", option, 10**9, "--out", tmp_path / "out")
        assert code == 2
        assert option in text
        assert "Traceback" not in text


@pytest.mark.slow  # runs of a second each
@pytest.mark.parametrize(
    "override",
    ["augment.crop_pct=0.1", "augment.scale=[1e-300,1]", "augment.ratio=[0.01,100]",
     "augment.mixup=100", "augment.mixup=1e-300", "augment.smoothing=0.999", "augment.erase=1",
     "augment.color_jitter=10", "augment.auto_augment=rand-m9-mstd0.5-inc1",
     "augment.interpolation=random", "model.drop_path_rate=0.999", "train.ema=0.9999999",
     "optim.warmup_ratio=1", "optim.clip_grad=1e-9", "optim.betas=[0,0]", "data.std=1e-4",
     "data.workers=1024", "train.seed=9223372036854775807", "train.perturbation=1000",
     "model.axis_scale=[0,1]", "optim.lr=0", "options.x=é", "data.mean=0"],
)  # fmt: skip
def test_values_at_their_limits_train(override, tmp_path):
    out = tmp_path / "run"
    fields = (*RUNS["digits"], "train.batch_size=600", override)
    code, text = called("train", "digits", *fields, "--out", out, "--quiet")
    assert code == 0, text
    assert (out / "result.json").is_file()
