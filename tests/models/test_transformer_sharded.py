"""Sharded models whose layers share a rotation, or not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("position", "options"),
    [
        ("comrope-ld", {"share_rotations": "layers", "rotate_values": True}),
        ("comrope-torus", {"share_rotations": "layers", "num_kv_heads": 2}),
        ("comrope-torus", {"tie_embeddings": False}),
    ],
)
def test_two_processes_have_the_gradients_and_texts_of_one(position, options):
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, *launch, "-m", "support.sharded_gpt", position, json.dumps(options)],
        env=ENVIRONMENT, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("equal") == 2
