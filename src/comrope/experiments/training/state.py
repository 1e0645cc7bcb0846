"""The state of a training: weights, averages and optimizer state, to and from plain tensors."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from comrope._checks import name_shown
from comrope._json import COUNT, NUMBER, Entries, Items
from comrope.experiments.common.distributed import shard_like

__all__ = [
    "VALUES",
    "Average",
    "Snapshot",
    "TrainingState",
    "load_optimizer",
    "load_scaler",
    "optimizer_numbers",
    "optimizer_tensors",
]

VALUES = Entries(  # the form of ``TrainingState.values``
    {
        "unreadable": COUNT,
        "scaler": Entries(others=NUMBER),
        "optimizer": Items(Entries(others=NUMBER)),
    }
)


class TrainingState(Protocol):
    """The complete state of a trainer after a step."""

    @property
    def label(self) -> str:
        """Its name in messages."""

    @property
    def step(self) -> int: ...

    @property
    def values(self) -> dict[str, Any]:
        """JSON values."""

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Return a part of the tensors: "model", "optimizer" or "average"."""


class Snapshot(NamedTuple):
    """A training state in memory: full tensors on the CPU."""

    step: int
    values: dict[str, Any]
    parts: dict[str, dict[str, Tensor]]

    @property
    def label(self) -> str:
        return f"the state after step {self.step}"

    def tensors(self, name: str) -> dict[str, Tensor]:
        return self.parts[name]


class Average:
    """The exponential moving average of a model's parameters (EMA)."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.tensors = {name: p.detach().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Add the parameters after a step. The decay is smaller in the first steps."""
        decay = min(self.decay, (1 + step) / (10 + step))
        for name, parameter in model.named_parameters():
            self.tensors[name].lerp_(parameter, 1 - decay)

    @contextlib.contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Use the averages as the parameters within the block."""
        self._exchange(model)
        try:
            yield
        finally:
            self._exchange(model)

    @torch.no_grad()
    def _exchange(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            own = parameter.detach().clone()
            parameter.copy_(self.tensors[name])
            self.tensors[name] = own

    def load(self, model: nn.Module, tensors: dict[str, Tensor]) -> None:
        """Load the averages from full tensors."""
        parameters = dict(model.named_parameters())
        self.tensors = {name: shard_like(t, parameters[name]) for name, t in tensors.items()}


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the state of every parameter as "parameter/key"."""
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    return {
        f"{names[parameter]}/{key}": torch.as_tensor(value)
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }


def optimizer_numbers(optimizer: torch.optim.Optimizer) -> list[dict[str, float]]:
    """Return the numbers in the parameter groups, where timm's lamb, adan, ... count steps."""
    return [
        {
            key: value.item() if isinstance(value, Tensor) else value
            for key, value in group.items()
            if type(value) in (int, float) or (isinstance(value, Tensor) and value.ndim == 0)
        }
        for group in optimizer.param_groups
    ]


def load_optimizer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tensors: dict[str, Tensor],
    numbers: list[dict[str, float]],
) -> None:
    """Restore what ``optimizer_tensors`` and ``optimizer_numbers`` returned.

    Raises:
        ValueError: They are of other parameters; nothing was changed.
    """
    if len(numbers) != (groups := len(optimizer.param_groups)):
        raise ValueError(f"optimizer: expected {groups} parameter groups, got {len(numbers)}")
    names = {parameter: name for name, parameter in model.named_parameters()}
    if unknown := {key.rpartition("/")[0] for key in tensors} - {*names.values()}:
        wrong = name_shown(min(unknown))
        raise ValueError(f"optimizer: {wrong} is no parameter of the model")
    states: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, part = key.rpartition("/")
        states.setdefault(name, {})[part] = tensor
    _check_parts(states, {name: parameter.shape for parameter, name in names.items()})
    for group, own in zip(optimizer.param_groups, numbers, strict=True):
        group.update(own)
    numbered = optimizer.state_dict()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbered["state"] = {
        number: {
            part: shard_like(t, parameter) if t.shape == parameter.shape else t
            for part, t in states[names[parameter]].items()
        }
        for number, parameter in enumerate(parameters)
        if names[parameter] in states
    }
    optimizer.load_state_dict(numbered)


def _check_parts(states: dict[str, dict[str, Tensor]], shapes: dict[str, torch.Size]) -> None:
    """Raise ``ValueError`` unless the states of all parameters have the form of most."""
    count = Counter(part for parts in states.values() for part in parts)
    alike = Counter(p for name, own in states.items() for p in own if own[p].shape == shapes[name])
    for name, own in states.items():
        for part in count:
            if part not in own:
                raise ValueError(f"optimizer: {name} has no {name_shown(part)}")
            if 2 * alike[part] > count[part] and own[part].shape != shapes[name]:
                raise ValueError(f"optimizer: {name}/{name_shown(part)} has another shape")


def load_scaler(scaler: torch.amp.GradScaler, numbers: dict[str, float]) -> None:
    """Restore the state of a gradient scaler; raise ``ValueError`` if it has other entries."""
    if missing := scaler.state_dict().keys() - numbers:
        raise ValueError(f"scaler: has no {min(missing)}")
    scaler.load_state_dict(numbers)
