"""A module replayed as a CUDA graph: the same numbers, and only where it may be replayed."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from comrope.experiments.common import cuda_graph
from comrope.experiments.common.cuda_graph import replay_in_training
from comrope.models import ViT
from comrope.models.detection import PlainBackbone

needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def backbone(position: str, drop_path: float) -> PlainBackbone:
    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 4, "embed_dim": 32, "depth": 3, "num_heads": 2}
    vit = ViT(position=position, drop_path_rate=drop_path, **sizes)
    return PlainBackbone(vit, window=3)


def learn(model: nn.Module, batches: list[torch.Tensor], cast=nullcontext) -> list[torch.Tensor]:
    """Losses and, after the last step, parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found = []
    for step, batch in enumerate(batches):
        torch.manual_seed(step)  # of what is dropped
        with cast():
            loss = model(batch).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach().clone())
    return [*found, *(parameter.detach() for parameter in model.parameters())]


@pytest.mark.parametrize(
    ("position", "half", "compiled", "drop_path"),
    [
        ("ape", False, False, 0.3),
        ("ape", True, True, 0.0),
        ("liere", True, False, 0.0),
        ("liere", False, True, 0.0),
        ("comrope-ap", False, False, 0.0),
        ("comrope-ap", True, True, 0.0),
        ("comrope-ld", True, False, 0.3),
        ("comrope-ld", False, True, 0.0),
        ("comrope-torus", True, True, 0.0),
        ("comrope-torus", False, False, 0.3),
    ],
)
class TestReplaying:
    pytestmark = needs_gpu

    def test_it_learns_as_without(self, position, half, compiled, drop_path):
        """Weights change between replays, an image of another size comes in between."""
        ordinary = backbone(position, drop_path).cuda().train()
        recorded = copy.deepcopy(ordinary)
        if compiled:
            for block in recorded.vit.blocks:
                block.compile()
        batches = [torch.rand(2, 3, size, 32, device="cuda") for size in (32, 32, 24, 32)]

        def cast():
            return torch.autocast("cuda", torch.bfloat16, enabled=half)

        with cast():
            replay_in_training(recorded, torch.zeros_like(batches[0]))
        wanted, found = learn(ordinary, batches, cast), learn(recorded, batches, cast)
        for right, got in zip(wanted, found, strict=True):
            torch.testing.assert_close(got, right, rtol=0, atol=2e-2 if half else 1e-4)
        recorded.eval()
        with torch.no_grad():
            torch.testing.assert_close(
                recorded(batches[0]), recorded.forward.ordinary(batches[0]), rtol=0, atol=0
            )


def test_only_what_is_like_the_sample_is_replayed(monkeypatch):
    module, replays = nn.Linear(3, 2), []

    def record(module, sample):
        ordinary = module.forward
        module.forward = lambda x: replays.append(x.shape) or ordinary(x)

    monkeypatch.setattr(cuda_graph.torch.cuda, "make_graphed_callables", record)
    replay_in_training(module, torch.zeros(4, 3))

    def call(rows, dtype=torch.float32):
        module.to(dtype)(torch.ones(rows, 3, dtype=dtype))

    with torch.no_grad():
        call(4)
    module.eval()
    call(4)
    module.train()
    call(5), call(4, torch.float64)
    module(torch.ones(4, 3, dtype=torch.float64, requires_grad=True))
    assert not replays
    call(4), call(5), call(4)
    assert replays == [(4, 3), (4, 3)]
    assert list(module.state_dict()) == ["weight", "bias"]
