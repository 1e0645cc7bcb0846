"""From one process to many nodes: what is the same for all of them, and what is shared out."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from comrope.experiments.common.errors import UserError

__all__ = [
    "accumulating",
    "autocast",
    "create_accelerator",
    "distribute",
    "full",
    "like",
    "reshard",
    "same_for_all",
    "total",
    "unwrap",
]


def create_accelerator(device: str) -> Accelerator:
    """The processes that ``accelerate launch`` or ``torchrun`` started, or this one alone."""
    # Without a GPU Accelerate must be told, or each of several processes takes itself for the only.
    cpu = device == "cpu" or not torch.cuda.is_available()
    _meet_anew("gloo" if cpu else "nccl")
    accelerator = Accelerator(mixed_precision="no", cpu=cpu)
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != launched:
        raise UserError(f"{launched} processes were launched, but they do not find each other")
    return accelerator


def _meet_anew(backend: str) -> None:
    """After a restart by torchrun: its store still has the addresses of the processes that died.

    A new process that reads one of them waits for a peer that will never answer, so every attempt
    gets a name space of its own. (torch 2.15 leaves that out.)
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or dist.is_initialized():
        return
    store, rank, size = next(rendezvous("env://"))
    store = dist.PrefixStore(f"attempt-{attempt}", store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)


def same_for_all(accelerator: Accelerator, value: Any) -> Any:
    """What the main process has: a decision that all must take alike."""
    return broadcast_object_list([value])[0] if accelerator.num_processes > 1 else value


def autocast(precision: str, device: torch.device) -> torch.autocast:
    """Ours rather than Accelerate's: that is one for all runs of a process."""
    dtype = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


def distribute(model: nn.Module, strategy: str, accelerator: Accelerator) -> nn.Module:
    """The model on its device; over many processes replicated (ddp) or sharded (fsdp2).

    Not through ``Accelerator.prepare``: that shards on GPUs only, and wraps ``forward``.
    """
    model.to(accelerator.device)
    if accelerator.num_processes == 1:
        return model
    if strategy == "ddp":
        on_gpu = accelerator.device.type == "cuda"
        devices = [accelerator.device.index] if on_gpu else None
        return DistributedDataParallel(model, device_ids=devices)
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def unwrap(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def reshard(model: nn.Module) -> None:
    """After evaluation: a sharded model keeps the weights that it gathered last."""
    if isinstance(model, FSDPModule):
        model.reshard()


@contextlib.contextmanager
def accumulating(model: nn.Module, last: bool) -> Iterator[None]:
    """Gradients are exchanged between processes in the last part of a step only."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
    if isinstance(model, DistributedDataParallel) and not last:
        with model.no_sync():
            yield
    else:
        yield


def full(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded. Every process must ask for it."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor, sharded as ``parameter`` is."""
    tensor = tensor.to(parameter.device)
    if isinstance(parameter, DTensor):
        return distribute_tensor(tensor, parameter.device_mesh, parameter.placements)
    return tensor


def total(accelerator: Accelerator, *values: float | Tensor) -> list[float]:
    """Sums over all processes."""
    stacked = torch.stack([torch.as_tensor(v, device=accelerator.device).double() for v in values])
    result: Any = accelerator.reduce(stacked, reduction="sum")
    return [float(v) for v in result]
