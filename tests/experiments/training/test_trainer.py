"""The training loop alone: its checkpoints and records stay in memory."""

from __future__ import annotations

import contextlib
from itertools import pairwise

import pytest
import torch
from helpers import raises_for
from support.runs import Memory, same, tiny, trainer_of
from support.toy import Curve, curve

from comrope.experiments.common.distributed import create_accelerator
from comrope.experiments.common.errors import Interrupted, UserError
from comrope.experiments.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")


def learn(config, sink=None, state=None):
    """Train to the end, from a state if there is one; return the outcome."""
    with contextlib.closing(trainer_of(config, sink)) as trainer:
        trainer.initialize() if state is None else trainer.restore(state)
        trainer.fit()
        return trainer.finish()


def interrupted(config, step: int) -> Memory:
    """The sink of a training that it stopped after a step."""
    sink = Memory(stop_after=step)
    with pytest.raises(Interrupted):
        learn(config, sink)
    return sink


def assert_resumes_exactly(config, step: int = 5) -> None:
    sink = interrupted(config, step)
    assert [state.step for state in sink.states] == [step]
    whole, resumed = learn(config), learn(config, state=sink.states[0])
    assert same(resumed.weights, whole.weights)
    found, expected = resumed.by_view.values(), whole.by_view.values()
    assert [{**f, "seconds": 0} for f in found] == [{**e, "seconds": 0} for e in expected]


def test_a_task_is_learned_without_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sink = Memory()
    outcome = learn(curve(train__checkpoint_every=6, evaluate__every=1), sink)
    assert sink.values("train", "step") == list(range(1, 17))
    losses = sink.values("train", "loss")
    assert sum(losses[-4:]) < 0.5 * sum(losses[:4])
    assert max(sink.values("train", "lr")) == pytest.approx(5e-2, rel=0.05)
    assert [state.step for state in sink.states] == [6, 12, 16]
    assert sink.values("evaluation", "epoch") == [1]  # the last one is the result
    assert outcome.by_view["all"]["error"] < sink.values("evaluation", "error")[0]
    assert outcome.by_view["all"]["points"] == 20
    assert same(outcome.weights, sink.states[-1].tensors("model"))
    assert not list(tmp_path.iterdir())


def test_the_seed_decides_where_it_ends():
    """The negative control of all that is the same to the bit."""
    one, again, other = (learn(curve(train__seed=seed)).weights for seed in (0, 0, 1))
    assert same(one, again)
    assert not same(one, other)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"train__ema": 0.9, "train__accumulate": 2},
        {"train__precision": "fp16", "optim__clip_grad": 1.0},
        {"optim__name": "lamb"},  # counts its steps elsewhere
        {"optim__name": "sgd", "optim__clip_grad": 0.1},
    ],
)
def test_everything_that_has_a_state_is_resumed(options):
    assert_resumes_exactly(curve(**options))


@pytest.mark.parametrize("options", [
    {"train__ema": 0.9, "train__accumulate": 2, "model__drop_path_rate": 0.3},
    pytest.param(
        {"augment__mixup": 0.8, "augment__cutmix": 1.0, "augment__erase": 0.3, "data__workers": 2,
         "augment__repeats": 3, "augment__auto_augment": "rand-m9-mstd0.5-inc1",
         "data__in_chans": 3, "data__mean": (0.3, 0.3, 0.3), "data__std": (0.4, 0.4, 0.4)},
        marks=pytest.mark.slow,
    ),
    pytest.param({"optim__name": "lamb", "optim__angle_lr_scale": 3.0}, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_classifier_draws_what_it_would_have_drawn(options):
    assert_resumes_exactly(tiny(train__epochs=1, train__checkpoint_every=100, **options))


def test_every_part_of_every_step_has_draws_of_its_own():
    drawn: list[float] = []

    class Recorded(Curve):
        def loss(self, model, batch, step):
            drawn.append(float(torch.rand(())))
            return super().loss(model, batch, step)

    config = curve(train__accumulate=2)
    trainer = Trainer(Recorded(config), create_accelerator("cpu"), Memory())
    trainer.fit()
    assert len(set(drawn)) == len(drawn) == 2 * 16


def test_gradients_of_parts_add_up_to_those_of_the_batch():
    """The weight of a part is its share; without dropout, nothing else differs."""
    plain = {"train__epochs": 1, "model__drop_path_rate": 0.0, "train__perturbation": 0.0}
    whole, parts = (
        learn(tiny(**plain, train__accumulate=count, optim__name="sgd")).weights for count in (1, 2)
    )
    for name, tensor in whole.items():
        torch.testing.assert_close(parts[name], tensor, rtol=1e-3, atol=1e-5, msg=name)


def test_averaged_weights_are_evaluated_and_kept():
    sink = Memory()
    outcome = learn(curve(train__ema=0.7, train__checkpoint_every=1), sink)
    for before, after in pairwise(sink.states):
        decay = min(0.7, after.step / (9 + after.step))  # steps are counted from 0 here
        for name, old in before.tensors("average").items():
            expected = decay * old + (1 - decay) * after.tensors("model")[name]
            torch.testing.assert_close(after.tensors("average")[name], expected)
    last = sink.states[-1]
    assert same(outcome.weights, last.tensors("average"))
    assert not same(outcome.weights, last.tensors("model"))
    assert outcome.by_view["all"]["error"] != learn(curve()).by_view["all"]["error"]


def test_a_stop_in_an_evaluation_between_epochs_saves_first():
    config = curve(evaluate__every=1)

    class InEvaluation(Memory):
        asked = 0

        def should_stop(self, step):
            self.asked += step == 8
            return self.asked == 2  # the first time is after the step

    sink = InEvaluation()
    with pytest.raises(Interrupted):
        learn(config, sink)
    assert [state.step for state in sink.states] == [8]
    assert same(learn(config, state=sink.states[0]).weights, learn(config).weights)


def test_weights_that_are_not_finite_are_never_saved():
    sink = Memory()
    wild = {"optim__name": "sgd", "optim__lr": 1000.0, "optim__clip_grad": None}
    with pytest.raises(UserError):
        learn(curve(**wild, train__checkpoint_every=1), sink)
    assert all(t.isfinite().all() for state in sink.states for t in state.tensors("model").values())


def test_what_cannot_be_read_stops_the_training_or_is_counted(capfd):
    config = curve(options__bad=3)
    with raises_for("point 3", UserError):
        learn(config)
    assert learn(config.with_overrides({"data.unreadable": "skip"})).unreadable == 2
    assert capfd.readouterr().err.count("point 3") == 2  # once an epoch


def test_speed_and_waiting_are_logged_of_the_last_steps():
    sink = Memory()
    learn(curve(train__log_every=5), sink)
    assert sink.values("train", "step") == [5, 10, 15, 16]
    assert all(speed > 0 for speed in sink.values("train", "points_per_second"))
    assert all(0 <= share <= 1 for share in sink.values("train", "waiting_for_data"))


def test_bad_settings_are_refused_before_the_first_step():
    for argument, config in {
        "train.batch_size": curve(train__batch_size=65),
        "optim.name": curve(optim__name="adamx"),
        "evaluate.resolutions": tiny(evaluate__resolutions=(13,)),
    }.items():
        with raises_for(argument, UserError):
            trainer_of(config)
