"""Training on clips, from frames to a model that knows which way time goes."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from helpers import raises_for
from support.runs import trainer_of

import comrope
from comrope.experiments.common.errors import UserError
from comrope.experiments.config import load_recipe
from comrope.experiments.data.batches import Key
from comrope.experiments.tasks import task_of
from comrope.experiments.tasks.base import Step
from comrope.experiments.tasks.clips import ClipView
from comrope.experiments.training.evaluate import evaluate_run, load_run
from comrope.experiments.training.train import is_finished, train

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
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


def first_batch(task):
    source = task.open().train
    return source, next(iter(task.training_loader(source, task.training_batches(len(source)))))


def test_views_differ_from_training_in_one_property():
    task = task_of(
        moving(evaluate__frames=(6,), evaluate__spans=(0.5,), evaluate__reversed=True)
    )  # fmt: skip
    usual = ClipView(12, 4)
    assert task.training_view == usual
    assert task.views() == {
        "12": usual,
        "6 frames": usual._replace(frames=6),
        "0.5 of the video": usual._replace(span=0.5),
        "reversed": usual._replace(reversed=True),
    }
    assert task.views([24]) == {"24": ClipView(24, 4)}
    assert ClipView(12, 8).size == 2 * usual.size


def test_clips_are_drawn_anew_each_epoch():
    task = task_of(moving(augment__scale=(0.3, 0.6), augment__ratio=(0.5, 2.0)))
    source, batch = first_batch(task)
    assert batch.inputs.shape == (32, 1, 4, 12, 12)
    dataset = task.dataset(source, None)
    first, again, later = (dataset[Key(epoch, 0, 3)].image for epoch in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, later)


def test_frames_are_random_in_training_and_in_the_middle_in_evaluation():
    chosen = []

    class Counted:
        def __len__(self):
            return 4

        def load(self, index, choose):
            chosen.append(choose(60))
            frames, _ = blank.load(0, lambda count: range(4))
            return frames[: len(chosen[-1])], 0

    blank = task_of(moving()).open().train
    for frames in ("random", "uniform"):
        dataset = task_of(moving(augment__frames=frames)).dataset(Counted(), None)
        dataset[Key(0, 0, 0)]
        dataset[Key(1, 0, 0)]
    view = ClipView(12, 3, 0.5)
    task_of(moving()).dataset(Counted(), view)[Key(0, 0, 0, view)]
    assert chosen[0] != chosen[1]
    assert chosen[2] == chosen[3] == [7, 22, 37, 52]
    assert chosen[4] == [20, 30, 40]


def test_a_reversed_clip_has_its_last_frame_first():
    task = task_of(moving())
    source, view = task.open().validation, task.training_view
    clip, back = (
        task.dataset(source, seen)[Key(0, 5, 5, seen)].image
        for seen in (view, view._replace(reversed=True))
    )
    assert torch.equal(back, clip.flip(1))
    assert not torch.equal(back, clip)


def test_all_frames_are_normalised():
    task = task_of(moving())
    _, batch = first_batch(task)
    found = task.normalize(batch.inputs, CPU)
    expected = (batch.inputs.numpy() / 255 - task.config.data.mean[0]) / task.config.data.std[0]
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-4)


def test_a_shorter_part_of_the_video_takes_less_time():
    task = task_of(moving())
    model, clips = task.build_model(), torch.zeros(1, 1, 4, 12, 12)
    whole, half = (task.positions(model, clips, ClipView(12, 4, span)) for span in (1.0, 0.5))
    assert torch.equal(half[:, 1:], whole[:, 1:])
    torch.testing.assert_close(half[:, 0] - 0.5, 0.5 * (whole[:, 0] - 0.5))
    assert whole[:, 0].max() > half[:, 0].max() > 0.5


@pytest.mark.parametrize(("axes", "moved"), [((), {0, 1, 2}), ((1, 2), {1, 2})])
def test_time_is_perturbed_unless_other_axes_are_named(axes, moved):
    task = task_of(moving(train__perturbation_axes=axes, train__perturbation=1.0))
    place = task.training_positions(task.build_model(), Step(0, 0, 0, CPU))
    changed = (place != comrope.grid((4, 3, 3))).flatten(0, -2).any(0)
    assert {axis for axis in range(3) if changed[axis]} == moved


@pytest.fixture(scope="module")
def trained(tmp_path_factory, one_thread):
    """A model with a time axis, one with LieRE, and one without a time axis."""
    folders = {}
    more = {"evaluate__frames": (8,), "evaluate__spans": (0.5,), "train__epochs": 3}
    for name, fields in {
        "time": {},
        "liere": {"model__position": "liere", "train__epochs": 1},
        "no time": {"model__axis_scale": (0, 1, 1), "train__epochs": 2},
    }.items():
        folders[name] = tmp_path_factory.mktemp("clips") / name
        config = moving(**{**more, **fields})
        train(config, folders[name], progress=False)
        assert is_finished(config, folders[name])
    return folders


@pytest.mark.slow
def test_only_a_model_with_a_time_axis_knows_which_way_time_goes(trained):
    time, no_time = ({e["view"]: e for e in evaluate_run(trained[n], progress=False)}
                     for n in ("time", "no time"))  # fmt: skip
    assert list(time) == ["12", "8 frames", "0.5 of the video"]
    assert time["12"]["top1"] > 85
    assert time["8 frames"]["top1"] > 75
    assert 40 < no_time["12"]["top1"] < 60
    counts = np.array(time["12"]["confusion"])
    assert counts.sum(1).tolist() == [128, 128]
    assert 100 * counts.trace() / 256 == time["12"]["top1"]


@pytest.mark.slow
def test_a_trained_model_without_a_time_axis_cannot_see_a_reversal(trained):
    clips = torch.randn(4, 1, 4, 12, 12, dtype=torch.float64)
    moved = {}
    for name in ("time", "no time"):
        model = load_run(trained[name])[1].double().eval()
        with torch.no_grad():
            there, back = model(clips), model(clips.flip(2))
        moved[name] = float((there - back).abs().max() / there.std())
    assert moved["time"] > 0.1
    assert moved["no time"] < 1e-9


@pytest.mark.slow
def test_offsets_in_three_dimensions_change_nothing_if_the_rotations_commute(trained):
    moved = {}
    for name in ("time", "liere"):
        model = load_run(trained[name])[1].double()
        clips = torch.randn(4, 1, 4, 12, 12, dtype=torch.float64)
        place = model.token_positions((4, 3, 3)).double()
        offset = torch.tensor([[[100.0, -30.0, 7.0]], [[0.5, 0.0, 0.0]], [[0, 3, 0]], [[0, 0, 9]]])
        with torch.no_grad():
            here, there = model(clips, place), model(clips, place + offset.double())
        moved[name] = float((there - here).abs().max() / here.std())
    assert moved["time"] < 1e-8
    assert moved["liere"] > 1e-2


@pytest.mark.slow
def test_a_finished_run_is_evaluated_in_new_ways(trained):
    config = moving(evaluate__frames=(6, 8), evaluate__spans=(0.5,), train__epochs=3)
    assert not is_finished(config, trained["time"])
    result = train(config, trained["time"], progress=False)
    assert set(result["top1"]) == {"12", "6 frames", "8 frames", "0.5 of the video"}


def test_frames_are_whole_tubelets_in_every_view():
    with raises_for("evaluate.frames", UserError):
        trainer_of(moving(model__tubelet=2, evaluate__frames=(3,)))


@pytest.fixture
def spoilt(ucf, tmp_path):
    """A data set with an empty training video and a missing validation video."""
    from support.videos import copied

    root = copied(ucf, tmp_path / "data")
    emu = root / "videos" / "Emu"
    original = emu.resolve()
    emu.unlink()
    shutil.copytree(original, emu)
    (emu / "v_Emu_0.avi").write_bytes(b"")
    (emu / "v_Emu_2.avi").unlink()
    return root


@pytest.mark.parametrize("cache", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_bad_videos_are_named_or_skipped_and_counted(cache, ucf, spoilt, tmp_path):
    fields = {"data__name": "ucf101", "data__root": str(spoilt), "data__cache": cache}
    fields |= {"train__batch_size": 4, "train__epochs": 3, "model__position": "comrope-torus"}
    with pytest.raises(UserError, match=r"v_Emu_2\.avi"):
        train(moving(**fields, data__val_split="testlist01"), tmp_path / "no", progress=False)
    emu = spoilt / "videos" / "Emu" / "v_Emu_2.avi"
    shutil.copy(ucf / "videos" / "Emu" / "v_Emu_2.avi", emu)
    with pytest.raises(UserError, match=r"v_Emu_0\.avi"):
        train(moving(**fields), tmp_path / "stopped", progress=False)
    emu.unlink()
    result = train(moving(**fields, data__unreadable="skip"), tmp_path / "run", progress=False)
    assert result["unreadable"] == {"training": 3, "validation": 1}
    again = moving(**fields, data__unreadable="skip", evaluate__frames=(2,))
    result = train(again, tmp_path / "run", progress=False)  # skipping is for new views too
    assert "2 frames" in result["top1"]
    assert result["images"] == 1
    assert result["classes"] == ["Emu", "Ant"]
    assert sum(map(sum, result["confusion"])) == 1
    with raises_for("data.frames", UserError):
        evaluate_run(tmp_path / "run", overrides=["data.frames=8"], progress=False)


def test_evaluation_counts_a_bad_clip_once(ucf, tmp_path):
    """The last batch is filled up with nothing, not with the last clip again."""
    from support.videos import copied

    root = copied(ucf, tmp_path / "data")
    (root / "splits" / "testlist01.txt").write_text(
        "Ant/v_Ant_2.avi\nEmu/v_Emu_2.avi\nAnt/v_Ant_1.avi\nEmu/v_Emu_7.avi\n"
    )
    fields = {"data__name": "ucf101", "data__root": str(root), "data__unreadable": "skip"}
    task = task_of(moving(**fields, evaluate__batch_size=3))
    validation = task.validation(task.open(train=False).validation)
    assert [len(batch.unreadable) for batch in validation.batches(ClipView(12, 4))] == [0, 1]
