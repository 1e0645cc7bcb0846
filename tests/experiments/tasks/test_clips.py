"""Training on clips, from frames to a model that can tell which way time goes."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from support.runs import tiny

import comrope
from comrope.analysis import rotary_modules
from comrope.experiments.common.distributed import create_accelerator
from comrope.experiments.common.errors import UserError
from comrope.experiments.config import load_recipe
from comrope.experiments.data.batches import Key, Normalize, Validation, train_loader
from comrope.experiments.data.batches import TrainBatches as Batches
from comrope.experiments.data.images import open_sources
from comrope.experiments.inspect import _layers
from comrope.experiments.tasks.init_from import begin_with
from comrope.experiments.tasks.views import View, views_of
from comrope.experiments.training.evaluate import _places, build_model, evaluate_run, load_run
from comrope.experiments.training.train import is_finished, train
from comrope.experiments.training.trainer import Run
from comrope.methods import METHODS

pytestmark = pytest.mark.usefixtures("one_thread")
SHORT = {
    "model.name": "vit_nanovideo_patch4_12",
    "data.frames": 4,
    "train.epochs": 1,
    "train.log_every": 8,
    "evaluate.resolutions": (12,),
    "evaluate.frames": (),
    "evaluate.spans": (),
}


def moving(**overrides):
    named = {name.replace("__", "."): value for name, value in overrides.items()}
    return load_recipe("moving").with_overrides({**SHORT, **named})


def batch_of(config):
    source = open_sources(config)[0]
    return source, next(iter(train_loader(config, source, Batches(config, len(source)))))


def test_clips_are_drawn_anew_each_epoch_and_alike_for_all_frames():
    config = moving(augment__scale=(0.3, 0.6), augment__ratio=(0.5, 2.0))
    source, batch = batch_of(config)
    assert batch.images.shape == (32, 1, 4, 12, 12)
    dataset = train_loader(config, source, Batches(config, len(source))).dataset
    first, again, later = (dataset[Key(epoch, 0, 3)].image for epoch in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, later)

    class Still:
        """The same picture in every frame: what differs afterwards, augmentation has done."""

        def __len__(self):
            return 1

        def load(self, index, choose):
            frames, _ = source.load(0, choose)
            return [frames[0]] * len(frames), 0

    dataset.source = Still()
    frames = dataset[Key(0, 5, 0)].image
    assert (frames == frames[:, :1]).all()
    assert not torch.equal(dataset[Key(0, 6, 0)].image, frames)


def test_frames_at_random_in_training_and_in_the_middle_in_evaluation():
    chosen = []

    class Counted:
        def __len__(self):
            return 4

        def load(self, index, choose):
            chosen.append(choose(60))
            frames, _ = blank.load(0, lambda count: range(4))
            return frames[: len(chosen[-1])], 0

    config = moving(augment__hflip=0.5)
    blank = open_sources(config)[0]
    for frames in ("random", "uniform"):
        dataset = train_loader(
            moving(augment__frames=frames), blank, Batches(config, len(blank))
        ).dataset
        dataset.source = Counted()
        dataset[Key(0, 0, 0)]
        dataset[Key(1, 0, 0)]
    Validation(config, Counted()).loader.dataset[Key(0, 0, 0, View(12, 3, 0.5))]
    assert chosen[0] != chosen[1]
    assert chosen[2] == chosen[3] == [7, 22, 37, 52]
    assert chosen[4] == [20, 30, 40]


def test_normalised_over_all_frames():
    config = moving()
    _, batch = batch_of(config)
    found = Normalize(config, torch.device("cpu"))(batch.images)
    expected = (batch.images.numpy() / 255 - config.data.mean[0]) / config.data.std[0]
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """One model that is told the time, LieRE, and one that is not."""
    folders = {}
    more = {"evaluate__frames": (8,), "evaluate__spans": (0.5,), "train__epochs": 3}
    for name, fields in {
        "told": {},
        "liere": {"model__position": "liere", "train__epochs": 1},
        "untold": {"model__axis_scale": (0, 1, 1), "train__epochs": 2},
    }.items():
        folders[name] = tmp_path_factory.mktemp("clips") / name
        config = moving(**{**more, **fields})
        train(config, folders[name], progress=False)
        assert is_finished(config, folders[name])
    return folders


def test_only_who_is_told_the_time_knows_which_way(trained):
    told, untold = ({e["view"]: e for e in evaluate_run(trained[n], progress=False)}
                    for n in ("told", "untold"))  # fmt: skip
    assert list(told) == ["12", "8 frames", "0.5 of the video"]
    assert told["12"]["top1"] > 85
    assert told["8 frames"]["top1"] > 75
    assert 40 < untold["12"]["top1"] < 60
    counts = np.array(told["12"]["taken_for"])
    assert counts.sum(1).tolist() == [128, 128]
    assert 100 * counts.trace() / 256 == told["12"]["top1"]


def test_without_the_time_a_clip_and_its_reversal_are_one(trained):
    clips = torch.randn(4, 1, 4, 12, 12, dtype=torch.float64)
    moved = {}
    for name in ("told", "untold"):
        model = load_run(trained[name])[1].double().eval()
        with torch.no_grad():
            there, back = model(clips), model(clips.flip(2))
        moved[name] = float((there - back).abs().max() / there.std())
    assert moved["told"] > 0.1
    assert moved["untold"] < 1e-9


def test_offsets_in_three_dimensions_change_nothing_if_the_rotations_commute(trained):
    moved = {}
    for name in ("told", "liere"):
        model = load_run(trained[name])[1].double()
        clips = torch.randn(4, 1, 4, 12, 12, dtype=torch.float64)
        place = model.token_positions((4, 3, 3)).double()
        offset = torch.tensor([[[100.0, -30.0, 7.0]], [[0.5, 0.0, 0.0]], [[0, 3, 0]], [[0, 0, 9]]])
        with torch.no_grad():
            here, there = model(clips, place), model(clips, place + offset.double())
        moved[name] = float((there - here).abs().max() / here.std())
    assert moved["told"] < 1e-8
    assert moved["liere"] > 1e-2


def test_a_finished_run_is_looked_at_in_new_ways(trained):
    config = moving(evaluate__frames=(6, 8), evaluate__spans=(0.5,), train__epochs=3)
    assert not is_finished(config, trained["told"])
    result = train(config, trained["told"], progress=False)
    assert set(result["top1"]) == {"12", "6 frames", "8 frames", "0.5 of the video"}


def test_the_papers_model():
    config = load_recipe("ucf101_comrope-ap_p1")
    model = build_model(config)
    assert (model.train_grid, len(model.blocks)) == ((8, 14, 14), 8)
    rope = model.blocks[0].attn.rope.method
    assert (rope.head_dim, rope.num_heads, rope.num_axes) == (48, 8, 3)
    for method in (*METHODS, "ape"):
        assert load_recipe(f"ucf101_{method}_p0").model.position == method
    assert list(views_of(config))[-3:] == [f"{s} of the video" for s in (0.25, 0.5, 0.75)]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model__tubelet": 3}, "model.tubelet: expected a divisor of data.frames 4, got 3"),
        ({"augment__cutmix": 1.0}, "augment.cutmix: knows images only; expected 0, got 1"),
        ({"augment__erase": 0.2}, "augment.erase: knows images only; expected 0, got 0.2"),
        ({"data__name": "folder", "data__frames": 0, "evaluate__frames": (4,)}, "data.frames: is"),
        ({"data__frames": 0}, "data.frames: moving is of clips; expected at least 1, got 0"),
        ({"model__axis_scale": (1, 1)}, "model.axis_scale: expected 3 numbers"),
        ({"train__perturbation_axes": (3,)}, "train.perturbation_axes: expected numbers from 0 to"),
        ({"evaluate__spans": (1.5,)}, "evaluate.spans: expected numbers up to 1"),
        ({"data__name": "digits"}, "data.name: expected ucf101 or moving, got 'digits'"),
    ],
)
def test_errors_name_the_field(fields, message):
    with pytest.raises(UserError, match=message):
        open_sources(moving(**fields))


def test_frames_that_do_not_fill_tubelets(tmp_path):
    config = moving(model__tubelet=2, evaluate__frames=(3,))
    with pytest.raises(UserError, match=r"evaluate.frames: expected multiples of model.tubelet 2"):
        train(config, tmp_path / "run", progress=False)


@pytest.mark.parametrize("cache", [False, True])
def test_bad_videos_are_named_or_skipped_and_counted(ucf, cache, tmp_path):
    """One that is empty and one that is missing, in training and in validation."""
    from support.videos import copied

    root = copied(ucf, tmp_path / "data")
    emu = root / "videos" / "Emu"
    whole = emu.resolve()
    emu.unlink()
    shutil.copytree(whole, emu)
    (emu / "v_Emu_0.avi").write_bytes(b"")
    (emu / "v_Emu_2.avi").unlink()
    fields = {"data__name": "ucf101", "data__root": str(root), "data__cache": cache}
    fields |= {"train__batch_size": 4, "train__epochs": 3, "model__position": "comrope-torus"}
    lost = r"split 'testlist01' has 1 videos that are not there, such as .*v_Emu_2.avi"
    with pytest.raises(UserError, match=lost):
        train(moving(**fields, data__val_split="testlist01"), tmp_path / "no", progress=False)
    shutil.copy(whole / "v_Emu_2.avi", emu)
    with pytest.raises(UserError, match=r"v_Emu_0.avi: cannot be read \(an empty file\)"):
        train(moving(**fields), tmp_path / "stopped", progress=False)
    (emu / "v_Emu_2.avi").unlink()
    result = train(moving(**fields, data__unreadable="skip"), tmp_path / "run", progress=False)
    assert result["unreadable"] == {"training": 3, "validation": 1}
    again = moving(**fields, data__unreadable="skip", evaluate__frames=(2,))
    result = train(again, tmp_path / "run", progress=False)  # skipping is for new views too
    assert "2 frames" in result["top1"]
    assert result["images"] == 1
    assert result["classes"] == ["Emu", "Ant"]
    assert sum(map(sum, result["taken_for"])) == 1


def test_angles_of_images_are_not_those_of_clips(tmp_path):
    """Of ComRoPE-AP they would fit; the blocks of a head turn with other axes then."""
    size = {"model__name": "vit_nanovideo_patch4_12", "model__position": "comrope-ap"}
    train(tiny(**size, train__epochs=1), tmp_path / "images", progress=False)
    config = moving(model__position="comrope-ap", train__start_from=str(tmp_path / "images"))
    model = build_model(config)
    before = model.blocks[0].attn.rope.method.P.clone()
    started = begin_with(model, config)
    assert torch.equal(model.blocks[0].attn.rope.method.P, before)
    assert "blocks.0.attn.rope.method.P" in started["new"]


def test_evaluation_counts_a_bad_clip_once(ucf, tmp_path):
    """The last batch is filled up with nothing, not with the last clip again."""
    from support.videos import copied

    root = copied(ucf, tmp_path / "data")
    (root / "splits" / "testlist01.txt").write_text(
        "Ant/v_Ant_2.avi\nEmu/v_Emu_2.avi\nAnt/v_Ant_1.avi\nEmu/v_Emu_7.avi\n"
    )
    fields = {"data__name": "ucf101", "data__root": str(root), "data__unreadable": "skip"}
    config = moving(**fields, evaluate__batch_size=3)
    validation = Validation(config, open_sources(config, train=False)[1])
    assert [len(batch.unreadable) for batch in validation.batches(View(12, 4))] == [0, 1]


def test_inspection_sees_the_scale_of_the_axes():
    """On one axis LieRE's rotations commute; on three they do not."""
    found = {}
    for scale in ((), (0, 0, 1)):
        config = moving(model__position="liere", model__axis_scale=scale)
        model = build_model(config)
        layers = _layers(config, model, rotary_modules(model))
        found[scale] = max(float(layer["offset_sensitivity"]) for layer in layers)
    assert found[()] > 0.1
    assert found[0, 0, 1] < 1e-3


def test_a_shorter_stretch_takes_less_time():
    model = build_model(moving())
    images = torch.zeros(1, 1, 4, 12, 12)
    whole, half = (_places(model, images, View(12, 4, span)) for span in (1.0, 0.5))
    assert torch.equal(half[:, 1:], whole[:, 1:])
    torch.testing.assert_close(half[:, 0] - 0.5, 0.5 * (whole[:, 0] - 0.5))
    assert whole[:, 0].max() > half[:, 0].max() > 0.5


def test_noise_on_some_axes_only(tmp_path):
    for axes, still in (((), False), ((1, 2), True)):
        config = moving(train__perturbation_axes=axes)
        run = Run(config, tmp_path / "run", create_accelerator("cpu"), False)
        moved = run.objective.positions(run) != comrope.grid((4, 3, 3))
        assert bool(moved[..., 1:].all())
        assert bool(moved[..., 0].any()) != still
