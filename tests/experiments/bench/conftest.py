from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="module")
def quick_bench():
    """Short samples, few methods, one thread: here times need not be good, only there."""
    from comrope.experiments.bench import rotations
    from comrope.experiments.common import timing

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)
        patch.setattr(timing, "AIM", 1e-3)
        patch.setattr(rotations, "COMMUTING", ("rope-mixed", "comrope-ld"))
        yield
    torch.set_num_threads(threads)
