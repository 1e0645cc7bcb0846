from __future__ import annotations

import os
import signal

import pytest
import torch
from helpers import COMMUTING

from comrope import METHODS

if "PYTEST_XDIST_WORKER" in os.environ:  # as many processes as cores: a thread for each
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
if not torch.cuda.is_available():  # before triton is imported: its kernels run interpreted then
    os.environ["TRITON_INTERPRET"] = "1"
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job is born deaf to it
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Corpora of tests are not those of the user; processes that tests start inherit it."""
    os.environ["COMROPE_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=COMMUTING)
def commuting(request: pytest.FixtureRequest) -> str:
    return request.param
