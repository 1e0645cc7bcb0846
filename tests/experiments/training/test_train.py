"""Killed, stopped, damaged: a run continues as if nothing had happened, or says why it cannot."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from helpers import raises_for
from support.runs import in_process, same, stop_after, tiny, weights
from support.toy import Points, curve

from comrope.experiments.common.errors import Interrupted, UserError
from comrope.experiments.runs.directory import RESULT, WEIGHTS, read_result
from comrope.experiments.runs.log import read_log
from comrope.experiments.training.train import MOST_NAMED, RunFolder, is_finished, train
from comrope.experiments.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")


def steps_in(folder: Path) -> list[int]:
    return sorted(int(p.name[5:]) for p in (folder / "checkpoints").glob("step-*"))


def logged(folder: Path) -> list[int]:
    return [r["step"] for r in read_log(folder / "log.jsonl") if r["event"] == "train"]


def damage(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


# Results


def test_a_run_leaves_weights_a_result_and_a_log(tmp_path):
    config = tiny(train__epochs=1, evaluate__resolutions=(12, 24))
    result = train(config, tmp_path / "run", progress=False)
    assert result == read_result(tmp_path / "run")
    assert is_finished(config, tmp_path / "run")
    assert set(result["top1"]) == set(result["view_seconds"]) == {"12", "24"}
    assert result["evaluation_seconds"] == pytest.approx(sum(result["view_seconds"].values()))
    assert (result["steps"], result["images"], result["processes"]) == (11, 360, 1)
    assert result["unreadable"] == {"training": 0, "validation": 0}
    assert result["left_out"] == {}
    assert result["position_parameters"] < result["parameters"]
    assert result["images_per_second"] > 0
    assert result["peak_memory_gib"] > 0
    assert set(result["machine"]) >= {"device", "torch", "comrope", "date"}
    records = read_log(tmp_path / "run" / "log.jsonl")
    assert records[-1]["event"] == "result"
    assert records[-1]["top1"] == result["top1"]
    assert logged(tmp_path / "run") == list(range(1, 12))


def test_digits_are_learned(tmp_path):
    """Chance is 10 %."""
    config = tiny(train__epochs=4, model__position="comrope-ld", optim__lr=4e-3)
    assert train(config, tmp_path / "run", progress=False)["top1"]["12"] > 40


def test_a_finished_run_is_not_run_again_and_another_is_refused(tmp_path):
    train(curve(), tmp_path / "run", progress=False)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    assert train(curve(), tmp_path / "run", progress=False)["steps"] == 16
    with raises_for("out", UserError):
        train(curve(train__seed=7), tmp_path / "run", progress=False)
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before


def test_more_resolutions_are_added_to_existing_ones(tmp_path):
    """From the weights: the checkpoints may be gone."""
    first = train(tiny(train__epochs=1), tmp_path / "run", progress=False)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    before = weights(tmp_path / "run")
    more = tiny(train__epochs=1, evaluate__resolutions=(12, 24))
    assert not is_finished(more, tmp_path / "run")
    result = train(more, tmp_path / "run", progress=False)
    assert set(result["top1"]) == {"12", "24"}
    assert {**result, "top1": None} == {**first, "top1": None}
    assert same(weights(tmp_path / "run"), before)
    assert train(more, tmp_path / "run", progress=False) == result


def test_what_training_leaves_out_is_printed_logged_and_counted(tmp_path, monkeypatch, capfd):
    left_out = {"too dark": ["a", "b"], "no name": [*range(MOST_NAMED + 7)]}
    monkeypatch.setattr(Points, "left_out", left_out, raising=False)
    stop_after(3, curve(), tmp_path / "run")
    counts = {reason: len(names) for reason, names in left_out.items()}
    result = train(curve(), tmp_path / "run", progress=False)
    assert result["left_out"] == counts
    line = f"too dark: 2, no name: {MOST_NAMED + 7}"
    assert capfd.readouterr().err.count(line) == 2  # a resumed run prints it again
    records = [r for r in read_log(tmp_path / "run" / "log.jsonl") if r["event"] == "left_out"]
    assert {record["reason"]: record["count"] for record in records} == counts
    assert [record["first"] for record in records] == [["a", "b"], [*range(MOST_NAMED)]]


# Folders


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with raises_for("out", UserError):
        train(curve(), tmp_path, progress=False)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_first_write_that_was_interrupted_does_not_block_the_folder(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".config.yaml.123").write_text("model:")
    assert train(curve(), tmp_path / "run", progress=False)["steps"] == 16


def test_a_run_that_stopped_before_its_first_checkpoint_may_be_corrected(tmp_path, monkeypatch):
    def fail(trainer):
        raise UserError("wrong")

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "fit", fail)
        with pytest.raises(UserError, match="wrong"):
            train(curve(train__seed=5), tmp_path / "run", progress=False)
    assert train(curve(), tmp_path / "run", progress=False)["steps"] == 16


def test_settings_that_cannot_work_are_refused_before_anything_is_written(tmp_path):
    for argument, config in {
        "data.root": tiny(data__name="folder", data__root="/no/such/place"),
        "train.batch_size": curve(train__batch_size=1000),
        "model": tiny(model__position="comrope"),
    }.items():
        with raises_for(argument, UserError):
            train(config, tmp_path / "run", progress=False)
        assert not (tmp_path / "run").exists()


def test_a_folder_has_one_run_at_a_time(tmp_path):
    with RunFolder(tmp_path / "run").locked(), raises_for("out", UserError):
        train(curve(), tmp_path / "run", progress=False)
    assert train(curve(), tmp_path / "run", progress=False)["steps"] == 16


# Resuming


def test_stopped_and_resumed_it_ends_with_the_same_weights(tmp_path):
    config = tiny(train__epochs=1)
    train(config, tmp_path / "whole", progress=False)
    stop_after(6, config, tmp_path / "parts")
    assert steps_in(tmp_path / "parts") == [4, 6]
    train(config, tmp_path / "parts", progress=False)
    assert same(weights(tmp_path / "parts"), weights(tmp_path / "whole"))
    train(tiny(train__epochs=1, train__seed=1), tmp_path / "other", progress=False)
    assert not same(weights(tmp_path / "other"), weights(tmp_path / "whole"))


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(tmp_path, capfd):
    folder, config = tmp_path / "run", curve(train__checkpoint_every=8)
    stop_after(10, config, folder)
    assert steps_in(folder) == [8, 10]
    broken = folder / "checkpoints" / "step-00000010"
    damage(broken / "optimizer.safetensors")
    train(config, folder, progress=False)
    said = capfd.readouterr().err.replace("\n", " ")
    assert str(broken) in said
    assert "resumed at step 8" in said
    train(config, tmp_path / "whole", progress=False)
    assert same(weights(folder), weights(tmp_path / "whole"))


def test_with_no_complete_checkpoint_nothing_is_overwritten(tmp_path):
    folder = tmp_path / "run"
    stop_after(3, curve(), folder)
    damage(folder / "checkpoints" / "step-00000003" / "model.safetensors")
    before = sorted(folder.rglob("*"))
    with pytest.raises(UserError, match="step-00000003"):
        train(curve(), folder, progress=False)
    assert sorted(folder.rglob("*")) == before


def test_a_checkpoint_of_another_shape_is_refused_by_name(tmp_path):
    folder, other = tmp_path / "run", tmp_path / "other"
    stop_after(3, tiny(), folder)
    stop_after(3, tiny(model__name="vit_nano_patch2_12"), other)
    shutil.rmtree(folder / "checkpoints")
    (other / "checkpoints").rename(folder / "checkpoints")
    with pytest.raises(UserError, match=r"patches\.proj\.weight.*\(64, 4\).*\(64, 16\)"):
        train(tiny(), folder, progress=False)


def test_the_log_has_every_step_once_even_without_a_checkpoint(tmp_path, monkeypatch):
    def killed(folder, step):
        if step == 3:
            raise KeyboardInterrupt
        return False

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "should_stop", killed)
        with pytest.raises(KeyboardInterrupt):
            train(curve(), tmp_path / "run", progress=False)
    train(curve(), tmp_path / "run", progress=False)
    assert logged(tmp_path / "run") == list(range(1, 17))


# Signals


def test_a_signal_is_an_answer_and_a_second_interruption_ends_at_once(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    folder = RunFolder(tmp_path)
    with folder.stopped_by_signals():
        assert not folder.should_stop(0)
        os.kill(os.getpid(), signal.SIGTERM)
        assert folder.should_stop(0)
        os.kill(os.getpid(), signal.SIGTERM)  # a scheduler may repeat it
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_stop_after_the_last_step_is_for_the_runs_after_it(tmp_path, monkeypatch):
    finish = Trainer.finish

    def told(trainer):
        outcome = finish(trainer)
        os.kill(os.getpid(), signal.SIGTERM)
        return outcome

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "finish", told)
        with pytest.raises(Interrupted):
            train(curve(), tmp_path / "run", progress=False)
    assert is_finished(curve(), tmp_path / "run")


def test_a_signal_in_the_last_evaluation_stops_it(tmp_path, monkeypatch):
    finish = Trainer.finish

    def told(trainer):
        os.kill(os.getpid(), signal.SIGTERM)
        return finish(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "finish", told)
        with pytest.raises(Interrupted):
            train(curve(), tmp_path / "run", progress=False)
    assert not (tmp_path / "run" / RESULT).exists()
    assert train(curve(), tmp_path / "run", progress=False)["steps"] == 16


# Processes that are killed


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The run that was never killed."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    process = in_process(tiny(), folder)
    process.join()
    assert process.exitcode == 0
    return folder


@pytest.mark.slow
def test_killed_at_ten_random_moments_it_ends_with_the_same_weights(whole, tmp_path):
    folder, moments = tmp_path / "run", random.Random(0)
    config = tiny(train__checkpoint_every=1)
    for kill in range(10):
        process = in_process(config, folder)
        reached = 2 * kill - moments.randint(0, 2)
        while process.is_alive() and max([0, *steps_in(folder)]) < reached:
            time.sleep(0.002)
        time.sleep(moments.uniform(0, 0.05))  # anywhere in a step, a checkpoint, a start
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL
    process = in_process(config, folder)
    process.join()
    assert process.exitcode == 0
    assert same(weights(folder), weights(whole))
    assert logged(folder) == list(range(1, 23))


@pytest.mark.slow
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
    if not (folder / RESULT).exists():
        assert len(steps_in(folder)) == 1
    process = in_process(config, folder)
    process.join()
    assert same(weights(folder), weights(whole))


@pytest.mark.slow
def test_another_process_in_the_folder_is_noticed(tmp_path):
    folder = tmp_path / "run"
    process = in_process(tiny(train__epochs=50), folder)
    while not (folder / "log.jsonl").exists():
        time.sleep(0.01)
    with raises_for("out", UserError):
        train(tiny(train__epochs=50), folder, progress=False)
    process.kill()
    process.join()


# On a GPU


def losses(folder: Path) -> list[float]:
    return [r["loss"] for r in read_log(folder / "log.jsonl") if r["event"] == "train"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("precision", "compiled"), [("bf16", True), ("fp16", False), ("no", False)]
)
def test_on_a_gpu_a_stopped_run_continues_as_if_it_was_not(precision, compiled, tmp_path):
    config = tiny(
        train__device="auto",
        train__precision=precision,
        train__compile=compiled,
        optim__clip_grad=1.0,
        train__ema=0.9,
        evaluate__resolutions=(12, 24),
    )
    result = train(config, tmp_path / "whole", progress=False)
    stop_after(9, config, tmp_path / "parts")
    train(config, tmp_path / "parts", progress=False)
    assert (tmp_path / "parts" / WEIGHTS).is_file()
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), abs=5e-3)
    assert losses(tmp_path / "whole")[-1] < 2.0
    assert result["machine"]["device"].startswith("NVIDIA")
    assert result["peak_memory_gib"] > 0
