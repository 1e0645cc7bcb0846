"""One process or many: process groups, distributed models, sums, and sharded tensors.

All code that depends on how a model is distributed (DDP or FSDP2) is in this file.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
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
    "broadcast",
    "create_accelerator",
    "distribute",
    "gather_state",
    "gather_tensor",
    "reshard",
    "shard_like",
    "sum_over_processes",
    "unwrap",
]


def create_accelerator(device: str) -> Accelerator:
    """Return the accelerator of the processes that a launcher started, or of this one alone.

    Args:
        device: "auto", or "cpu" to use no GPU.
    """
    # Without a GPU, Accelerate needs cpu=True: otherwise every process counts only itself.
    cpu = device == "cpu" or not torch.cuda.is_available()
    _rejoin_after_restart("gloo" if cpu else "nccl")
    accelerator = Accelerator(mixed_precision="no", cpu=cpu)
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != launched:
        raise UserError(
            f"processes: {launched} were launched, but the group has {accelerator.num_processes}; "
            "start them with torchrun or accelerate launch"
        )
    return accelerator


def _rejoin_after_restart(backend: str) -> None:
    """Join the process group under a new name after torchrun restarted the processes.

    torchrun's store still has the addresses of the processes that ended. A new process that reads
    one of them would wait forever, so every attempt has its own name space. (Not needed from torch
    2.15 on.)
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or dist.is_initialized():
        return
    store, rank, size = next(rendezvous("env://"))
    store = dist.PrefixStore(f"attempt-{attempt}", store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)


def broadcast(accelerator: Accelerator, value: Any) -> Any:
    """Return the main process's value in every process, for decisions that all must share."""
    return broadcast_object_list([value])[0] if accelerator.num_processes > 1 else value


def sum_over_processes(accelerator: Accelerator, *values: float | Tensor) -> list[float]:
    """Return the sum of each value over all processes. Every process must call it."""
    stacked = torch.stack([torch.as_tensor(v, device=accelerator.device).double() for v in values])
    result: Any = accelerator.reduce(stacked, reduction="sum")
    return [float(v) for v in result]


def autocast(precision: str, device: torch.device) -> torch.autocast:
    """Return the autocast of ``train.precision``: "no", "bf16" or "fp16".

    Accelerate's autocast would apply to all runs of a process.
    """
    dtype = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


def distribute(
    model: nn.Module, strategy: str, accelerator: Accelerator, blocks: Iterable[nn.Module] = ()
) -> nn.Module:
    """Move a model to its device; over many processes replicate ("ddp") or shard ("fsdp2") it.

    ``Accelerator.prepare`` is not used: it shards on GPUs only, and wraps ``forward``.

    Args:
        model: The model. FSDP2 changes it in place, DDP wraps it (see ``unwrap``).
        strategy: "ddp" or "fsdp2".
        blocks: The repeated parts of the model, sharded one by one.
    """
    model.to(accelerator.device)
    if accelerator.num_processes == 1:
        return model
    if strategy == "ddp":
        on_gpu = accelerator.device.type == "cuda"
        devices = [accelerator.device.index] if on_gpu else None
        return DistributedDataParallel(model, device_ids=devices)
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside DDP's wrapper, or the model itself."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def reshard(model: nn.Module) -> None:
    """Free the weights that a sharded model gathered for its last evaluation."""
    if isinstance(model, FSDPModule):
        model.reshard()


@contextlib.contextmanager
def accumulating(model: nn.Module, last: bool) -> Iterator[None]:
    """Exchange gradients between processes only in the last part of a step."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
    if isinstance(model, DistributedDataParallel) and not last:
        with model.no_sync():
            yield
    else:
        yield


def gather_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor in full, whether it is sharded or not. Every process must call it."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return a full tensor on the device of ``parameter``, sharded if that is sharded."""
    tensor = tensor.to(parameter.device)
    if isinstance(parameter, DTensor):
        return distribute_tensor(tensor, parameter.device_mesh, parameter.placements)
    return tensor


def gather_state(tensors: dict[str, Tensor], *, keep: bool = True) -> dict[str, Tensor]:
    """Return full copies of all tensors on the CPU, gathered one after the other.

    Every process must call it. Without ``keep`` it returns an empty dictionary.
    """
    gathered = {}
    for name, tensor in tensors.items():
        complete = gather_tensor(tensor)
        if keep:
            # A copy even on the CPU: the averages are exchanged with the parameters afterwards.
            gathered[name] = complete.to("cpu", copy=True)
    return gathered
