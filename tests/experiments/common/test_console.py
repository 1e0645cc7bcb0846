"""What is printed, and what is known about the machine."""

from __future__ import annotations

import pytest
import torch

from comrope.experiments.common.console import machine, now, peak_memory, progress_bar, say

CPU = torch.device("cpu")


def test_lines_are_printed_to_stderr_unchanged(capfd):
    line = "a [bold]path[/bold] " + "x" * 300
    say(line)
    out, err = capfd.readouterr()
    assert (out, err) == ("", line + "\n")


@pytest.mark.parametrize("shown", [False, True])
def test_a_progress_bar_may_be_hidden(shown, capfd):
    with progress_bar(shown, "steps") as bar:
        row = bar.add_task("the run", total=2, note="")
        bar.update(row, completed=2, note="loss 1.0")
    err = capfd.readouterr().err
    assert ("the run" in err) == shown
    assert ("2/2" in err) == shown


def test_the_machine_has_hardware_versions_and_date():
    about = machine(CPU)
    assert about["device"]
    assert torch.__version__.startswith(about["torch"])
    assert about["date"] == now()[:10]
    assert set(about) == {"device", "python", "comrope", "torch", "timm", "accelerate", "date"}


def test_peak_memory_is_that_of_the_process():
    before = peak_memory(CPU)
    held = torch.ones(64 * 2**20)  # 256 MiB
    assert peak_memory(CPU) >= before
    assert 0.25 <= peak_memory(CPU) < 1000
    assert len(held)
