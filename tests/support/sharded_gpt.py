"""Run by two processes: a sharded GPT against one process with the whole model and batch.

The arguments are a position encoding and options of ``GPT`` as JSON.
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist

from comrope.experiments.common.distributed import create_accelerator, distribute, gather_state
from support.gpts import nano, text


def main(position: str, options: str) -> None:
    accelerator = create_accelerator("cpu")
    rank, part = accelerator.process_index, slice(2 * accelerator.process_index, None)
    torch.manual_seed(0)
    whole = nano(position, **json.loads(options))
    torch.manual_seed(0)
    model = nano(position, **json.loads(options))
    model = distribute(model, "fsdp2", accelerator, model.blocks)
    tokens = text(4, 17)
    for each, batch in ((whole, tokens), (model, tokens[part][:2])):
        each.zero_grad()
        each(batch).log_softmax(-1)[..., 0].mean().backward()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    for name, gradient in gather_state(gradients).items():
        torch.testing.assert_close(gradient, dict(whole.named_parameters())[name].grad, msg=name)
    assert list(gradients) == [name for name, _ in whole.named_parameters()]
    model.eval()
    for use_cache in (True, False):
        found = model.generate(tokens[part][:2], 6, use_cache=use_cache)
        assert torch.equal(found, whole.generate(tokens, 6)[part][:2])
    print("equal", rank)
    dist.destroy_process_group()


main(*sys.argv[1:])
