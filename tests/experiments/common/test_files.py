"""Files of experiments are complete or not replaced; failures are user errors."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from comrope.experiments.common.errors import UserError
from comrope.experiments.common.files import write_files, write_tensors, write_text


def test_text_and_tensors(tmp_path):
    write_text(tmp_path / "new" / "a.txt", "σ = 1")
    assert (tmp_path / "new" / "a.txt").read_text(encoding="utf-8") == "σ = 1"
    tensor = torch.randn(3, 4, requires_grad=True)
    write_tensors(tmp_path / "a.safetensors", {"w": tensor.mT})
    assert torch.equal(load_file(tmp_path / "a.safetensors")["w"], tensor.detach().mT)


def test_nothing_is_replaced_if_one_cannot_be_written(tmp_path):
    for name in ("a", "b"):
        write_text(tmp_path / name, "before")

    def fail(path):
        path.write_text("half")
        raise OSError(28, "No space left")

    with pytest.raises(UserError, match="No space left"):
        write_files({tmp_path / "a": lambda path: path.write_text("after"), tmp_path / "b": fail})
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"a": "before", "b": "before"}


def test_a_place_that_cannot_be_written_is_a_user_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file"):
        write_text(tmp_path / "file" / "below", "text")
