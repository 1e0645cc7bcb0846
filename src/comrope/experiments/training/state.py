"""What a run must remember to go on as if nothing had happened, in and out of plain tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from comrope.experiments.common.distributed import full, like
from comrope.experiments.common.errors import UserError

__all__ = [
    "Average",
    "load_model",
    "load_optimizer",
    "optimizer_numbers",
    "optimizer_tensors",
    "whole",
]


class Average:
    """The exponential moving average of a model's parameters (EMA)."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.tensors = {name: p.detach().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """After step ``step``; the first steps count more, so that the start is soon forgotten."""
        decay = min(self.decay, (1 + step) / (10 + step))
        for name, parameter in model.named_parameters():
            self.tensors[name].lerp_(parameter, 1 - decay)

    @contextlib.contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """The averages in the place of the parameters, for a while."""
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
        parameters = dict(model.named_parameters())
        self.tensors = {name: like(t, parameters[name]) for name, t in tensors.items()}


def whole(tensors: dict[str, Tensor], *, keep: bool = True) -> dict[str, Tensor]:
    """All tensors gathered, on the CPU, one after the other. Every process must ask for it, and
    those that do not ``keep`` them get none."""
    gathered = {}
    for name, tensor in tensors.items():
        complete = full(tensor)
        if keep:
            # A copy, on the CPU too: the average must outlast its exchange with the parameters.
            gathered[name] = complete.to("cpu", copy=True)
    return gathered


@torch.no_grad()
def load_model(model: nn.Module, tensors: dict[str, Tensor], where: str) -> None:
    """Fill a model, sharded or not; an error that names what does not fit."""
    own = model.state_dict()
    for name, tensor in own.items():
        if name not in tensors:
            raise UserError(f"{where}: has no {name!r}, which the model has")
        if tensors[name].shape != tensor.shape:
            raise UserError(
                f"{where}: {name!r} has shape {tuple(tensors[name].shape)}, "
                f"the model expects {tuple(tensor.shape)}"
            )
    if extra := sorted(set(tensors) - set(own)):
        raise UserError(f"{where}: has {extra[0]!r}, which the model has not")
    for name, tensor in own.items():
        tensor.copy_(like(tensors[name], tensor))


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The state of every parameter as "parameter/key"."""
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    return {
        f"{names[parameter]}/{key}": torch.as_tensor(value)
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }


def optimizer_numbers(optimizer: torch.optim.Optimizer) -> list[dict[str, float]]:
    """What some optimizers count in their parameter groups: the steps of timm's lamb, adan, ..."""
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
    for group, own in zip(optimizer.param_groups, numbers, strict=True):
        group.update(own)
    names = {parameter: name for name, parameter in model.named_parameters()}
    states: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, part = key.rpartition("/")
        states.setdefault(name, {})[part] = tensor
    numbered = optimizer.state_dict()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbered["state"] = {
        number: {
            part: like(t, parameter) if t.shape == parameter.shape else t
            for part, t in states[names[parameter]].items()
        }
        for number, parameter in enumerate(parameters)
        if names[parameter] in states
    }
    optimizer.load_state_dict(numbered)
