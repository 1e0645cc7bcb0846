"""Killed, stopped, damaged: a run goes on as if nothing had happened, or says why it cannot."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from support.runs import in_process, same, tiny, weights

from comrope.experiments.common.errors import Interrupted, UserError
from comrope.experiments.runs.log import read_log
from comrope.experiments.training import checkpoint
from comrope.experiments.training.evaluate import evaluate_run
from comrope.experiments.training.train import train


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The run that was never killed."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    process = in_process(tiny(), folder)
    process.join()
    assert process.exitcode == 0
    return folder


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Path:
    """The same in this process, with its number of threads."""
    folder = tmp_path_factory.mktemp("here") / "run"
    train(tiny(), folder, progress=False)
    return folder


def steps_there(folder: Path) -> list[int]:
    return sorted(int(p.name[5:]) for p in (folder / "checkpoints").glob("step-*"))


def test_killed_at_ten_random_moments_it_ends_with_the_same_weights(whole, tmp_path):
    folder, moments = tmp_path / "run", random.Random(0)
    config = tiny(train__checkpoint_every=1)
    for kill in range(10):
        process = in_process(config, folder)
        reached = 2 * kill - moments.randint(0, 2)
        while process.is_alive() and max([0, *steps_there(folder)]) < reached:
            time.sleep(0.002)
        time.sleep(moments.uniform(0, 0.05))  # anywhere in a step, a checkpoint, a start
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL
    process = in_process(config, folder)
    process.join()
    assert process.exitcode == 0
    assert same(weights(folder), weights(whole))
    steps = [r["step"] for r in read_log(folder / "log.jsonl") if r["event"] == "train"]
    assert steps == list(range(1, 23))


def test_a_different_seed_ends_elsewhere(whole, tmp_path):
    """The negative control: weights do depend on what is drawn."""
    train(tiny(train__seed=1), tmp_path / "run", progress=False)
    assert not same(weights(tmp_path / "run"), weights(whole))


@pytest.mark.parametrize("options", [
    {"train__ema": 0.9, "train__accumulate": 2, "model__drop_path_rate": 0.3},
    {"augment__mixup": 0.8, "augment__cutmix": 1.0, "augment__erase": 0.3, "data__workers": 2,
     "augment__repeats": 3, "augment__auto_augment": "rand-m9-mstd0.5-inc1",
     "data__in_chans": 3, "data__mean": (0.3, 0.3, 0.3), "data__std": (0.4, 0.4, 0.4)},
    {"train__precision": "fp16", "optim__clip_grad": 1.0},
    {"optim__name": "lamb"},  # counts its steps elsewhere
    {"optim__name": "sgd", "optim__clip_grad": 0.1, "optim__angle_lr_scale": 3.0},
])  # fmt: skip
def test_everything_that_has_a_state_is_resumed(options, tmp_path, monkeypatch):
    config = tiny(train__epochs=1, train__checkpoint_every=100, **options)
    train(config, tmp_path / "whole", progress=False)
    stop_after(5, config, tmp_path / "parts", monkeypatch)
    assert steps_there(tmp_path / "parts") == [5]
    train(config, tmp_path / "parts", progress=False)
    assert same(weights(tmp_path / "parts"), weights(tmp_path / "whole"))


def test_the_averaged_weights_are_the_ones_kept_and_evaluated(tmp_path):
    result = train(tiny(train__ema=0.9), tmp_path / "run", progress=False)
    last = checkpoint.latest(tmp_path / "run" / "checkpoints")
    assert same(weights(tmp_path / "run"), last.tensors("average"))
    assert not same(weights(tmp_path / "run"), last.tensors("model"))
    (entry,) = evaluate_run(tmp_path / "run", progress=False)
    assert entry["top1"] == result["top1"]["12"]


def stop_after(step: int, config, folder: Path, monkeypatch) -> None:
    """A run told to stop after this step."""
    from comrope.experiments.training.trainer import Run

    with monkeypatch.context() as patch:
        patch.setattr(Run, "should_stop", lambda run: run.step == step)
        with pytest.raises(Interrupted, match=f"stopped at step {step}"):
            train(config, folder, progress=False)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_leaves(number, whole, tmp_path):
    folder = tmp_path / "run"
    config = tiny(train__checkpoint_every=1000)
    process = in_process(config, folder)
    while not (folder / "log.jsonl").exists():
        time.sleep(0.01)
    time.sleep(0.1)
    os.kill(process.pid, number)
    process.join(timeout=60)
    if not (folder / "result.json").exists():
        assert len(steps_there(folder)) == 1
    process = in_process(config, folder)
    process.join()
    assert same(weights(folder), weights(whole))


def damage(path: Path, how: str) -> None:
    if how == "truncated":
        os.truncate(path, path.stat().st_size // 2)
    elif how == "removed":
        path.unlink()
    else:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)


@pytest.mark.parametrize("how", ["truncated", "flipped", "removed"])
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(
    how, name, here, tmp_path, monkeypatch, capfd
):
    folder, config = tmp_path / "run", tiny()
    stop_after(10, config, folder, monkeypatch)
    assert steps_there(folder) == [8, 10]
    broken = folder / "checkpoints" / "step-00000010"
    damage(broken / name, how)
    train(config, folder, progress=False)
    said = capfd.readouterr().err.replace("\n", " ")
    assert f"checkpoint {broken} is damaged" in said
    assert "resumed at step 8" in said
    assert same(weights(folder), weights(here))


def test_with_no_checkpoint_whole_nothing_is_overwritten(tmp_path, monkeypatch):
    folder, config = tmp_path / "run", tiny()
    stop_after(3, config, folder, monkeypatch)
    damage(folder / "checkpoints" / "step-00000003" / "model.safetensors", "truncated")
    before = sorted(folder.rglob("*"))
    with pytest.raises(UserError, match=r"no checkpoint in .* is whole: .*step-00000003"):
        train(config, folder, progress=False)
    assert sorted(folder.rglob("*")) == before


def test_a_full_disk_leaves_the_checkpoints_before_it(tmp_path, monkeypatch):
    tensors = {"model": {"w": torch.ones(3)}}
    checkpoint.save(tmp_path, 1, tensors, {})
    monkeypatch.setattr(
        checkpoint, "save_file", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left"))
    )
    with pytest.raises(UserError, match=r"step-00000002 cannot be written .*No space left"):
        checkpoint.save(tmp_path, 2, tensors, {})
    monkeypatch.undo()
    found = checkpoint.latest(tmp_path)
    assert found.step == 1
    assert torch.equal(found.tensors("model")["w"], torch.ones(3))
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


def test_a_checkpoint_outlives_a_damaged_later_one(tmp_path):
    for step in (100, 200):
        checkpoint.save(tmp_path, step, {"model": {"w": torch.ones(step)}}, {})
    damage(tmp_path / "step-00000200" / "model.safetensors", "truncated")
    (tmp_path / ".writing-1").mkdir()  # left by a writer that was killed
    checkpoint.save(tmp_path, 150, {"model": {"w": torch.ones(150)}}, {}, keep=1)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000150"]
    assert checkpoint.latest(tmp_path).step == 150


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    for step in (1, 2, 3, 10):
        checkpoint.save(tmp_path, step, {"model": {"w": torch.ones(step)}}, {}, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000003", "step-00000010"]


def test_a_finished_run_is_not_run_again_and_another_is_refused(whole):
    before = {p: p.stat().st_mtime_ns for p in whole.rglob("*")}
    assert train(tiny(), whole, progress=False)["steps"] == 22
    with pytest.raises(UserError, match=r"holds another run \(train.seed: 7, there 0\)"):
        train(tiny(train__seed=7), whole, progress=False)
    assert {p: p.stat().st_mtime_ns for p in whole.rglob("*")} == before


def test_a_checkpoint_of_another_shape_is_refused_by_name(tmp_path, monkeypatch):
    folder, config = tmp_path / "run", tiny()
    stop_after(3, config, folder, monkeypatch)
    other = tmp_path / "other"
    stop_after(3, tiny(model__name="vit_nano_patch2_12"), other, monkeypatch)
    (folder / "checkpoints").rename(tmp_path / "aside")
    (other / "checkpoints").rename(folder / "checkpoints")
    with pytest.raises(UserError, match=r"'patches.proj.weight' has shape \(64, 4\).*\(64, 16\)"):
        train(config, folder, progress=False)


def test_more_resolutions_are_added_to_what_is_there(tmp_path):
    """From the weights: the checkpoints may be gone."""
    first = train(tiny(train__epochs=1), tmp_path / "run", progress=False)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    before = weights(tmp_path / "run")
    more = tiny(train__epochs=1, evaluate__resolutions=(12, 24))
    result = train(more, tmp_path / "run", progress=False)
    assert set(result["top1"]) == {"12", "24"}
    assert {**result, "top1": None} == {**first, "top1": None}
    assert same(weights(tmp_path / "run"), before)
    assert train(more, tmp_path / "run", progress=False) == result


def test_a_signal_in_evaluation_stops_it(tmp_path, monkeypatch):
    from comrope.experiments.training.trainer import Run

    finish = Run.finish

    def told(run):
        run.stop = signal.SIGTERM
        return finish(run)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "finish", told)
        with pytest.raises(Interrupted, match="stopped in evaluation"):
            train(tiny(train__epochs=1), tmp_path / "run", progress=False)
    assert train(tiny(train__epochs=1), tmp_path / "run", progress=False)["steps"] == 11


def test_a_folder_has_one_run_at_a_time(tmp_path):
    folder = tmp_path / "run"
    process = in_process(tiny(train__epochs=50), folder)
    while not (folder / "log.jsonl").exists():
        time.sleep(0.01)
    with pytest.raises(UserError, match="another process is at work in"):
        train(tiny(train__epochs=50), folder, progress=False)
    process.kill()
    process.join()


def test_a_first_writing_that_was_cut_off_does_not_block_the_folder(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".config.yaml.123").write_text("model:")
    assert train(tiny(train__epochs=1), tmp_path / "run", progress=False)["steps"] == 11


def test_the_log_has_every_step_once_even_without_a_checkpoint(tmp_path, monkeypatch):
    from comrope.experiments.training.trainer import Run

    def killed(run):
        if run.step == 3:
            raise KeyboardInterrupt
        return False

    with monkeypatch.context() as patch:
        patch.setattr(Run, "should_stop", killed)
        with pytest.raises(KeyboardInterrupt):
            train(tiny(train__epochs=1), tmp_path / "run", progress=False)
    train(tiny(train__epochs=1), tmp_path / "run", progress=False)
    records = read_log(tmp_path / "run" / "log.jsonl")
    assert [r["step"] for r in records if r["event"] == "train"] == list(range(1, 12))


def test_a_run_that_stopped_before_its_first_checkpoint_may_be_corrected(tmp_path, monkeypatch):
    from comrope.experiments.training.trainer import Run

    with monkeypatch.context() as patch:
        patch.setattr(Run, "fit", lambda run: (_ for _ in ()).throw(UserError("wrong")))
        with pytest.raises(UserError, match="wrong"):
            train(tiny(train__seed=5), tmp_path / "run", progress=False)
    assert train(tiny(train__epochs=1), tmp_path / "run", progress=False)["steps"] == 11


def test_a_signal_in_an_evaluation_between_epochs_saves_first(tmp_path, monkeypatch):
    from comrope.experiments.training.trainer import Run

    evaluate = Run.evaluate

    def told(run, *arguments):
        run.stop = signal.SIGTERM
        return evaluate(run, *arguments)

    config = tiny(train__checkpoint_every=100, evaluate__every=1)
    with monkeypatch.context() as patch:
        patch.setattr(Run, "evaluate", told)
        with pytest.raises(Interrupted, match="stopped in evaluation"):
            train(config, tmp_path / "run", progress=False)
    assert steps_there(tmp_path / "run") == [11]
    train(config, tmp_path / "run", progress=False)
    train(config, tmp_path / "whole", progress=False)
    assert same(weights(tmp_path / "run"), weights(tmp_path / "whole"))


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(UserError, match="holds something else than a run; nothing was changed"):
        train(tiny(), tmp_path, progress=False)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_loss_that_is_not_finite_stops_before_it_is_saved(tmp_path):
    wild = tiny(optim__lr=1e38, optim__clip_grad=None, train__checkpoint_every=1)
    with pytest.raises(UserError, match="not finite"):
        train(wild, tmp_path / "run", progress=False)
    found = checkpoint.latest(tmp_path / "run" / "checkpoints")
    if found is not None:
        assert all(t.isfinite().all() for t in found.tensors("model").values())
